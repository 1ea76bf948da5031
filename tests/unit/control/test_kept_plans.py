"""For how long a plan is kept, and which rounds tell what plain decoding takes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from math import ceil
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.plan import Plan, plain_plan
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, Evidence, RoundView, Traits
from outrider.engine import drafting, host_time, kept_plan
from outrider.engine.drafting import Drafting, Proposal
from outrider.engine.host_time import HostTime
from outrider.engine.kept_plan import KeptPlan
from outrider.runners.device_state import DeviceState
from outrider.testing.toy import ToyRunner

WIDTHS = (1, 2, 4)


@pytest.fixture(autouse=True)
def free_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "_WATCHING_SHARE", 1.0)


class Watcher(Drafter):
    """Drafts one token wherever it is asked to, and counts how often it watches."""

    traits = Traits(name="watcher", max_tokens=1, pays_budget=True, drafts_ahead=True, watches=True)

    def __init__(self) -> None:
        self.watched = 0

    def propose(self, view: RoundView) -> list[Draft]:
        return [Draft((1,), source="watcher") if budget else EMPTY for budget in view.budgets]

    def watch(self, view: RoundView) -> None:
        self.watched += 1


class Scripted(Controller):
    """Plans what it is told to, and notes how often it was asked and what rounds were said to take."""

    def __init__(self, drafts: bool = False, seconds: float = 1.0) -> None:
        table = PassTable({(b, w): seconds for b in (1, 2, 4) for w in WIDTHS}, padded=True)
        super().__init__([Member("watcher", 1, pays_budget=True)], RoundCosts(table), WIDTHS)
        self.drafts, self.asked, self.rounds = drafts, 0, 0
        self.timed: list[tuple[RoundKind, float]] = []
        self.costs.observe = lambda kind, seconds, rounds=1: self.timed.extend([(kind, seconds)] * rounds)

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        self.asked += 1
        batch = len(seq_ids)
        plan = replace(plain_plan(batch, self.costs), rounds=self.rounds)
        if not self.drafts:
            return plan
        kind = RoundKind(batch, 2, 2 * batch, ("watcher",))
        return Plan(kind, [1] * batch, [0] * batch, 2.0 * batch, plan.seconds)


def sequences(count: int) -> list[Sequence]:
    return [Sequence(i, [1, 2], 2, SamplingParams(max_tokens=9), seed=0, limit=9) for i in range(count)]


class Rounds:
    """Proposes rounds, each accounted for once the next one is proposed, as where rounds overlap."""

    def __init__(self, controller: Scripted, tokens: int = 4, *, overlap: bool = True) -> None:
        """tokens: that a round of two sequences brings."""
        runner: Any = ToyRunner(8)
        runner.asynchronous = overlap
        self.controller, self.drafter = controller, Watcher()
        self.drafting = Drafting(self.drafter, runner, controller)
        self.before: tuple[Proposal, list[int]] | None = None
        self.verdict = Verdict((1,) * (tokens // 2), tuple(range(tokens // 2 - 1)))

    def view(self, seqs: Seq[Sequence], *, behind: bool, budget: int = 1) -> RoundView:
        """behind: the round is launched behind another."""
        state = DeviceState(torch.zeros(len(seqs)), torch.zeros(len(seqs), 2)) if behind else None
        return RoundView(seqs, [budget] * len(seqs), state)

    def propose(self, seqs: Seq[Sequence]) -> Proposal:
        view = self.view(seqs, behind=self.drafting.runner.asynchronous)
        proposal = cast(Proposal, self.drafting.propose(view))
        if self.before is not None:
            done, ids = self.before
            self.drafting.account(done, dict.fromkeys(ids, self.verdict), ids, 1.0)
        self.before = proposal, [seq.id for seq in seqs]
        return proposal


class Clock:
    """Stands still but for what is said to take time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (drafting, host_time):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def takes(self, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*args: Any) -> Any:
            self.now += seconds
            return work(*args)

        return slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def planned(run: Rounds, clock: Clock, rounds: int, *, newcomers: bool = False) -> list[float]:
    """When plans were made, which take a second, in so many rounds of a second or more."""
    controller, found = run.controller, list[float]()
    controller.plan = clock.takes(1.0, controller.plan)
    seqs = sequences(rounds + 2)
    for i in range(rounds):
        before, began = controller.asked, clock.now
        at = i if newcomers else 0
        assert run.propose(seqs[at : at + 2]).lengths == [int(controller.drafts)] * 2
        found += [began] if controller.asked > before else []
        clock.now = max(clock.now, began + 1)
    return found


