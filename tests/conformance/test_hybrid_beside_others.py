"""A head with lookups in a mix and under a controller: who is asked, who forgets, and plain decoding's texts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from async_toy import ASYNC_TOY
from guessing_head import GuessingHead, Louder, NotedHybrid, Noting, Scored, ScoredSharing
from plain_decoding import assert_same, run
from repeating_toy import WIDTHS
from test_lookups_in_flight import RULES, assert_judged, repetitive
from test_repeated_lookups import without_predictions
from test_repeated_rounds import asks
from test_rounds_behind_rounds import Schedule, at_random
from testbed import TOKENIZER, VOCAB

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundKind
from outrider.control.overlapped_costs import OverlappedCosts
from outrider.control.plan import Plan
from outrider.drafters.base import Drafter
from outrider.drafters.mix import Mix
from outrider.engine import drafting, engine, host_time
from outrider.engine.adaptive import member_of
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.verify.base import make_verifier

targets = pytest.mark.parametrize("toy", [Scored, ScoredSharing])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long plans hold depends on it: every look at it takes as long."""
    ticks = count()
    for module in (drafting, engine, host_time):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 1e-4 * next(ticks)))


class Tried:
    """An engine with lookups and a hybrid of them in a mix."""

    def __init__(self, target: Scored, batch: int, *, predicts: bool = False, controller: str = "") -> None:
        """predicts: with a lookup of predictions, too. controller: none, `costs`, or the seed of one that chooses."""
        self.target = target
        self.lookups = Noting(RULES["suffix"], target, batch)
        self.head = GuessingHead(target, share=2)
        self.hybrid = NotedHybrid(self.head, self.lookups, target)
        others = [Noting(RULES["prediction"], target, batch)] if predicts else []
        self.mix = Mix([self.lookups, *others, self.hybrid], VOCAB)
        self.controller = controller_of(self.mix.parts, target, controller) if controller else None
        loud = Louder(self.mix, self.hybrid.rows)
        limits, eos = EngineLimits(max_batch=batch), TOKENIZER.eos_ids
        verifier, plans = make_verifier("seeded"), self.controller
        self.engine = Engine(target, loud, verifier, TOKENIZER, eos_ids=eos, limits=limits, controller=plans)

    def check(self, asked: Seq[Request]) -> None:
        """Each is plain decoding's, and forgotten once by everybody."""
        for told, each in zip(run(self.engine, asked), asked, strict=True):
            assert_same(told, ASYNC_TOY.judged(each))
        self.check_forgotten(len(asked))
        assert self.engine.stats.draft_failures == 0

    def check_forgotten(self, texts: int) -> None:
        assert self.head.forgotten == self.lookups.forgotten == Counter(dict.fromkeys(range(texts), 1))
        assert not self.lookups._texts
        assert not self.head._confidences


class Choosing(Controller):
    """Asks one member for all texts, or nobody, for some rounds: at random. Every third plan is for short drafts."""

    def __init__(self, *given: Any, seed: str) -> None:
        super().__init__(*given)
        self.rng, self.asked = random.Random(seed), Counter[str]()

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        who = self.rng.randrange(-1, len(self.members))
        most = 0 if who < 0 else self.members[who].max_tokens if self.asked.total() % 3 else 2
        lengths = [min(n, most) for n in budgets]
        drafters = [who if n else -1 for n in lengths]
        names = (self.members[who].name,) if any(lengths) else ()
        self.asked["".join(names) or "nobody"] += 1
        kind = RoundKind(len(lengths), 1 + max(lengths), len(lengths) + sum(lengths), names)
        return Plan(kind, lengths, drafters, float(len(lengths)), 1.0, rounds=self.rng.choice((0, 3, 12)))


def controller_of(parts: Seq[Drafter], target: Scored, seed: str) -> Controller:
    """As `CostMeter` makes one, from tables."""
    passes = PassTable({(b, w): 1e-3 + 2e-5 * b * w for b in (1, 2, 4) for w in WIDTHS}, padded=True)
    step = PassTable({(b, 1): 1e-4 for b in (1, 2, 4)}, padded=True)
    costs = OverlappedCosts(passes, {part.traits.name: step for part in parts if part.traits.runs_model})
    given = [member_of(part, target, parts) for part in parts], costs, WIDTHS
    return Controller(*given) if seed == "costs" else Choosing(*given, seed=seed)


