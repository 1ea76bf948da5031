"""Newcomers join the round that is launched behind one in flight: every text is plain decoding's, whoever comes or goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from async_toy import ASYNC_TOY, target
from conformance_models import native_testbed
from drafter_cast import with_heads
from plain_decoding import assert_same, request, run, told_by
from repeating_toy import Guesser, RepeatingToy
from test_cancellation import assert_begins
from test_controlled_rounds import WIDTHS, controlled, members_of
from test_lookups_in_flight import drafter_of, repetitive
from test_lookups_in_flight import engine as lookup_engine
from test_repeated_rounds import BREAKING, WATCHED, Breaking, Pair, Tried
from test_rounds_behind_rounds import at_random
from test_trees_in_flight import KINDS
from test_trees_in_flight import engine as tree_engine
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed
from torch import Tensor

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Span
from outrider.drafters.base import DrafterContext
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request
from outrider.engine.scheduler import ScheduledSequence
from outrider.runners.native import NativeRunner
from outrider.verify.base import make_verifier

LOOKUPS = ("suffix", "eager", "prompt-lookup", "mix")
TOYS = ("none", "guesser", *KINDS, *LOOKUPS, "planned", "auto")
HEADS = ("block:model=tiny-block", "block:model=tiny-block,tree=7", "eagle:model=tiny-eagle3,k=3", "mtp:model=tiny-mtp,k=2")
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 34, 48)
toys = pytest.mark.parametrize("drafter", TOYS)
temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])
ROOMY = EngineLimits(max_batch=8)


class JoiningNative(NativeRunner):
    """The native runner on the CPU, its passes counted as launched."""

    joins = True  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]


def engine(drafter: str, asked: Seq[Request] = (), limits: EngineLimits = ROOMY, cache_tokens: int = 4096) -> Engine:
    """On a toy, or on a native model for a head. asked: what those will be asked who know the answers."""
    if drafter in HEADS:
        model = JoiningNative(native_testbed("llama-deep").target(64).model.decoder, cache_tokens)  # type: ignore[attr-defined]
        model.asynchronous = True
        context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=model)
        head = parse_drafter(with_heads(drafter, model)).build(context)
        return Engine(model, head, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)
    if drafter in KINDS:
        return tree_engine(ASYNC_TOY, drafter, asked, limits, cache_tokens)
    if drafter in LOOKUPS:
        return lookup_engine(drafter, limits, cache_tokens)[0]
    if drafter == "auto":
        runner = target(cache_tokens)
        lookups = drafter_of("mix", runner, limits.max_batch)
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
        self.drained = 0
        """Rounds that were not launched behind another."""
        self._read, self._join = tried.target.read, tried.scheduler.join
        tried.target.read, tried.scheduler.join = self._noted_read, self._noted_join

    def _noted_read(self, spans: Seq[Span]) -> None:
        assert len(self.tried._in_flight) == 1
        self._read(spans)
        self.read += spans

    def _noted_join(self) -> list[ScheduledSequence]:
        joined = self._join()
        self.joined += [each.seq.id for each in joined]
        return joined

    def submit(self, made: Request) -> list[int]:
        ids = self.tried.submit(made)
        for n, seq_id in enumerate(ids):
            self.heard[seq_id], self.asked[seq_id] = [], (made, n)
        return ids

    def cancel(self, seq_id: int) -> None:
        event = self.tried.cancel(seq_id)
        if event is not None:
            self.heard[seq_id].append(event)
            assert seq_id not in self.tried.target.pool
        self.tried.check()

    def step(self, count: int = 1) -> list[int]:
        """So many rounds; returns whose texts the last one told of."""
        told: list[int] = []
        for _ in range(count):
            events = self.tried.step()
            told = [event.seq_id for event in events]
            for event in events:
                self.heard[event.seq_id].append(event)
            in_flight = self.tried._in_flight
            self.drained += bool(in_flight) and not in_flight[-1].behind
            self.tried.check()
        return told

    def finish(self) -> set[str]:
        """Run to the end, and judge every text and its figures; returns how they ended."""
        for _ in range(3000):
            if not self.tried.busy:
                break
            self.step()
        assert not self.tried.busy
        assert self.tried.target.pool.used == 0
        assert self.tried.stats.draft_failures == 0
        return {self._judge(seq_id, told_by(events)) for seq_id, events in self.heard.items()}

    def _judge(self, seq_id: int, told: Any) -> str:
        (made, n), events = self.asked[seq_id], self.heard[seq_id]
        judged, stats = self.world.judged(made)[n], events[-1].stats
        if told.finish == "cancelled":
            assert_begins(told, judged, made.prompt)
            return told.finish
        assert_same([told], [judged], tolerance=1e-4)
        assert stats is not None
        assert stats.prompt_tokens == len(made.prompt)
        assert stats.tokens == stats.all.emitted == len(told.tokens)
        assert stats.all.rounds == sum(bool(event.tokens) for event in events)
        return told.finish


def asks(count: int, temperature: float, lengths: Seq[int] = LENGTHS, **options: Any) -> list[Request]:
    """Requests of different seeds, whose prompts have these lengths in turn."""
    rng = random.Random(f"{count} {temperature}")
    return [
        request(
            rng.choices(range(1, 9), k=lengths[i % len(lengths)]),
            **({"temperature": temperature, "seed": i, "max_tokens": 12, "ignore_eos": True} | options),
        )
        for i in range(count)
    ]


def longest(temperature: float, **options: Any) -> Request:
    """A text that goes on while others come and go."""
    return request([5, 3], temperature=temperature, seed=99, **({"max_tokens": 150, "ignore_eos": True} | options))


@pytest.mark.parametrize("drafter", ["none", "guesser", "trees"])
@temperatures
def test_newcomers_join_at_once_and_nothing_drains(drafter: str, temperature: float):
    """One of each length: all but its last token is read in the next step, its first token told of in the one behind."""
    first, asked = longest(temperature, max_tokens=60), asks(len(LENGTHS), temperature, max_tokens=3)
    play = Play(engine(drafter, [first, *asked]))
    play.submit(first)
    play.step(4)
    play.drained = 0
    for each in asked:
        (seq_id,), before = play.submit(each), len(play.read)
        assert seq_id not in play.step()
        assert play.joined[-1] == seq_id
        assert [span.tokens for span in play.read[before:]] == ([each.prompt[:-1]] if len(each.prompt) > 1 else [])
        assert seq_id in play.step()
        assert play.drained == 0
    assert play.finish() == {"length"}
    assert len(play.joined) == len(asked)


@toys
@temperatures
def test_newcomers_in_every_step(drafter: str, temperature: float):
    """Several at once, more than the batch holds, beside one that goes on."""
    first, asked = longest(temperature), asks(30, temperature)
    play = Play(engine(drafter, [first, *asked], EngineLimits(max_batch=5)))
    play.submit(first)
    play.step(3)
    for i, each in enumerate(asked):
        play.submit(each)
        if i % 3 or i > 20:
            play.step()
    assert play.finish() == {"length"}
    assert len(play.joined) > 8


@toys
def test_newcomers_of_one_token(drafter: str):
    """They have ended before the host knows that they began; each place is taken again at once."""
    for batch in (2, 4):
        first = longest(1.0, max_tokens=100)
        asked = [
            replace(each, params=replace(each.params, max_tokens=1 + i // 12)) for i, each in enumerate(asks(18, 1.0))
        ]
        play = Play(engine(drafter, [first, *asked], EngineLimits(max_batch=batch)))
        play.submit(first)
        play.step(3)
        for each in asked:
            play.submit(each)
        assert play.finish() == {"length"}
        assert len(play.joined) > 6


@pytest.mark.parametrize("drafter", ["none", "guesser", "mixed", "mix", "planned"])
@pytest.mark.parametrize("most", [3, 9, 20, 40])
def test_prompts_longer_than_a_round_may_read(drafter: str, most: int):
    """They do not join, and wait for no longer than those that do. No pass is longer than a round may be."""
    first, asked = longest(0.0, max_tokens=100), asks(2 * len(LENGTHS), 0.0, max_tokens=8)
    play = Play(engine(drafter, [first, *asked], EngineLimits(max_batch=4, max_round_tokens=most)))
    widths, scored = list[int](), play.tried.target.score

    def score(spans: Seq[Span], *args: Any) -> Any:
        widths.append(sum(span.width for span in spans))
        return scored(spans, *args)

    play.tried.target.score = score
    play.submit(first)
    play.step(3)
    for each in asked:
        play.submit(each)
        play.step(2)
    assert play.finish() == {"length"}
    assert {len(play.asked[i][0].prompt) < most for i in play.joined} == {True}
    assert 0 < len(play.joined) < len(asked) or most == 40
    assert max(widths) <= max(most, 4)


@toys
def test_shared_prefixes(drafter: str):
    """The same prompt twice at once is read twice, and found by all that come later, as far as whole pages go."""
    prompt = asks(1, 0.0, [48])[0].prompt
    first = longest(1.0)
    asked = [request(prompt, temperature=1.0, seed=i, max_tokens=9, ignore_eos=True) for i in range(6)]
    asked += [replace(asked[5], prompt=(*prompt, *range(1, 2 + i))) for i in range(2)]
    play = Play(engine(drafter, [first, *asked]))
    play.submit(first)
    play.step(4)
    ids = [play.submit(each)[0] for each in asked[:2]]
    play.step()
    ids += [play.submit(each)[0] for each in asked[2:4]]
    play.step(4)
    ids += [play.submit(each)[0] for each in asked[4:]]
    assert play.finish() == {"length"}
    shared = [play.heard[seq_id][-1].stats.shared_tokens for seq_id in ids]  # type: ignore[union-attr]
    assert shared == [0, 0, *[32] * 4, 48, 48]
    assert len(play.joined) >= 4


@toys
@temperatures
def test_requests_of_several_texts(drafter: str, temperature: float):
    first, asked = longest(temperature), asks(6, temperature, (17, 1, 33), n=3)
    play = Play(engine(drafter, [first, *asked], EngineLimits(max_batch=6)))
    play.submit(first)
    for each in asked:
        play.step(3)
        play.submit(each)
    assert play.finish() == {"length"}
    assert len(play.joined) > 4


class EvenTokens:
    """A constraint that the judge knows as `allowed_token_ids`."""

    done, problem = False, ""

    def allowed(self, paths: Seq[tuple[Token, ...]], stops: frozenset[Token]) -> Tensor:
        return (torch.arange(VOCAB) % 2 == 0).expand(len(paths), -1)

    def advance(self, tokens: Seq[Token]) -> None:
        assert not any(token % 2 for token in tokens)

    def forced(self) -> tuple[Token, ...]:
        return ()

    def fork(self) -> EvenTokens:
        return self


SHY: dict[str, dict[str, Any]] = {name: each for name, each in WATCHED.items() if name != "logprobs"} | {
    "truncated": {"temperature": 1.0, "top_k": 4},
    "a constraint": {"allowed_token_ids": range(0, VOCAB, 2)},
}


@pytest.mark.parametrize("drafter", ["none", "guesser", "suffix", "auto"])
@pytest.mark.parametrize("option", SHY)
def test_who_has_options_does_not_join(drafter: str, option: str):
    """The others are as they would be alone, those that join behind it in the queue too."""
    first, asked = longest(1.0), asks(12, 1.0)
    shy = [replace(each, params=replace(each.params, **SHY[option])) for each in asks(2, 1.0, seed=7, max_tokens=20)]
    play = Play(engine(drafter, [first, *asked, *shy], EngineLimits(max_batch=6)))
    play.submit(first)
    play.step(3)
    told: list[int] = []
    for i, each in enumerate(asked):
        play.submit(each)
        if i in (4, 5):
            made = shy[i - 4]
            if option == "a constraint":
                free = replace(made, params=replace(made.params, allowed_token_ids=None), constraint=EvenTokens())
                told += play.submit(free)
                play.asked[told[-1]] = made, 0
            else:
                told += play.submit(made)
        play.step()
    assert play.finish() == {"length"}
    assert not {*told} & {*play.joined}
    assert len(play.joined) > 4


@toys
@temperatures
def test_log_probabilities_of_those_that_join(drafter: str, temperature: float):
    first, asked = longest(temperature, logprobs=2), asks(8, temperature, logprobs=3, max_tokens=6)
    play = Play(engine(drafter, [first, *asked]))
    play.submit(first)
    for each in asked:
        play.step(2)
        play.submit(each)
    assert play.finish() == {"length"}
    assert len(play.joined) > 4


@toys
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_newcomer_is_cancelled(drafter: str, after: int):
    """Before it joins, while the round that it joined is in flight, and behind that. Its pages serve others at once."""
    first, asked = longest(1.0), asks(12, 1.0, (33, 17, 1, 16, 2))
    play = Play(engine(drafter, [first, *asked], EngineLimits(max_batch=4), 320))
    play.submit(first)
    play.step(3)
    for i, each in enumerate(asked):
        (seq_id,) = play.submit(each)
        play.step(after)
        if i % 3 == 0:
            play.cancel(seq_id)
        play.step(i % 2)
    assert play.finish() == {"cancelled", "length"}
    assert play.joined


@toys
@temperatures
@pytest.mark.parametrize("cache_tokens", [176, 208, 304])
def test_a_cramped_cache(drafter: str, temperature: float, cache_tokens: int):
    """Some are preempted while others join."""
    asked = asks(14, temperature, (17, 1, 33, 16, 40), max_tokens=50)
    play = Play(engine(drafter, asked, EngineLimits(max_batch=4), cache_tokens))
    for i, each in enumerate(asked):
        play.submit(each)
        play.step(i % 4)
    assert play.finish() == {"length"}
    assert play.tried.stats.preemptions > 0
    assert play.joined


def test_a_newcomer_that_breaks_takes_nobody_with_it():
    """NaN behind some pairs of tokens: also at the first token of one that joins."""
    ends: list[str] = []
    for drafter in ("none", "guesser"):
        for seed in range(6):
            rng = random.Random(seed)
            play = Play(Tried(drafter, target=Breaking(), world=BREAKING).engine, BREAKING)
            for i in range(12):
                prompt = rng.choices(range(1, VOCAB), k=rng.choice(LENGTHS))
                if i % 4 == 3:
                    prompt[-2:] = [1, 93 % 97 - 7 * 1 + 14] if len(prompt) > 1 and 93 - 7 + 14 < VOCAB else prompt[-2:]
                play.submit(request(prompt, temperature=1.0, seed=i, max_tokens=30, ignore_eos=True))
                play.step(2)
            play.finish()
            assert len(play.joined) > 4
            ends += [play.heard[seq_id][-1].finish or "" for seq_id in play.joined]
    assert {*ends} == {"error", "length"}