def test_a_round_that_could_be_repeated_is_not_soon_launched_anew_for_another_plan(clock: Clock):
    """A plan takes a second and holds for 99 more; where a launch takes three, for 396 while rounds are repeated."""
    host = HostTime()
    kept, controller = KeptPlan(host), Scripted(drafts=True)
    for _ in range(100):
        host.note_launch(3.0)
    began = clock.now
    clock.now += 1.0
    kept.begin([0, 1], controller.plan([0, 1], [1, 1]), began)
    kept.use()
    for seconds, holds in ((98.0, True), (100.0, False), (395.0, False)):
        clock.now = 1.0 + seconds
        assert kept.goes_on
        assert kept.holds_for([0, 1]) is holds
    clock.now = 398.0
    assert not kept.goes_on


@pytest.mark.parametrize(("seconds", "counted"), [(0.0, 1.0), (2.0, 2.0), (50.0, 4.0)])
def test_a_round_of_a_probe_is_charged_by_what_it_took(seconds: float, counted: float):
    """One that somebody joined says nothing of its time, and a stall counts as four rounds: others take a second."""
    controller = Scripted(drafts=True)
    plan = replace(controller.plan([0, 1], [1, 1]), probe=True, rounds=4)
    controller.plan = lambda seq_ids, budgets: plan
    controller.probes.rate = 8.0
    run = Rounds(controller)
    proposal = run.propose(sequences(2))
    run.drafting.account(proposal, dict.fromkeys([0, 1], run.verdict), [0, 1], seconds)
    assert controller.probes._last.lost == pytest.approx((8.0 * counted - 4) / 2)


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plan, "_MAX_REST", 1e9)


@pytest.mark.parametrize("newcomers", [False, True])
def test_where_nobody_drafts_deciding_takes_a_small_share_of_the_time(newcomers: bool, clock: Clock, long_rests: None):
    run = Rounds(Scripted())
    made = planned(run, clock, 1200, newcomers=newcomers)
    rest = ceil(1 / kept_plan.RESTING_SHARE)
    assert np.diff(made).tolist() == [rest] * (len(made) - 1)
    assert len(made) == 1 + 1199 // rest


def test_no_rest_is_longer_than_so_long(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kept_plan, "_MAX_REST", 50.0)
    monkeypatch.setattr(kept_plan, "_LONGER", 1)
    made = planned(Rounds(Scripted()), clock, 200)
    assert np.diff(made).tolist() == [51.0] * 3


