"""What came of rounds with drafts is told by a few at once where rounds are repeated, and tells the same."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from types import SimpleNamespace

import pytest

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundKind
from outrider.control.member import Member
from outrider.control.overlapped_costs import OverlappedCosts
from outrider.control.plan import Plan, plain_plan
from outrider.core.draft import EMPTY, Verdict
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
            world.round([rng.randrange(4) for _ in IDS], by, seconds=0.001 + 0.001 * rng.random())
        world.feedback.tell()
    merged, single = worlds.values()
    assert merged.noted == [feedback._ASKED] * 25
    assert single.noted == [1] * 100
    assert merged.kept._tried == single.kept._tried
    assert merged.kept._worth == pytest.approx(single.kept._worth, rel=0.15)
    costs = [world.controller.costs.seconds(PLAN.kind) for world in worlds.values()]
    assert costs[0] == pytest.approx(0.0015, rel=0.1)
    rates = [world.controller.trust.rate(0, 4) / each for world, each in zip(worlds.values(), costs, strict=True)]
    assert rates[0] == pytest.approx(rates[1], rel=0.05)
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
    assert world.controller.trust._plain_pace(4) == pytest.approx(1.0, abs=0.02)


def test_what_a_drafter_loses_where_it_begins_is_known_once_it_has_begun(monkeypatch: pytest.MonkeyPatch):
    """Nine tokens in 1.2 ms are promised: three rounds of 5 ms with one token each lose 15 - 3 * 1.2 * 4 / 9."""
    world = World(monkeypatch)
    beginnings = world.controller.beginnings
    for asked in (1, 2, 3):
        world.round([0, 0, 0, 0], 0, seconds=0.005, asked=asked)
    world.feedback.tell()
    assert beginnings.seconds(0, 4) == 0.0
    for asked in (4, 5, 6, 7):
        world.round([1, 2, 0, 2], 0, seconds=0.0012, asked=asked)
    assert beginnings.seconds(0, 4) == pytest.approx(0.015 - 3 * 0.0012 * 4 / 9, rel=1e-6)
