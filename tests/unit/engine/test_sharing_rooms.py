"""Which drafters are told that drafts may share budgets, and what a block head makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.plan import Plan
from outrider.core.draft import EMPTY, Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.drafters.block import Block
from outrider.drafters.mix import Mix
from outrider.engine.drafting import Drafting
from outrider.runners.cuda_graphs import BatchShape
from outrider.runners.graph_runner import GraphRunner
from outrider.testing.toy import ToyRunner

VOCAB = 64


class Watched(Drafter):
    """Keeps the rounds that it is asked for."""

    def __init__(self, **traits: Any) -> None:
        self.traits = Traits(name="watched", max_tokens=7, **traits)
        self.views: list[RoundView] = []

    def propose(self, view: RoundView) -> list[Draft]:
        self.views.append(view)
        return [EMPTY] * len(view.seqs)


def texts(count: int = 4, **options: Any) -> list[Sequence]:
    return [Sequence(i, [1, 2], 1, SamplingParams(**options), i) for i in range(count)]


def runner(*, asynchronous: bool = True) -> ToyRunner:
    made = ToyRunner(VOCAB)
    made.asynchronous = asynchronous
    return made


def rooms(drafter: Drafter, asked: Watched, controller: Controller | None = None, **options: bool) -> Any:
    """What the drafter is told of one round."""
    Drafting(drafter, runner(**options), controller).propose(RoundView(texts(), [7, 7, 5, 7]))
    return asked.views[-1].room


def test_room_is_offered_where_rounds_overlap_and_nobody_needs_the_rows_or_compares_drafts():
    one = Watched()
    assert rooms(one, one) == (7, 7, 5, 7)
    one = Watched()
    assert rooms(one, one, asynchronous=False) is None
    one = Watched(follows_target=True)
    assert rooms(one, one) is None
    one = Watched(follows_target=True, ignores_scores=True)
    assert rooms(one, one) == (7, 7, 5, 7)
    one = Watched()
    assert rooms(Mix([one, Watched()], 8), one) is None


def test_parts_that_a_controller_asks_are_offered_what_there_is_room_for_beside_what_is_planned():
    times = {(b, w): (1 + 0.01 * b * w) / 1e3 for b in (1, 2, 4) for w in (1, 2, 4, 8)}
    members = [Member("watched", 7, pays_budget=True), Member("other", 7, pays_budget=True)]
    one = Watched()
    controller: Any = Controller(members, RoundCosts(PassTable(times, padded=True)), (1, 2, 4, 8))
    kind = RoundKind(4, 4, 16, ("watched",))
    controller.plan = lambda ids, budgets: Plan(kind, [3] * 4, [0] * 4, 8.0, 1e-3)
    assert rooms(Mix([one, Watched(runs_model=True)], 8), one, controller) == (7, 7, 5, 7)
    assert one.views[-1].budgets == (3, 3, 3, 3)


def block(packed: list[BatchShape], *, share: int = 0) -> Block:
    """A block drafter of seven tokens whose target has these packed passes."""
    graphs: Any = object.__new__(GraphRunner)
    graphs.model = SimpleNamespace(returns_taps=False, heads=SimpleNamespace(size=0))
    graphs._packed, graphs._chosen, graphs.max_rows = packed, {}, 1024
    made: Any = object.__new__(Block)
    made.lengths, made._graphs, made._share = (7,), graphs, share
    made.runner = SimpleNamespace(max_batch=64)
    return made


EIGHT = [BatchShape(8, 8, packed=16), BatchShape(8, 8, packed=32)]


def test_budgets_are_shared_where_a_packed_pass_takes_them_at_no_more_rows():
    view = RoundView(texts(8), [3] * 8, room=[7] * 8)
    shared = block(EIGHT).sharing(view)
    assert (shared.budgets, shared.room) == ([3] * 8, [7] * 8)
    assert block(EIGHT)._graphs.shared_tokens([3] * 8, 7) == 24
    assert block(EIGHT)._graphs.shared_tokens([3] * 5, 7) == 27  # rows that the pass has anyway
    assert block([]).sharing(view).room is None
    assert block(EIGHT).sharing(RoundView(texts(8), [5] * 8, room=[7] * 8)).room is None  # 48 rows take no 64
    assert block(EIGHT).sharing(RoundView(texts(8), [7] * 8, room=[7] * 8)).room is None  # all have theirs
    assert block(EIGHT).sharing(RoundView(texts(8), [3] * 8)).room is None
    assert block(EIGHT, share=3).sharing(RoundView(texts(8), [7] * 8, room=[7] * 8)).budgets == [3] * 8


def test_sequences_that_it_is_not_asked_for_have_no_room():
    shared = block(EIGHT).sharing(RoundView(texts(8), [3, 0, 3, 3, 3, 3, 0, 3], room=[7, 7, 7, 2, 9, 7, 7, 7]))
    assert shared.room == [7, 0, 7, 2, 7, 7, 0, 7]


@pytest.mark.parametrize("options", [{"logprobs": 1}, {"frequency_penalty": 0.5}])
def test_options_that_need_the_targets_logits_share_nothing(options: dict[str, Any]):
    seqs = [*texts(7), *texts(1, **options)]
    assert block(EIGHT).sharing(RoundView(seqs, [3] * 8, room=[7] * 8)).room is None
