"""What came of rounds with drafts is told by a few at once where rounds are repeated, and tells the same."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundKind, size_of
from outrider.control.member import Member
from outrider.control.overheads import PLAIN
from outrider.control.overlapped_costs import OverlappedCosts
from outrider.control.plan import Plan, plain_plan
from outrider.core.draft import EMPTY, Verdict
from outrider.drafters.base import Evidence
from outrider.engine import feedback, host_time
from outrider.engine.feedback import Feedback
from outrider.engine.host_time import HostTime
from outrider.engine.kept_plan import KeptPlan
from outrider.engine.proposal import NOBODY, Proposal

WIDTHS = (1, 2, 4, 8)
IDS = [3, 5, 8, 9]
LENGTHS = [3] * 4
PLAN = Plan(RoundKind(4, 4, 16, ("block",), 7), LENGTHS, [0] * 4, 9.0, 0.0012)


class World:
    """Feedback of rounds of four texts, for which a head drafts three tokens each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(host_time, "time", SimpleNamespace(perf_counter=lambda: self.now))
        passes = PassTable({(b, w): 0.001 + 0.0001 * b * w for b in (1, 2, 4) for w in WIDTHS}, padded=True)
        drafts = PassTable({(b, 1): 0.0001 for b in (1, 2, 4)}, padded=True)
        self.controller = Controller(
            [Member("block", 7, True, True)], OverlappedCosts(passes, {"block": drafts}), WIDTHS
        )
        host = HostTime()
        self.kept = KeptPlan(host)
        self.kept.begin(IDS, PLAN, 0.0)
        self.kept.use()
        self.feedback = Feedback([], self.controller, self.kept, host, overlaps=True)
        self.noted: list[int] = []
        add = self.controller._log.add

        def adding(accepted: Seq[Seq[int]]) -> None:
            self.noted.append(len(accepted))
            add(accepted)

        self.controller._log.add = adding

    def round(self, accepted: Seq[int], by: int | None, *, seconds: float = 0.0015, asked: int = 9) -> None:
        """One that was repeated, where `by` says who drafted; None: each is told of."""
        self.now += seconds
        proposal = Proposal([EMPTY] * 4, PLAN, (0,), 0, asked, by=by, lengths=LENGTHS)
        verdicts = {i: Verdict((1,) * (n + 1), tuple(range(n))) for i, n in zip(IDS, accepted, strict=True) if n >= 0}
        self.feedback.account(proposal, verdicts, IDS, seconds, 0)


def test_rounds_told_at_once_tell_what_each_would(monkeypatch: pytest.MonkeyPatch):
    worlds = {0: World(monkeypatch), None: World(monkeypatch)}
    for by, world in worlds.items():
        monkeypatch.setattr(host_time, "time", SimpleNamespace(perf_counter=lambda world=world: world.now))
        rng = random.Random(1)
        for _ in range(100):
            world.round([rng.randrange(4) for _ in IDS], by, seconds=0.0012 + 0.0006 * rng.random())
        world.feedback.tell()
    merged, single = worlds.values()
    assert merged.noted == [feedback._ASKED] * 25
    assert single.noted == [1] * 100
    assert merged.kept._tried == single.kept._tried
    assert merged.kept._worth == pytest.approx(single.kept._worth, rel=0.15)
    costs = [world.controller.costs.seconds(PLAN.kind) for world in worlds.values()]
    assert costs[0] == pytest.approx(0.0015, rel=0.1)
    assert costs[1] == pytest.approx(costs[0], rel=0.1)
    decided = [world.controller.forget(5).as_dict() for world in worlds.values()]
    assert decided[0]["rounds"] == decided[1]["rounds"] == 100
    assert merged.controller._round == single.controller._round
    assert merged.controller.acceptance[0].survival([8])[0] == pytest.approx(
        single.controller.acceptance[0].survival([8])[0], rel=0.05
    )


