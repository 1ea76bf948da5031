"""What a controller knows of a head: its cost from the start, and how sure it was of drafts that are judged."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance_models import native_testbed
from drafter_cast import with_heads
from plain_decoding import assert_same, request, run
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed

from outrider.control import measure
from outrider.control.choose import best_plan_of
from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.plan import Plan
from outrider.core.device_row import ConfidenceRow
from outrider.core.draft import Draft
from outrider.core.host_copy import HostCopy
from outrider.drafters.base import Drafter, DrafterContext
from outrider.drafters.guard import draft_problem
from outrider.drafters.mix import Mix
from outrider.drafters.none import NoDraft
from outrider.drafters.registry import parse_drafter
from outrider.engine import kept_plan
from outrider.engine.adaptive import CostMeter
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits
from outrider.runners.native import NativeRunner
from outrider.verify.base import make_verifier

SECONDS = 0.6  # what every timed work takes here
SPECS = {  # the tokens of the draft that is timed
    "block:model=tiny-block": 5,
    "block:model=tiny-block,tree=7": 7,
    "eagle:model=tiny-eagle3,k=4": 1,
    "eagle:model=tiny-eagle1,tree=7,depth=3,top_k=3": 7,
    "medusa:model=tiny-medusa,tree=9": 9,
    "mtp:model=tiny-mtp,k=2": 1,
}


@pytest.fixture(scope="module")
def world() -> Testbed:
    return native_testbed("llama-deep")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every timed work takes SECONDS; its calls are counted."""
    timed: list[int] = []

    def fixed(work: Any, device: Any, before: Any = None) -> float:
        work()
        timed.append(1)
        return SECONDS

    monkeypatch.setattr(measure, "_median_seconds", fixed)
    return timed


def build(world: Testbed, spec: str, mode: Any = "seeded") -> tuple[NativeRunner, Drafter]:
    target = world.target(4096)
    assert isinstance(target, NativeRunner)
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, mode=mode, target=target)
    return target, parse_drafter(with_heads(spec, target)).build(context)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_a_heads_drafts_are_timed_at_start(world: Testbed, spec: str, mode: str, clock: list[int], tmp_path: Path):
    target, drafter = build(world, spec, mode)
    free = target.pool.free
    control = CostMeter(target, 4, tmp_path, ("facts",)).controller(drafter)
    assert control is not None
    assert target.pool.free == free  # made-up sequences are gone
    name, tokens = drafter.traits.name, drafter.lengths[0] if drafter.lengths else 1
    if mode == "seeded":
        assert tokens == SPECS[spec]
    table = control.costs.drafters[name]
    assert table.seconds == {(1, 1): SECONDS / tokens, (4, 1): SECONDS / tokens}
    plain = control.costs.seconds(RoundKind(1, 1, 1))
    (member,) = control.members
    for length in (1, drafter.traits.max_tokens):
        steps = next((n for n in member.lengths if n >= length), length)
        drafted = control.costs.seconds(RoundKind(1, 1, 1, (name,), steps))
        whole = SECONDS if drafter.lengths else SECONDS * length
        assert drafted - plain == pytest.approx(whole)

    clock.clear()
    again = CostMeter(target, 4, tmp_path, ("facts",)).controller(drafter)
    assert not clock  # kept from the last start
    assert again is not None
    assert again.costs.drafters[name].seconds == table.seconds


def test_times_belong_to_the_head_that_is_named(world: Testbed, clock: list[int], tmp_path: Path):
    target, drafter = build(world, "eagle:model=tiny-eagle3,k=4")
    CostMeter(target, 4, tmp_path, ()).controller(drafter)
    target, other = build(world, "eagle:model=tiny-eagle1,k=4")
    clock.clear()
    CostMeter(target, 4, tmp_path, ()).controller(other)
    assert len(clock) == 2  # its own, for one sequence and for four


def test_no_room_is_no_cost(world: Testbed, clock: list[int]):
    target = world.target(48)
    assert isinstance(target, NativeRunner)
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=target)
    drafter = parse_drafter(with_heads("block:model=tiny-block", target)).build(context)
    control = CostMeter(target, 4, None, ()).controller(drafter)
    assert control is not None
    assert not control.costs.drafters


class Noting(Controller):
    """Always asks the head, for as many tokens as pay best, and keeps what it is told of confidences."""

    def __init__(self, drafter: Drafter, widths: Seq[int]) -> None:
        times = {(b, w): 1.0 + 0.02 * b * w for b in (1, 2, 4) for w in widths or (1, 8)}
        table = PassTable(times, padded=bool(widths))
        members = [Member("block", drafter.traits.max_tokens, True, bool(widths), drafter.lengths)]
        super().__init__(members, RoundCosts(table), widths)
        self.costs.observe = lambda *_: None  # what rounds take on a busy machine decides nothing
        self.told: list[tuple[int, tuple[float, ...], int, int]] = []

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        if not any(budgets):
            return super().plan(seq_ids, budgets)
        outlook = self._outlook(0, seq_ids, np.minimum(budgets, self.members[0].max_tokens))
        return best_plan_of([outlook], 0, self.costs, self.widths)

    def note_stated(
        self, member: int, seq_ids: Seq[int], stated: Seq[Any], lengths: Seq[int], accepted: Seq[int]
    ) -> None:
        super().note_stated(member, seq_ids, stated, lengths, accepted)
        rows = map(tuple, np.stack([*stated]).tolist())
        self.told += zip(seq_ids, rows, lengths, accepted, strict=True)


