"""What rounds take at start, with and without each drafter, is what the controller goes by."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Span
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.drafters.mix import Mix
from outrider.engine import drafting, engine, host_time, rehearsal
from outrider.engine.rehearsal import rehearse
from outrider.engine.request import EngineLimits
from outrider.kvcache.pages import PagePool
from outrider.runners.base import Scores
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

PASS, WIDTHS = 1.0, (1, 2, 4)


class Slow(Drafter):
    """Takes the host so long for each sequence that it is asked for."""

    def __init__(self, name: str, seconds: float, clock: SimpleNamespace) -> None:
        self.traits = Traits(name=name, max_tokens=3, pays_budget=True, runs_model=True)
        self.seconds, self.clock, self.asked = seconds, clock, 0

    def propose(self, view: RoundView) -> list[Draft]:
        self.asked += 1
        self.clock.now += self.seconds * len(view.seqs)
        return [Draft((1,) * budget, source=self.traits.name) if budget else EMPTY for budget in view.budgets]


class SlowRunner(ToyRunner):
    """Every pass takes as long. Rounds follow each other, so that those without drafts tell nothing."""

    asynchronous = True

    def __init__(self, clock: SimpleNamespace) -> None:
        super().__init__(64)
        self.clock = clock

    def score(self, spans: Seq[Span], after: Any = None) -> Scores:
        self.clock.now += PASS
        return super().score(spans, after)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(rehearsal, "SECONDS", 1e9)
    for module in (drafting, engine, host_time, rehearsal):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def start(
    clock: SimpleNamespace, asynchronous: bool = True, context: int | None = None, pages: int | None = None
) -> tuple[Controller, list[Slow], SlowRunner]:
    """A controller after the rehearsal."""
    drafters = [Slow("quick", 0.25, clock), Slow("slow", 2.0, clock)]
    runner = SlowRunner(clock)
    runner.asynchronous = asynchronous
    runner.context = context or runner.context
    runner.pool = PagePool(pages, runner.pool.size) if pages else runner.pool
    table = PassTable({(b, w): PASS for b in (1, 2, 4) for w in WIDTHS}, padded=True)
    members = [Member(each.traits.name, 3, runs_model=True, pays_budget=True) for each in drafters]
    control = Controller(members, RoundCosts(table), WIDTHS)
    limits = EngineLimits(max_batch=4, max_round_tokens=256)
    rehearse(runner, Mix(drafters, 64), make_verifier("seeded"), ByteTokenizer(), limits, control)
    return control, drafters, runner


def test_what_rounds_take_is_known_at_every_size_of_batch(clock: SimpleNamespace):
    control, _, runner = start(clock)
    for batch in (1, 2, 4):
        for name, each in (("quick", 0.25), ("slow", 2.0)):
            kind = RoundKind(batch, 4, 4 * batch, (name,))
            assert control.costs.seconds(kind) == pytest.approx(PASS + each * batch)
    assert not runner.pool.used


def test_rounds_without_drafts_tell_first(clock: SimpleNamespace):
    """What asking takes is what rounds take beyond those, were they noted before or after; of each a quartile."""
    control, _, _ = start(clock, asynchronous=False)
    plain, asked = RoundKind(2, 1, 2), RoundKind(2, 4, 8, ("slow",))
    rehearsal._tell(control, {asked: [7.0, 5.0, 1.0, 6.0, 8.0], plain: [9.0, 0.5, 3.0, 4.0]})
    assert control.costs.seconds(plain) == pytest.approx(3.0)
    assert control.costs.seconds(asked) == pytest.approx(5.0)


def test_of_drafts_it_tells_nothing(clock: SimpleNamespace):
    """The made-up texts are no requests: whether their drafts stand says nothing of others."""
    control, _, _ = start(clock)
    assert [each.drafts for each in control.acceptance] == [0, 0]
    assert control._round == 0


def test_no_batch_is_begun_after_a_while(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rehearsal, "SECONDS", 1.0)
    control, _, _ = start(clock)
    assert [*control.costs._asking["slow",]] == [0]


def test_where_rounds_do_not_overlap_there_is_none(clock: SimpleNamespace):
    control, drafters, _ = start(clock, asynchronous=False)
    assert not any(each.asked for each in drafters)
    assert not control.costs._asking


@pytest.mark.parametrize(("context", "pages"), [(16, None), (20, None), (None, 1)])
def test_there_is_none_without_room_for_a_text(clock: SimpleNamespace, context: int | None, pages: int | None):
    _, drafters, _ = start(clock, context=context, pages=pages)
    assert not any(each.asked for each in drafters)


@pytest.mark.parametrize(("context", "pages"), [(40, None), (None, 3), (None, 8)])
def test_little_room_is_no_error(clock: SimpleNamespace, context: int | None, pages: int | None):
    _, drafters, runner = start(clock, context=context, pages=pages)
    assert drafters[0].asked
    assert not runner.pool.used