def test_all_is_told_before_a_plan_and_where_a_text_ends(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch)
    for _ in range(2):
        world.round([1, 2, 0, 3], 0)
    assert world.noted == []
    world.feedback.tell()
    assert world.noted == [2]
    world.round([1, 2, 0, 3], 0)
    world.round([1, -1, 0, 3], 0)  # one of them ended
    assert world.noted == [2, 1]
    world.round([1, -1, 0, 3], 0)
    world.feedback.account_rest(Proposal([EMPTY] * 4, PLAN, rest=1), IDS, 0.001, 0)
    assert world.noted == [2, 1, 2]


def test_rounds_in_which_a_drafter_catches_up_do_not_count_with_others(monkeypatch: pytest.MonkeyPatch):
    world = World(monkeypatch)
    for asked in (2, 3, 4, 5):
        world.round([1, 2, 0, 3], 0, asked=asked)
    assert world.noted == [2]


def test_plain_rounds_behind_drafts_are_not_what_plain_decoding_takes(monkeypatch: pytest.MonkeyPatch):
    """The device still works on rounds with drafts when the first of them are told of: what went by is not theirs."""
    world = World(monkeypatch)
    plain = plain_plan(4, world.controller.costs)
    proposal = Proposal([EMPTY] * 4, plain, rest=2, by=NOBODY, lengths=[0] * 4)

    def rest(seconds: float, number: int) -> None:
        world.now += seconds
        world.feedback.account_rest(proposal, IDS, seconds, number, steady=True)

    for number in (1, 2, 3, 4):
        rest(9 * plain.seconds, number)
    for number in range(5, 200):
        rest(plain.seconds, number)
    world.feedback.tell()
    plain_sums = world.controller.overheads._known[size_of(4), PLAIN]
    assert plain_sums.above == pytest.approx(0.0, abs=0.02 * plain.seconds * plain_sums.below / 4)


def test_what_it_takes_to_begin_is_not_the_overhead_of_a_drafter(monkeypatch: pytest.MonkeyPatch):
    """It does not come again: only rounds of a drafter that has caught up with the texts count."""
    world = World(monkeypatch)
    for asked in (1, 2, 3):
        world.round([0, 0, 0, 0], 0, seconds=0.05, asked=asked)
    world.feedback.tell()
    assert not world.controller.overheads._known
    for asked in range(4, 12):
        world.round([1, 2, 0, 2], 0, seconds=0.0012, asked=asked)
    assert [*world.controller.overheads._known] == [(size_of(4), 0)]


@pytest.mark.parametrize("included", [True, False])
def test_guesses_of_a_drafter_that_is_part_of_the_one_asked_are_told(included: bool, monkeypatch: pytest.MonkeyPatch):
    """Lookups that a head's drafts are chosen against: the text judges theirs in every round, at no cost."""
    world, taken = World(monkeypatch), list[tuple[int, list[int], list[int], list[float]]]()
    traits = SimpleNamespace(watches=True, observes=False, limits_itself=True)
    lookups: Any = SimpleNamespace(traits=traits, take_evidence=lambda: [Evidence(IDS[0], 3, 2, 6), Evidence(99, 3, 3)])
    head: Any = SimpleNamespace(traits=SimpleNamespace(watches=False, observes=True, limits_itself=False))
    parts = [frozenset({1}) if included else frozenset[int](), frozenset[int]()]
    world.feedback = Feedback([head, lookups], world.controller, world.kept, HostTime(), parts, overlaps=True)

    def note(member: int, seq_ids: Seq[int], lengths: Seq[int], accepted: Seq[int], rounds: Seq[float]) -> None:
        taken.append((member, [*lengths], [*accepted], [*rounds]))

    monkeypatch.setattr(world.controller, "note_guesses", note)
    for _ in range(2 * feedback._ASKED):
        world.round([1, 2, 0, 3], 0)
    assert taken == ([(1, [3], [2], [2.0])] * 2 if included else [])  # whenever the controller is told of rounds