def answered(world: Testbed, target: Any, drafter: Drafter, control: Controller, mode: Any) -> Engine:
    """An engine that answered six requests, with the text of plain decoding where a seed fixes that."""
    limits, verifier = EngineLimits(max_batch=4), make_verifier(mode)
    tried = Engine(target, drafter, verifier, TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits, controller=control)
    rng = random.Random(5)
    asked = [request(rng.choices(range(1, VOCAB), k=7), max_tokens=30, temperature=0.8, seed=i) for i in range(6)]
    for told, each in zip(run(tried, asked), asked, strict=True):
        if mode == "seeded":
            assert_same(told, world.judged(each), tolerance=1e-4)
    return tried


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waited", "in flight"])
@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_confidences_reach_the_controller_once_drafts_are_judged(world: Testbed, asynchronous: bool, mode: Any):
    target, drafter = build(world, "block:model=tiny-block", mode)
    target.asynchronous = asynchronous
    control = Noting(drafter, (1, 2, 4, 6) if asynchronous else ())
    made: dict[tuple[float, ...], int] = {}
    propose = drafter.propose

    def watched(view: Any) -> Any:
        drafts = propose(view)
        for seq, draft in zip(view.seqs, drafts or (), strict=True):
            if draft.confidence is not None:
                made[tuple(draft.confidence.read().tolist())] = seq.id
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    tried = answered(world, target, drafter, control, mode)
    assert tried.stats.draft_failures == 0
    assert len(control.told) > 20
    for seq_id, stated, length, accepted in control.told:
        assert made[stated] == seq_id  # the row is that sequence's own
        assert len(stated) == 5  # of every token of the block, cut or not
        assert 0 <= accepted <= length <= 5
        assert all(0 < each < 1 for each in stated)
    assert any(accepted for *_, accepted in control.told)
    assert not control.acceptance[0]._rows


class Scoring(Noting):
    """Keeps how many tokens were planned of each draft, and how many scored."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter, ())
        self.scored: list[tuple[int, int]] = []

    def note(
        self, seq_ids: Seq[int], rows: Seq[int], plan: Plan, drafted: Seq[int], *more: Any, **options: Any
    ) -> None:
        super().note(seq_ids, rows, plan, drafted, *more, **options)
        self.scored += [(n, m) for n, m in zip(plan.lengths, drafted, strict=True) if n]


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_a_draft_is_scored_as_far_as_its_head_is_sure_in_mode_seeded_alone(world: Testbed, mode: Any):
    target, drafter = build(world, "block:model=tiny-block", mode)
    target.asynchronous = False
    control = Scoring(drafter)
    tried = answered(world, target, drafter, control, mode)
    assert len(control.scored) > 20
    assert any(m != n for n, m in control.scored) == (mode == "seeded")
    assert any(m > n for n, m in control.scored) == (mode == "seeded")  # it was surer than its plan
    assert control.acceptance[0].drafts > 20  # the text judges them, scored or not
    assert not tried.drafting.feedback._open


@pytest.mark.parametrize("mixed", [False, True])
def test_only_drafts_that_are_compared_say_how_sure_they_are(world: Testbed, mixed: bool):
    """Without a controller nobody reads it of a single drafter; a mix compares what its members expect."""
    target, head = build(world, "block:model=tiny-block", "seeded")
    target.asynchronous = True
    told: list[ConfidenceRow | None] = []
    propose = head.propose

    def watched(view: Any) -> Any:
        drafts = propose(view)
        told.extend(draft.confidence for draft in drafts or () if draft)
        return drafts

    head.propose = watched  # type: ignore[method-assign]
    drafter = Mix([NoDraft(), head], VOCAB) if mixed else head
    tried = Engine(target, drafter, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids)
    asked = [request((3, 1, 4, 1, 5), max_tokens=30, temperature=0.8, seed=i) for i in range(2)]
    for made, each in zip(run(tried, asked), asked, strict=True):
        assert_same(made, world.judged(each), tolerance=1e-4)
    assert len(told) > 5
    assert all((each is not None) == mixed for each in told)


@pytest.mark.parametrize("rounds", [0, 10**9], ids=["lasting", "brief"])
def test_confidences_are_copied_only_where_a_plan_is_brief(
    world: Testbed, rounds: int, monkeypatch: pytest.MonkeyPatch
):
    """Of drafts by a plan that lasts nobody reads them: the next one is made at another place of the text."""
    monkeypatch.setattr(kept_plan, "_BRIEF_ROUNDS", rounds)
    target, drafter = build(world, "block:model=tiny-block", "seeded")
    target.asynchronous = True
    control, told, propose = Noting(drafter, (1, 2, 4, 6)), list[bool](), drafter.propose

    def watched(view: Any) -> Any:
        drafts = propose(view)
        told.extend(draft.confidence is not None for draft in drafts or () if draft)
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    tried = Engine(target, drafter, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids, controller=control)
    asked = [request((3, 1, 4, 1, 5 + i), max_tokens=60, temperature=0.8, seed=i) for i in range(3)]
    for made, each in zip(run(tried, asked), asked, strict=True):
        assert_same(made, world.judged(each), tolerance=1e-4)
    assert len(told) > 10
    assert all(told) if rounds else not any(told[len(told) // 2 :])  # the first plan is not made yet when it is asked


def test_what_is_no_confidence_is_no_draft():
    import torch

    good = ConfidenceRow(HostCopy(torch.tensor([[0.5, float("nan"), 2.0]])), 0)
    assert good.read().tolist() == [0.5, 0.0, 1.0]
    assert not draft_problem(Draft((1, 2), confidence=good))
    for bad in (0.5, [0.1], ConfidenceRow(good.block, 1), ConfidenceRow(HostCopy(torch.zeros(2, 2).long()), 0)):
        assert "confidence" in draft_problem(Draft((1, 2), confidence=bad))  # type: ignore[arg-type]
