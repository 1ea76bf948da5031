"""A head and lookups at once, over toys: every text is plain decoding's, every draft the one that is worth more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
from async_toy import ASYNC_TOY
from guessing_head import Chosen, GuessingHead, Louder, NotedHybrid, Noting, Scored, ScoredSharing
from lookup_checks import continuation
from plain_decoding import assert_same, run
from test_lookups_in_flight import RULES, assert_judged, repetitive
from test_repeated_lookups import without_predictions
from test_repeated_rounds import asks
from test_rounds_behind_rounds import Schedule, at_random
from testbed import TOKENIZER

from outrider.core.sampling import SamplingParams, Token
from outrider.drafters import device_lookup
from outrider.drafters.base import Drafter, Evidence
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.kernels.lookup import MAX_CHANCE, Found
from outrider.kernels.share import NO_ROW
from outrider.verify.base import make_verifier

targets = pytest.mark.parametrize("toy", [Scored, ScoredSharing])


def hybrid_of(
    target: Scored, batch: int, rules: str = "suffix", *, k: int = 5, share: int = 2, max_batch: int = 8
) -> NotedHybrid:
    head = GuessingHead(target, k=k, share=share, max_batch=max_batch)
    return NotedHybrid(head, Noting(RULES[rules], target, batch), target)


def engine_of(tried: Drafter, target: Scored, batch: int, max_round_tokens: int = 512) -> Engine:
    limits, eos = EngineLimits(max_batch=batch, max_round_tokens=max_round_tokens), TOKENIZER.eos_ids
    return Engine(target, Louder(tried), make_verifier("seeded"), TOKENIZER, eos_ids=eos, limits=limits)


def check(tried: Engine, asked: Seq[Request]) -> None:
    """Run them together, each as plain decoding."""
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    assert tried.target.pool.used == 0
    assert tried.stats.draft_failures == 0


def kinds(tried: NotedHybrid, target: Scored) -> Counter[str]:
    """Whose the drafts are that were scored, where head and lookup differ."""
    told, columns = Counter[str](), Found.of(tried.lookups.k)
    for made in tried.rounds:
        found = made.found[:, columns.drafts].tolist()
        for row, seq in enumerate(made.seqs):
            scored = real(target.scored[made.at].get(seq.id, []))
            of_head, of_lookup = (scored == each[: len(scored)] for each in (made.head[row], found[row]))
            if scored and of_head != of_lookup:
                told["head" if of_head else "lookup"] += 1
            assert of_head or of_lookup
    return told


def real(tokens: Seq[Token]) -> list[Token]:
    """Without padding."""
    return [token for token in tokens if token >= 0]


@targets
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_texts_that_repeat_are_plain_decodings_by_drafts_of_both(toy: type[Scored], batch: int):
    target = toy()
    tried = hybrid_of(target, batch)
    engine = engine_of(tried, target, batch)
    check(engine, without_predictions(6))
    told = kinds(tried, target)
    assert min(told["head"], told["lookup"]) > 10
    assert sum(made.repeated for made in tried.rounds) == tried.runner.repeats > 10
    assert target.repeated == tried.runner.repeats
    assert engine.stats.all.accepted > 0.4 * engine.stats.tokens


@targets
@pytest.mark.parametrize("rules", ["suffix", "eager", "prompt-lookup"])
def test_at_random(toy: type[Scored], rules: str):
    """Cancelled, preempted, batches that change: every text is the judge's, whole or up to where it was cancelled."""
    repeated = chosen = 0
    for seed in range(6):
        rng = random.Random(f"{rules} {seed}")
        target, batch = toy((160, 208, 4096)[seed % 3]), (5, 2, 1, 4, 3, 5)[seed]
        tried = hybrid_of(target, batch, rules, share=rng.choice((0, 2)), max_batch=rng.choice((2, 8)))
        engine = engine_of(tried, target, batch, rng.choice((9, 64, 512)))
        schedule = Schedule(engine, rng)
        schedule.run([at_random(rng) for _ in range(10)])
        assert_judged(schedule)
        assert target.pool.used == 0
        repeated, chosen = repeated + target.repeated, chosen + len(tried.rounds)
    assert repeated > 0
    assert chosen > 30


@targets
@pytest.mark.parametrize("cache_tokens", [160, 208])
def test_preemption_in_a_cramped_cache(toy: type[Scored], cache_tokens: int):
    target = toy(cache_tokens)
    tried = hybrid_of(target, 4)
    engine = engine_of(tried, target, 4)
    check(engine, [*asks(12, 1.0, max_tokens=120), *without_predictions(10)])
    assert engine.stats.preemptions > 0
    assert target.repeated > 0
    assert len(tried.rounds) > 15


def worth(chances: Seq[float]) -> np.float32:
    """How many tokens should be accepted, rounded as on a device."""
    survival, total = np.float32(1), np.float32(0)
    for chance in chances:
        survival *= np.float32(chance)
        total += survival
    return total


def drafts_of(made: Chosen, k: int) -> list[list[Token]]:
    """What a round's drafts should be, text by text and token by token."""
    columns, drafts, chances = Found.of(k), list[list[Token]](), list[list[float]]()
    for found, head, stated in zip(made.found.tolist(), made.head, made.chances, strict=True):
        tokens, levels = real(found[columns.drafts]), max(len(head), k)
        likely = [float(np.float32(found[columns.chance]) / np.float32(MAX_CHANCE))] * len(tokens)
        draft, chance = (tokens, likely) if worth(likely) > worth(stated) else (head, stated)
        drafts.append([*draft, *[NO_ROW] * (levels - len(draft))])
        chances.append([*chance, *[0.0] * (levels - len(draft))])
    if made.share is None:
        return drafts
    places = [
        (-np.prod(chances[row][: at + 1]), at, row) for row, room in enumerate(made.share.room) for at in range(room)
    ]
    kept = {(row, at) for _, at, row in sorted(places)[: made.share.total]}
    return [
        [token if (row, at) in kept else NO_ROW for at, token in enumerate(draft)] for row, draft in enumerate(drafts)
    ]