@pytest.mark.parametrize(
    ("tokens", "lost", "rest"), [(8, 0.125, 10.0), (8, 0.5, 32.0), (8, 1e6, 40.0), (2, 0.5, 50.0), (2, 1e6, 200.0)]
)
def test_a_rest_is_short_where_drafts_did_pay_of_late(
    tokens: int, lost: float, rest: float, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Four tokens in two seconds would pay; then some are lost by a probe: a part of the time, up to some length."""
    monkeypatch.setattr(kept_plan, "_MOST_SHARE", 1 / 65)
    monkeypatch.setattr(kept_plan, "_MAX_REST", 50.0)
    monkeypatch.setattr(kept_plan, "_SHORT_REST", 10.0)
    kept, controller = KeptPlan(HostTime()), Scripted(drafts=True)
    asking, plain = controller.plan([0, 1], [1, 1]), plain_plan(2, controller.costs)
    kept.begin([0, 1], asking, clock.now)
    for _ in range(3):
        kept.note(asking, tokens, 2.0, 2.0)
    if tokens == 2:
        kept._spent = 0.0  # what those lost
    kept.note(replace(asking, probe=True), 0, lost, 2.0)
    kept.begin([0, 1], plain, clock.now)
    kept.use()
    clock.now += (rest - 0.5) * plain.seconds
    assert kept.holds_for([0, 1])
    clock.now += plain.seconds
    assert not kept.holds_for([0, 1])


def test_a_rest_is_of_one_size_of_batch(clock: Clock, long_rests: None):
    """Newcomers in a batch of another size are planned for at once, and then rest for as long; who is left is not."""
    run, seqs = Rounds(Scripted()), sequences(8)
    asked = list[int]()
    for ids in ((0, 1), (0, 1), (1,), (2, 3), (2, 3, 4), (2, 3, 5), (5, 6), (5, 6, 7)):
        before = run.controller.asked
        run.propose([seqs[i] for i in ids])
        asked.append(run.controller.asked - before)
        run.controller.plan = clock.takes(1.0, Scripted.plan.__get__(run.controller))
        clock.now += 1
    assert asked == [1, 1, 0, 0, 1, 0, 0, 0]


def test_the_engine_computes_no_budgets_while_nobody_is_asked(clock: Clock, long_rests: None):
    """Nor are sequences planned for then; newcomers are, in the round after the first."""
    run, seqs = Rounds(Scripted()), sequences(5)
    run.controller.plan = clock.takes(1.0, run.controller.plan)
    drafting = run.drafting
    assert drafting.max_draft == 1  # nothing is known yet
    run.propose(seqs[:2])
    assert drafting.max_draft == 0

    def round_of(own: Seq[Sequence]) -> Plan:
        view = run.view(own, behind=True, budget=drafting.max_draft)
        return cast(Plan, cast(Proposal, drafting.propose(view)).plan)

    assert round_of(seqs[:2]) is round_of(seqs[:2])
    assert (len(round_of(seqs[2:]).lengths), drafting.max_draft, run.controller.asked) == (3, 1, 1)
    round_of(seqs[2:])
    assert (drafting.max_draft, run.controller.asked) == (0, 2)
    clock.now += 1 / kept_plan.RESTING_SHARE
    assert drafting.max_draft == 1


@pytest.mark.parametrize("drafts", [True, False])
def test_newcomers_are_planned_for_while_the_device_works(drafts: bool, clock: Clock, long_rests: None):
    """Their first round goes by the last plan, also where none is launched behind another; nobody watches in it."""
    run, seqs = Rounds(Scripted(drafts=drafts)), sequences(6)
    run.propose(seqs[:2])
    clock.now += 1
    asked, watched = run.controller.asked, run.drafter.watched
    for behind, own, more in (
        (False, seqs[2:4], 0),
        (True, seqs[2:4], 1),
        (False, seqs[3:6], 0),
        (False, seqs[3:6], 1),
    ):
        proposal = cast(Proposal, run.drafting.propose(run.view(own, behind=behind)))
        assert proposal.lengths == [int(drafts)] * len(own)
        asked += more
        assert run.controller.asked == asked
        clock.now += 1e6
    assert run.drafter.watched == watched + (not drafts)


def test_a_probe_is_not_the_first_round_of_newcomers(clock: Clock):
    run, seqs = Rounds(Scripted(drafts=True)), sequences(4)
    plan = run.controller.plan
    run.controller.plan = lambda seq_ids, budgets: replace(plan(seq_ids, budgets), probe=True)
    assert run.propose(seqs[:2]).lengths == [1, 1]
    clock.now += 1
    proposal = cast(Proposal, run.drafting.propose(run.view(seqs[2:], behind=False)))
    assert proposal.lengths == [0, 0]


@pytest.mark.parametrize(("probe", "tokens", "in_vain"), [(True, 2, 8.0), (False, 2, 8.0), (False, 5, 0.0)])
def test_drafts_in_vain_are_part_of_it_too(
    probe: bool, tokens: int, in_vain: float, clock: Clock, long_rests: None
) -> None:
    """Eight rounds of two seconds, in which plain decoding brings four tokens; what pays makes up for all before it."""
    kept, controller = KeptPlan(HostTime()), Scripted(drafts=True)
    began = clock.now
    clock.now += 1  # it takes a second to plan
    kept.begin([0, 1], replace(controller.plan([0, 1], [1, 1]), probe=probe, rounds=8), began)
    for _ in range(8):
        kept.use()
        kept.note(cast(Plan, kept.plan), tokens, 2.0, 2.0)
    kept.begin([0, 1], plain_plan(2, controller.costs), clock.now)
    kept.use()
    spent = in_vain + (1.0 if in_vain else 0.0)
    assert kept._until - clock.now == pytest.approx(spent / kept_plan.RESTING_SHARE - spent)


@pytest.mark.parametrize(("tokens", "at_once"), [(5, True), (3, False)])
def test_newcomers_rest_as_long_only_where_drafts_did_not_pay(tokens: int, at_once: bool, clock: Clock):
    """Plans take no time, a probe before them 100 rounds of plain decoding; four tokens in a round would pay."""
    kept, controller = KeptPlan(HostTime()), Scripted(drafts=True)
    asking = controller.plan([0, 1], [1, 1])
    kept.begin([0, 1], asking, clock.now)
    for _ in range(3):
        kept.note(asking, tokens, 2.0, 2.0)
    kept.note(replace(asking, probe=True), 0, 100.0, 2.0)
    kept.begin([0, 1], plain_plan(2, controller.costs), clock.now)
    kept.use()
    clock.now += 1
    assert kept.holds_for([0, 1])
    assert kept.holds_for([2, 3]) is not at_once


def test_a_request_alone_is_planned_for_soon_whatever_came_of_others(clock: Clock):
    kept, controller = KeptPlan(HostTime()), Scripted(drafts=True)
    kept.note(replace(controller.plan([0], [1]), probe=True), 0, 100.0, 1.0)
    kept.begin([0], plain_plan(1, controller.costs), clock.now)
    kept.use()
    clock.now += 1
    assert kept.holds_for([0])
    assert not kept.holds_for([1])


@pytest.mark.parametrize(("trials", "planning", "rest"), [(True, 0.0, 16.0), (True, 0.1, 19.9), (False, 0.1, 318.4)])
def test_what_was_in_vain_delays_no_trial(trials: bool, planning: float, rest: float, clock: Clock):
    """A probe lost 1.5 rounds of a second. The drafter that is asked first is tried after 16 rounds, unless plans would
    take more than their share."""
    kept, controller = KeptPlan(HostTime(), trials=trials), Scripted(drafts=True)
    kept.note(replace(controller.plan([0, 1], [1, 1]), probe=True), 0, 1.5, 2.0)
    began = clock.now
    clock.now += planning
    kept.begin([0, 1], plain_plan(2, controller.costs), began)
    kept.use()
    assert kept._until - clock.now == pytest.approx(rest)


@pytest.mark.parametrize(("settled", "share"), [(False, kept_plan.ASKING_SHARE), (True, kept_plan.SETTLED_SHARE)])
@pytest.mark.parametrize("newcomers", [False, True])
def test_planning_drafts_takes_its_share_of_the_time(settled: bool, share: float, newcomers: bool, clock: Clock):
    controller = Scripted(drafts=True)
    plan = controller.plan
    controller.plan = lambda seq_ids, budgets: replace(plan(seq_ids, budgets), settled=settled)
    made = planned(Rounds(controller), clock, 1000, newcomers=newcomers)
    assert np.diff(made).tolist() == [1 / share] * (len(made) - 1)


@pytest.mark.parametrize(("tokens", "made"), [(2, [0, 9, 17]), (4, [0])])
def test_a_plan_that_brings_less_than_plain_decoding_is_made_anew(tokens: int, made: list[int], clock: Clock):
    """Rounds of a second, plain ones of 0.7: two tokens in each are too few. After eight rounds that is known, and
    after 16 again of the same plan, made anew; all the while it may hold for 100."""
    controller = Scripted(drafts=True, seconds=0.7)
    controller.usual_seconds = lambda plan, drafted: 1.0
    assert planned(Rounds(controller, tokens), clock, 24) == made


@pytest.mark.parametrize(("tokens", "rounds"), [(0, 2), (3, 3)])
def test_a_plan_that_loses_much_is_made_anew_at_once(tokens: int, rounds: int, clock: Clock):
    """Of four texts, in rounds in which plain decoding brings six tokens, then eight: ten lost ones are more than bad
    luck, also where a text is about to end and has no draft any more."""
    kept, controller = KeptPlan(HostTime()), Scripted(drafts=True)
    plan = controller.plan([0, 1, 2, 3], [1] * 4)
    kept.begin([0, 1, 2, 3], plan, clock.now - 1)
    kept.use()
    for i in range(1, 5):
        assert kept.holds_for([0, 1, 2, 3]) == (i <= rounds)
        kept.note(plan.within([1, 1, 1, i % 2]), tokens, 1.0, 8.0 if i > 1 else 6.0)


def test_a_probe_lasts_as_long_as_it_says(clock: Clock):
    controller = Scripted(drafts=True)
    plan = controller.plan
    controller.plan = lambda seq_ids, budgets: replace(plan(seq_ids, budgets), probe=True, rounds=4)
    assert planned(Rounds(controller), clock, 12) == [0, 4, 8]


def test_a_probe_ends_where_it_has_lost_too_much(clock: Clock):
    """A token in a round where plain decoding brings two: five are lost in five rounds, as two and a half bring."""
    controller = Scripted(drafts=True)
    kept = KeptPlan(HostTime())
    kept.begin([0, 1], replace(controller.plan([0, 1], [1, 1]), probe=True, rounds=16), clock.now)
    for lost in range(1, 8):
        assert kept.holds_for([0, 1]) == (lost <= 6)
        kept.use()
        kept.note(cast(Plan, kept.plan), 1, 1.0, 2.0)


def test_a_probe_after_a_rest_does_not_last_as_long_as_that(clock: Clock, long_rests: None):
    """Where it ends, all are planned for: with a probe of four rounds, and then anew."""
    controller = Scripted()
    run, rest = Rounds(controller), round(1 / kept_plan.RESTING_SHARE)
    assert planned(run, clock, rest) == [0]
    controller.drafts = True
    plan = controller.plan
    controller.plan = lambda seq_ids, budgets: replace(plan(seq_ids, budgets), probe=True, rounds=4)
    asked = controller.asked
    clock.now += 1
    for _ in range(5):
        run.propose(sequences(2))
        clock.now += 1
    assert controller.asked == asked + 2


@pytest.mark.parametrize("drafts", [True, False])
def test_watching_takes_its_share_of_the_time(drafts: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock):
    """A watch of one second is followed by 99 without, or 19 beside drafts, in rounds of 10; rests do not end it."""
    monkeypatch.setattr(drafting, "_WATCHING_SHARE", 0.01)
    monkeypatch.setattr(drafting, "_BESIDE_SHARE", 0.05)
    run, watched = Rounds(Scripted(drafts=drafts)), list[int]()
    other, run.controller.note_guesses = Watcher(), lambda *given: None
    run.drafting.members.append(cast(Any, other))
    run.drafting._included.append(frozenset())
    other.watch = clock.takes(1.0, other.watch)
    for i in range(40):
        before = clock.now
        members = run.propose(sequences(2)).members
        watched += [i] if clock.now > before else []
        assert (1 in members) == (clock.now > before)
        clock.now = before + 10
    assert watched == list(range(0, 40, 2 if drafts else 10))


def test_nobody_watches_in_rounds_to_learn_from():
    controller = Scripted()
    controller.rounds = 5
    run = Rounds(controller)
    for _ in range(5):
        assert not run.propose(sequences(2)).members
    controller.rounds = 0
    assert run.propose(sequences(2)).members == (0,)


@pytest.mark.parametrize("overlap", [True, False])
def test_plain_rounds_are_timed_where_no_drafter_works_beside_them(overlap: bool):
    controller = Scripted()
    controller.rounds = 5  # to learn what plain decoding takes
    run = Rounds(controller, overlap=overlap)
    for _ in range(5):
        assert not run.propose(sequences(2)).members
    controller.drafts, controller.rounds = True, 0
    for _ in range(5):
        run.propose(sequences(2))
    told = [seconds for kind, seconds in controller.timed if kind.plain]
    assert told == [1.0] * (3 if overlap else 4)  # not of the first, nor of the last where they overlap
    told = [seconds for kind, seconds in controller.timed if not kind.plain]
    assert told == [1.0] * (1 if overlap else 4)  # drafters catch up first


def test_those_who_find_nothing_are_no_plain_round():
    controller = Scripted(drafts=True)
    plan = controller.plan([0, 1], [1, 1])
    controller.note_seconds(plan, [0, 0], 1.0)
    assert [(kind.plain, kind.width) for kind, _ in controller.timed] == [(False, 1)]


def test_after_many_rounds_with_drafts_come_some_without():
    table = PassTable({(1, w): 1.0 for w in WIDTHS}, padded=True)
    control = Controller([Member("lookup", 3, pays_budget=True)], RoundCosts(table), WIDTHS)
    spells = 0
    for _ in range(1800):
        plan = control.plan([0], [3])
        spells += bool(plan.rounds)
        assert plan.rounds in (0, 5)
        assert plan.asks == (plan.rounds == 0)
        control.note([0], [0], plan, plan.lengths, [plan.lengths])
    assert spells == 3


@pytest.mark.parametrize(("accepted", "planned"), [(1, 1), (0, 0)])
def test_guesses_that_would_pay_end_a_rest(accepted: int, planned: int, clock: Clock, long_rests: None):
    """Rounds take a second with drafts and without: one token that stands would double what they bring."""
    run = Rounds(Scripted())
    run.controller.plan = clock.takes(1.0, run.controller.plan)
    for _ in range(3):
        run.propose(sequences(2))
    asked = run.controller.asked
    run.drafter.take_evidence = lambda: [Evidence(0, 1, accepted)]
    for _ in range(3):
        run.propose(sequences(2))
        run.drafter.take_evidence = list
    assert run.controller.asked == asked + planned


class Held(Watcher):
    """Notes which sequences it was told to drop."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped: list[int] = []

    def forget(self, seq: Sequence) -> None:
        self.dropped.append(seq.id)


@pytest.mark.parametrize("overlap", [False, True])
def test_drafters_drop_a_text_when_the_host_has_less_to_do(overlap: bool):
    """One a round, where that is like its neighbours; no more than eight wait, and none where nothing is left to do."""
    run = Rounds(Scripted(), overlap=overlap)
    held = Held()
    run.drafting.members = [held]
    first, *others = sequences(12)
    run.drafting.forget(first)
    assert held.dropped == ([] if overlap else [0])
    run.propose(others[:2])
    proposal, ids = cast(tuple[Proposal, list[int]], run.before)
    run.drafting.account_rest(proposal, ids, 1.0, steady=False)
    assert held.dropped == ([] if overlap else [0])
    run.drafting.account_rest(proposal, ids, 1.0, steady=True)
    assert held.dropped == [0]
    for seq in others:
        run.drafting.forget(seq)
    assert held.dropped == ([0, 1, 2, 3] if overlap else [*range(12)])
    run.drafting.rest()
    assert held.dropped == [*range(12)]
