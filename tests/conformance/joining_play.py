"""An engine that sequences come to and leave while it works, every step of it checked, and what is asked of it."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from async_toy import ASYNC_TOY, target
from conformance_models import native_testbed
from drafter_cast import with_heads
from plain_decoding import Told, assert_same, request, told_by
from repeating_toy import RepeatingToy
from test_cancellation import assert_begins
from test_controlled_rounds import WIDTHS, controlled, members_of
from test_lookups_in_flight import drafter_of
from test_lookups_in_flight import engine as lookup_engine
from test_repeated_rounds import Pair, Tried
from test_rounds_behind_rounds import WHOLE
from test_rounds_behind_rounds import engine as model_engine
from test_trees_in_flight import KINDS
from test_trees_in_flight import engine as tree_engine
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts
from outrider.core.sequence import Span
from outrider.drafters.base import DrafterContext
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.stats import Stats
from outrider.runners.device_state import DeviceState
from outrider.runners.native import NativeRunner
from outrider.verify.base import make_verifier

LOOKUPS = ("suffix", "prompt-lookup")
MODELS = ("draft-model:model=draft,k=4", "draft-model:model=other,k=3", "smaller")
TOYS = ("none", "guesser", *KINDS, *LOOKUPS, *MODELS, "with-model", "planned", "auto", "auto-with-model")
BLOCK, EAGLE = "block:model=tiny-block", "eagle:model=tiny-eagle3,k=3"
HEADS = (BLOCK, f"{BLOCK},tree=7", EAGLE)
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 48)
NATIVE = native_testbed("llama-deep")
toys = pytest.mark.parametrize("drafter", TOYS)


class JoiningNative(NativeRunner):
    """The native runner on the CPU, its passes counted as launched."""

    joins = True  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]


def engine(drafter: str, asked: Seq[Request], limits: EngineLimits, cache_tokens: int) -> Engine:
    """On a toy, or on a native model for a head. asked: all that will be, for those who know the answers."""
    if drafter in HEADS:
        model = JoiningNative(NATIVE.target(64).model.decoder, cache_tokens)  # pyright: ignore[reportAttributeAccessIssue]
        model.asynchronous = True
        context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=model)
        head = parse_drafter(with_heads(drafter, model)).build(context)
        return Engine(model, head, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)
    if drafter in KINDS:
        return tree_engine(ASYNC_TOY, drafter, asked, limits, cache_tokens)
    if drafter in (*LOOKUPS, "with-model"):
        return lookup_engine(drafter, limits, cache_tokens)[0]
    if drafter in MODELS:
        return model_engine(WHOLE, drafter, limits, cache_tokens)
    if drafter.startswith("auto"):
        runner = target(cache_tokens)
        lookups = drafter_of("mix" if drafter == "auto" else "with-model", runner, limits.max_batch)
        table = PassTable({(b, w): 1.0 + 0.01 * b * w for b in (1, 2, 4, 8) for w in WIDTHS}, padded=True)
        return controlled(runner, lookups, Controller(members_of(lookups), RoundCosts(table), WIDTHS), limits)
    toy = RepeatingToy(cache_tokens)
    if drafter == "planned":
        return Tried(Pair, limits=limits, target=toy, plans=f"{limits} {cache_tokens}").engine
    return Tried(drafter, limits=limits, target=toy).engine


class Play:
    """Requests come between an engine's steps. It notes who joins a round, and holds every text to the judge."""

    def __init__(self, tried: Engine, world: Testbed = ASYNC_TOY) -> None:
        self.tried, self.world = tried, world
        self.heard: dict[int, list[Event]] = {}
        self.asked: dict[int, tuple[Request, int]] = {}
        self.joined: list[int] = []
        """Sequences that joined a round."""
        self.read: list[Span] = []
        """What was read for them, always behind a round in flight."""
        self.drained = self.interrupts = 0
        """Rounds that were not launched behind another; steps that were interrupted."""
        self._read, self._join = tried.target.read, tried.scheduler.join
        tried.target.read, tried.scheduler.join = self._noted_read, self._noted_join

    def _noted_read(self, spans: Seq[Span], after: DeviceState | None = None) -> DeviceState | None:
        assert len(self.tried._in_flight) in (1, 2)
        after = self._read(spans, after)
        self.read += spans
        return after

    def _noted_join(self) -> list[ScheduledSequence]:
        joined = self._join()
        self.joined += [each.seq.id for each in joined]
        return joined

    def submit(self, made: Request, judged: Request | None = None) -> int:
        """judged: what the judge is asked in its place. Returns the id of its first text."""
        ids = self.tried.submit(made)
        for n, seq_id in enumerate(ids):
            self.heard[seq_id], self.asked[seq_id] = [], (judged or made, n)
        return ids[0]

    def cancel(self, seq_id: int) -> None:
        event = self.tried.cancel(seq_id)
        if event is not None:
            self.heard[seq_id].append(event)
            assert seq_id not in self.tried.target.pool
        self.tried.check()

    def step(self, count: int = 1) -> list[int]:
        """So many rounds; returns whose texts the last one told of."""
        events: list[Event] = []
        for _ in range(count):
            try:
                events = self.tried.step()
            except KeyboardInterrupt:
                self.interrupts += 1
                events = []
            for event in events:
                self.heard[event.seq_id].append(event)
            in_flight = self.tried._in_flight
            self.drained += bool(in_flight) and not in_flight[-1].behind
            assert len(self.tried.scheduler.running) <= self.tried.scheduler.max_batch
            self.tried.check()
        return [event.seq_id for event in events]

    def finish(self) -> set[str]:
        """Run to the end, and judge every text and its figures; returns how they ended."""
        for _ in range(3000):
            if not self.tried.busy:
                break
            self.step()
        assert not self.tried.busy
        assert self.tried.target.pool.used == self.tried.stats.draft_failures == 0
        return {self._judge(seq_id, told_by(events)) for seq_id, events in self.heard.items()}

    def stats_of(self, seq_id: int) -> Stats:
        stats = self.heard[seq_id][-1].stats
        assert stats is not None
        return stats

    def _judge(self, seq_id: int, told: Told) -> str:
        (made, n), stats = self.asked[seq_id], self.stats_of(seq_id)
        if told.finish == "cancelled":
            assert_begins(told, self.world.judged(made)[n], made.prompt)
            return told.finish
        assert_same([told], [self.world.judged(made)[n]], tolerance=1e-4)
        assert stats.prompt_tokens == len(made.prompt)
        assert stats.tokens == stats.all.emitted == len(told.tokens)
        assert stats.all.rounds == sum(bool(event.tokens) for event in self.heard[seq_id])
        return told.finish


def asks(count: int, lengths: Seq[int] = LENGTHS, **options: Any) -> list[Request]:
    """Requests of different seeds, whose prompts have these lengths in turn; every other one is greedy."""
    rng = random.Random(count)
    basic = {"max_tokens": 12, "ignore_eos": True}
    prompts = [rng.choices(range(1, 9), k=lengths[i % len(lengths)]) for i in range(count)]
    return [request(each, **({"temperature": i % 2, "seed": i} | basic | options)) for i, each in enumerate(prompts)]


LONGEST = request([5, 3], temperature=1.0, seed=99, max_tokens=90, ignore_eos=True)


def begun(drafter: str, asked: Seq[Request], batch: int = 8, most: int = 512, cache_tokens: int = 4096) -> Play:
    """With the longest text under way: there is a round in flight to join behind."""
    limits = EngineLimits(max_batch=batch, max_round_tokens=most)
    play = Play(engine(drafter, [LONGEST, *asked], limits, cache_tokens), NATIVE if drafter in HEADS else ASYNC_TOY)
    play.submit(LONGEST)
    play.step(4)
    return play