@targets
@pytest.mark.parametrize(("k", "share"), [(5, 2), (3, 1), (8, 3)])
def test_drafts_are_those_that_are_worth_more(toy: type[Scored], k: int, share: int):
    """Of what the head drafts and a search finds in the same text, by loops over texts and tokens."""
    target = toy()
    head = GuessingHead(target, k=k, share=share)
    tried = NotedHybrid(head, Noting(PromptLookupConfig(k=5).rules(0.05), target, 3), target)
    check(engine_of(tried, target, 3), [*asks(5, 1.0), *without_predictions(6)])
    shared = compared = 0
    for made in tried.rounds:
        expected, passed = drafts_of(made, 5), target.scored[made.at]
        for row, (seq, length) in enumerate(zip(made.seqs, made.lengths, strict=True)):
            scored = passed.get(seq.id, [])
            assert scored == expected[row][: len(scored)]
            compared += bool(scored)
            shared += made.share is not None
            if length > len(seq.tokens) or seq.tokens[length - 2 : length] == []:
                continue
            text = list(seq.tokens[:length])
            assert made.head[row] == head.runner.guesser._guess(seq, length, text[-2:])
            found = made.found[row, Found.of(5).continuations].tolist()
            assert real(found) == continuation(text, tried.lookups.max_match)[: len(real(found))]
    assert compared > 100
    assert (shared > 50) == (toy is ScoredSharing)
    assert min(kinds(tried, target).values()) > 10


def test_the_head_drafts_alone_until_a_text_is_on_the_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_lookup, "MAX_WRITTEN", 12)
    target = ScoredSharing()
    tried = hybrid_of(target, 2)
    engine = engine_of(tried, target, 2)
    asked = [
        Request(prompt=tuple(1 + (i * each) % 7 for i in range(50)), params=request.params)
        for each, request in enumerate(without_predictions(4), 2)
    ]
    check(engine, asked)
    assert tried.calls["not there"] > 5
    assert len(tried.rounds) > 10
    first = tried.rounds[0].at
    assert sum(bool(drafts) for drafts in target.scored[:first]) > 5
    assert engine.stats.all.accepted > 0.4 * engine.stats.tokens


def test_more_texts_than_the_head_drafts_for_at_once_are_its_alone():
    target = ScoredSharing()
    tried = hybrid_of(target, 3, max_batch=2)
    asked = without_predictions(6)
    check(engine_of(tried, target, 3), asked)
    assert {len(made.seqs) for made in tried.rounds} <= {1, 2}
    assert any(len(drafts) == 3 for drafts in target.scored)


def test_requests_with_limits_of_their_own():
    """Where nothing is to be drafted for a text, the head drafts for the others alone."""
    target = ScoredSharing()
    tried = hybrid_of(target, 3)
    asked = [
        Request(prompt=each.prompt, params=each.params, max_draft=limit)
        for each, limit in zip(repetitive(6), (None, 2, 1, 0, None, 3), strict=True)
    ]
    check(engine_of(tried, target, 3), asked)
    assert tried.rounds


def test_rounds_of_both_tell_what_lookups_alone_would_bring(monkeypatch: pytest.MonkeyPatch):
    """Guesses, weighted by the rounds that they stand for, against lookups alone over the same texts."""
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    asked = [Request(prompt=(first, 1 + first % 7), params=params) for first in range(1, 13)]
    target = ScoredSharing()
    tried, told = hybrid_of(target, 3), list[Evidence]()
    observe = tried.observe

    def observed(*given: Any) -> None:
        observe(*given)
        told.extend(tried.lookups.take_evidence())

    monkeypatch.setattr(tried, "observe", observed)
    check(engine_of(tried, target, 3), asked)
    assert sum(made.repeated for made in tried.rounds) > 10
    alone = engine_of(DeviceLookup(RULES["suffix"], target := Scored(), 3), target, 3)
    check(alone, asked)
    real = alone.stats.all.accepted / alone.stats.all.rounds
    assert real > 0.5
    rounds = sum(each.rounds for each in told)
    assert sum(each.accepted * each.rounds for each in told) / rounds == pytest.approx(real, rel=0.2)


@pytest.mark.parametrize("method", ["look_up_all", "repeat"])
def test_a_lookup_that_fails_is_no_draft(method: str, monkeypatch: pytest.MonkeyPatch):
    """Some calls: the text goes on without, and failures are counted."""
    target = ScoredSharing()
    tried = hybrid_of(target, 2)
    real_method, calls = getattr(tried.lookups, method), iter(range(1, 1 << 30))

    def failing(*given: object) -> object:
        if next(calls) in (1, 3, 6):
            raise RuntimeError("out of luck")
        return real_method(*given)

    monkeypatch.setattr(tried.lookups, method, failing)
    limits = EngineLimits(max_batch=2)
    engine = Engine(target, tried, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)
    asked = without_predictions(4)
    for told, each in zip(run(engine, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    assert engine.stats.draft_failures > 2
    assert tried.head.overlay is None
    assert min(kinds(tried, target).values()) > 5
