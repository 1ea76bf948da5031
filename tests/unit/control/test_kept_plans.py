"""For how many rounds a plan is kept, and which rounds tell what plain decoding takes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from outrider.control.choose import Plan, plain_plan
from outrider.control.controller import Controller, Member
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.engine import drafting
from outrider.engine.drafting import Drafting, Proposal
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

    def __init__(self, drafts: bool = False) -> None:
        table = PassTable({(b, w): 1e-9 for b in (1, 2, 4) for w in WIDTHS}, padded=True)  # any planning takes longer
        super().__init__([Member("watcher", 1, pays_budget=True)], RoundCosts(table), WIDTHS)
        self.drafts, self.asked, self.rounds = drafts, 0, 0
        self.timed: list[tuple[RoundKind, float]] = []
        self.costs.observe = lambda kind, seconds: self.timed.append((kind, seconds))

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

    def __init__(self, controller: Scripted, *, overlap: bool = True) -> None:
        runner: Any = ToyRunner(8)
        runner.asynchronous = overlap
        self.controller, self.drafter = controller, Watcher()
        self.drafting = Drafting(self.drafter, runner, controller)
        self.before: tuple[Proposal, list[int]] | None = None

    def propose(self, seqs: Seq[Sequence]) -> Proposal:
        proposal = cast(Proposal, self.drafting.propose(RoundView(seqs, [1] * len(seqs))))
        if self.before is not None:
            done, ids = self.before
            self.drafting.account(done, {i: Verdict((1,)) for i in ids}, ids, 1.0)
        self.before = proposal, [seq.id for seq in seqs]
        return proposal


def test_rests_grow_while_drafts_do_not_pay():
    rounds, controller = sequences(2), Scripted()
    run = Rounds(controller)
    asked: list[int] = []
    for i in range(400):
        before = controller.asked
        proposal = run.propose(rounds)
        assert bool(proposal.members) == (controller.asked > before)
        if controller.asked > before:
            asked.append(i)
    assert np.diff(asked).tolist() == [5, 9, 17, 33, 65, 129, 129]  # 4, 8, ... and 128 rounds in between
    assert run.drafter.watched == len(asked)


def test_newcomers_are_asked_for_at_once_and_those_who_leave_are_not_missed():
    controller, run = Scripted(), Rounds(Scripted())
    run = Rounds(controller)
    three = sequences(3)
    run.propose(three[:2])
    run.propose(three[:2])
    assert controller.asked == 1
    assert run.propose(three[:1]).drafts == [EMPTY]
    assert controller.asked == 1
    run.propose(three)
    assert controller.asked == 2


def test_a_plan_with_drafts_is_kept_for_longer_the_more_often_it_is_made():
    controller = Scripted(drafts=True)
    run, asked = Rounds(controller), list[int]()
    for i in range(200):
        before = controller.asked
        assert run.propose(sequences(2)).lengths == [1, 1]
        if controller.asked > before:
            asked.append(i)
    assert np.diff(asked).tolist() == [5, 9, 17, 33, 65, 65]
    controller.drafts = False  # another plan, and then the first one again
    while controller.asked == len(asked):
        run.propose(sequences(2))
    controller.drafts = True
    again, others = controller.asked, sequences(3)
    for _ in range(6):
        run.propose(others)
    assert controller.asked == again + 2


def test_watching_takes_its_share_of_the_time(monkeypatch: pytest.MonkeyPatch):
    """A watch of one second is followed by 99 without; rounds of 10 seconds, each of them planned."""
    clock = [0.0]
    monkeypatch.setattr(drafting, "_WATCHING_SHARE", 0.01)
    monkeypatch.setattr(drafting, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    controller = Scripted()
    run, watched = Rounds(controller), list[int]()
    run.drafter.watch = lambda view: clock.__setitem__(0, clock[0] + 1)
    for i in range(40):
        before = clock[0]
        members = run.propose(sequences(40)[i : i + 1]).members  # another each time: no rest
        watched += [i] if clock[0] > before else []
        assert members == ((0,) if clock[0] > before else ())
        clock[0] = before + 10
    assert watched == [0, 10, 20, 30]


def test_a_settled_plan_is_kept_longer_the_longer_it_stays_settled():
    controller = Scripted(drafts=True)
    planned = controller.plan
    controller.plan = lambda seq_ids, budgets: replace(planned(seq_ids, budgets), settled=True)
    run, asked = Rounds(controller), list[int]()
    for i in range(400):
        before = controller.asked
        assert run.propose(sequences(2)).lengths == [1, 1]
        if controller.asked > before:
            asked.append(i)
    assert np.diff(asked).tolist() == [5, 9, 17, 33, 65, 129, 129]


def test_a_round_that_takes_long_is_planned_each_time():
    controller = Scripted(drafts=True)
    controller.costs.target = PassTable({(2, 1): 1e6, (2, 2): 1e6}, padded=True)
    run = Rounds(controller)
    for _ in range(6):
        run.propose(sequences(2))
    assert controller.asked == 6


@pytest.mark.parametrize("overlap", [True, False])
def test_plain_rounds_are_timed_where_no_drafter_works_beside_them(overlap: bool):
    controller = Scripted()
    controller.rounds = 5  # to learn what plain decoding takes
    run = Rounds(controller, overlap=overlap)
    for _ in range(5):
        assert not run.propose(sequences(2)).members
    controller.drafts, controller.rounds = True, 0
    for _ in range(3):
        run.propose(sequences(2))
    told = [seconds for kind, seconds in controller.timed if kind.plain]
    assert told == ([0.0, 1.0, 1.0, 1.0, 0.0] if overlap else [1.0] * 5)
    assert all(seconds == 1.0 for kind, seconds in controller.timed if not kind.plain)


def test_those_who_find_nothing_are_no_plain_round():
    controller = Scripted(drafts=True)
    plan = controller.plan([0, 1], [1, 1])
    controller.note_seconds(plan, [0, 0], 1.0)
    assert [(kind.plain, kind.width) for kind, _ in controller.timed] == [(False, 1)]


def test_after_many_rounds_with_drafts_come_some_without():
    table = PassTable({(1, w): 1.0 for w in WIDTHS}, padded=True)
    control = Controller([Member("lookup", 3, pays_budget=True)], RoundCosts(table), WIDTHS)
    spells = 0
    for _ in range(1000):
        plan = control.plan([0], [3])
        spells += bool(plan.rounds)
        assert plan.rounds in (0, 5)
        assert plan.asks == (plan.rounds == 0)
        control.note([0], [0], plan, plan.lengths, plan.lengths)
    assert spells == 3