@targets
@pytest.mark.parametrize("batch", [1, 3])
def test_lookups_of_a_hybrid_are_not_asked_beside_it(toy: type[Scored], batch: int):
    tried = Tried(toy(), batch)
    tried.check(without_predictions(6))
    assert tried.lookups.calls["propose"] == tried.lookups.calls["watch"] == 0
    assert tried.lookups.calls["found"] > 0
    assert len(tried.hybrid.rounds) > 20
    assert tried.target.repeated > 10
    assert tried.mix.traits.name == "suffix+head+suffix"


@targets
def test_requests_with_and_without_predictions(toy: type[Scored]):
    """Where a text of the round has one, its lookup is asked beside the hybrid, and the best draft wins."""
    tried = Tried(toy(), 3, predicts=True)
    asked = [each if i % 3 else replace(each, prediction=()) for i, each in enumerate(repetitive(9))]
    tried.check([*asked, *without_predictions(4), *asks(3, 1.0)])
    assert tried.lookups.calls["propose"] == 0
    assert tried.mix.members[1].drafter.drafter.calls["propose"] > 5  # type: ignore[attr-defined]
    assert len(tried.hybrid.rounds) > 20


@targets
@pytest.mark.parametrize("predicts", [False, True])
def test_at_random_in_a_mix(toy: type[Scored], predicts: bool):
    chosen = 0
    for seed in range(4):
        rng = random.Random(f"{predicts} {seed}")
        tried = Tried(toy((160, 208, 4096)[seed % 3]), rng.choice((2, 4)), predicts=predicts)
        schedule = Schedule(tried.engine, rng)
        asked = [at_random(rng) for _ in range(10)]
        asked = [replace(each, prediction=rng.choice(((), (3, 1, 4, 1, 5, 9)))) for each in asked]
        schedule.run(asked)
        assert_judged(schedule)
        tried.check_forgotten(len(schedule.asked))
        chosen += len(tried.hybrid.rounds)
    assert chosen > 20


@targets
@pytest.mark.parametrize("seed", ["1", "2", "3"])
@pytest.mark.usefixtures("clock")
def test_members_that_a_controller_asks_in_turn(toy: type[Scored], seed: str, monkeypatch: pytest.MonkeyPatch):
    """Of drafts that shared rows it is told how sure the head was, though plans last and rounds are repeated."""
    told, note = list[tuple[int, int]](), Controller.note_shared

    def noted(self: Controller, *given: Any) -> None:
        told.append((len(given[1]), given[4]))
        note(self, *given)

    monkeypatch.setattr(Controller, "note_shared", noted)
    tried = Tried(toy(), 4, predicts=seed == "3", controller=seed)
    tried.check([*without_predictions(12), *asks(12, 1.0, max_tokens=90)])
    assert isinstance(tried.controller, Choosing)
    lookups, hybrid = (member.name for member in tried.controller.members)
    assert min(tried.controller.asked[who] for who in (lookups, hybrid, "nobody")) > 1
    assert len(tried.hybrid.rounds) > 20
    assert tried.target.repeated > 0
    assert all(0 < texts <= 4 and length > 0 for texts, length in told)
    assert len(told) > 3 if toy is ScoredSharing else not told


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.usefixtures("clock")
def test_at_random_by_a_controller(seed: int):
    rng = random.Random(f"controlled {seed}")
    tried = Tried(ScoredSharing((208, 4096)[seed % 2]), rng.choice((2, 4)), controller=f"plans {seed}")
    schedule = Schedule(tried.engine, rng)
    schedule.run([at_random(rng) for _ in range(10)])
    assert_judged(schedule)
    tried.check_forgotten(len(schedule.asked))


@targets
@pytest.mark.usefixtures("clock")
def test_by_costs(toy: type[Scored]):
    """The controller that engines have: nothing fails, and every text is plain decoding's."""
    tried = Tried(toy(), 4, controller="costs")
    tried.check([*without_predictions(8), *asks(8, 1.0, max_tokens=90)])
    assert tried.hybrid.rounds
