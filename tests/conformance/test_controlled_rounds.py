"""Whatever a controller decides, texts are those of plain decoding: at random, and by measured costs."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from itertools import count
from types import SimpleNamespace

import pytest
from async_toy import ASYNC_TOY, target
from drafter_cast import Loud
from plain_decoding import assert_same, run
from test_lookups_in_flight import RULES, assert_judged, drafter_of, repetitive
from test_rounds_behind_rounds import Schedule, at_random
from testbed import CONTEXT, TOKENIZER, VOCAB

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.plan import Plan, plain_plan
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter, DrafterContext
from outrider.drafters.mix import MixConfig
from outrider.drafters.none import NoDraft
from outrider.drafters.suffix import SuffixConfig
from outrider.engine import drafting, engine, host_time
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.runners.base import Runner
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier

WIDTHS = (1, 2, 4, 6, 8, 12, 16)


def members_of(drafter: Drafter) -> list[Member]:
    parts = drafter.parts or (drafter,)
    return [Member(p.traits.name, p.traits.max_tokens, p.traits.runs_model, p.traits.pays_budget) for p in parts]


class Restless(Controller):
    """Decides at random: who drafts, how far, and which known drafts are scored."""

    def __init__(self, drafter: Drafter, widths: Seq[int], seed: str) -> None:
        super().__init__(members_of(drafter), RoundCosts(PassTable({})), widths)
        self.rng = random.Random(seed)

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        batch, drafts = len(seq_ids), self.rng.random() < 0.7
        lengths = [self.rng.randint(0, budget) if drafts else 0 for budget in budgets]
        who = [self.rng.randrange(len(self.members)) if n else -1 for n in lengths]
        lengths = [min(n, self.members[w].max_tokens) if n else 0 for n, w in zip(lengths, who, strict=True)]
        kind = RoundKind(batch, 1 + max(lengths), batch + sum(lengths))
        return Plan(kind, lengths, who, float(batch), 1.0, probe=self.rng.random() < 0.2)

    def review(self, seq_ids: Seq[int], plan: Plan, drafted: Seq[int], expected: Seq[float]) -> list[bool]:
        return [self.rng.random() < 0.7 for _ in seq_ids]

    def is_active(self, member: int) -> bool:
        return self.rng.random() < 0.5


def controlled(runner: Runner, drafter: Drafter, controller: Controller, limits: EngineLimits) -> Engine:
    loud = Loud(drafter)  # what fails is raised, not counted
    loud.parts = tuple(Loud(part) for part in drafter.parts)
    verifier, eos = make_verifier("seeded"), TOKENIZER.eos_ids
    return Engine(runner, loud, verifier, TOKENIZER, eos_ids=eos, limits=limits, controller=controller)


@pytest.mark.parametrize("name", [*RULES, "mix", "with-model"])
def test_rounds_in_flight_planned_at_random(name: str):
    followed = 0
    for seed in range(5):
        rng = random.Random(f"{name} {seed}")
        limits = EngineLimits(max_batch=rng.choice((1, 4, 40)), max_round_tokens=rng.choice((64, 512)))
        runner = target(rng.choice((256, 4096)))
        drafter = drafter_of(name, runner, limits.max_batch)
        tried = controlled(runner, drafter, Restless(drafter, WIDTHS, f"{name} {seed}"), limits)
        schedule = Schedule(tried, rng)
        schedule.run([at_random(rng) for _ in range(12)])
        followed += runner.followed
        assert_judged(schedule)
    assert followed > 30


@pytest.mark.parametrize("asynchronous", [False, True])
def test_measured_costs_leave_texts_and_account_for_every_round(asynchronous: bool):
    limits = EngineLimits(max_batch=4)
    runner: Runner = target() if asynchronous else ToyRunner(VOCAB, context=CONTEXT, cache_tokens=4096)
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT)
    drafter = drafter_of("mix", runner, 4) if asynchronous else MixConfig(of=(SuffixConfig(),)).build(context)
    table = PassTable({(b, w): 1.0 + 0.01 * b * w for b in (1, 2, 4) for w in WIDTHS}, padded=asynchronous)
    controller = Controller(members_of(drafter), RoundCosts(table), WIDTHS if asynchronous else ())
    tried = controlled(runner, drafter, controller, limits)
    asked = repetitive(6)
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    decisions = tried.stats.decisions
    assert decisions is not None
    assert decisions.rounds == tried.stats.all.rounds == sum(decisions.lengths.values())
    assert tried.stats.all.accepted > 0.3 * tried.stats.tokens  # texts that repeat are drafted
    assert not controller._decisions
    assert not tried.drafting.feedback._open


class Resting(Controller):
    """Asks nobody, ever."""

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        return plain_plan(len(seq_ids), self.costs)


def rounds_to_read(engine: Engine, prompts: int) -> int:
    """Rounds until every one of so many prompts of 40 tokens has its first token, after a few of others."""
    run(engine, [Request(prompt=(1, 2, 3), params=SamplingParams(max_tokens=8, ignore_eos=True))] * 2)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    texts = [tuple((i * 11 + at) % VOCAB for at in range(40)) for i in range(prompts)]
    seqs = [engine.live(engine.submit(Request(prompt=text, params=params))[0]).seq for text in texts]
    rounds = 0
    while not all(seq.generated for seq in seqs):
        engine.step()
        rounds += 1
    return rounds


def test_drafts_that_nobody_makes_leave_prompts_their_room(monkeypatch: pytest.MonkeyPatch):
    ticks = count()  # how long rests are depends on the clock
    for module in (drafting, engine, host_time):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: 1e-4 * next(ticks)))
    limits = EngineLimits(max_batch=16, max_round_tokens=64)
    plain = Engine(target(4096), NoDraft(), make_verifier("seeded"), TOKENIZER, limits=limits)
    runner = target(4096)
    drafter = drafter_of("suffix", runner, limits.max_batch)
    table = PassTable({(b, w): 1.0 + 0.01 * b * w for b in (1, 2, 4, 8, 16) for w in WIDTHS}, padded=True)
    tried = controlled(runner, drafter, Resting(members_of(drafter), RoundCosts(table), WIDTHS), limits)
    assert rounds_to_read(tried, 16) <= rounds_to_read(plain, 16) + 2  # in which it is planned that nobody is asked
