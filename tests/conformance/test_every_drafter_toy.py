"""Every drafter against plain decoding on a toy target: the same tokens, text, log-probabilities and endings."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
from all_pairs import all_pairs
from drafter_cast import EVERY_NATIVE, EVERYBODY, SCRIPTED
from plain_decoding import assert_same, request, run
from testbed import OPTIONS, VOCAB
from toy_world import TOY

from outrider.core.sampling import SamplingParams
from outrider.drafters.registry import DRAFTERS
from outrider.engine.request import EngineLimits, Request

everybody = pytest.mark.parametrize("drafter", EVERYBODY)


def test_every_registered_drafter_takes_part():
    cast = {name.partition(":")[0] for name in EVERY_NATIVE}
    assert set(DRAFTERS) <= cast
    assert set(SCRIPTED) <= cast


def test_every_two_values_of_every_two_options_meet():
    rows = all_pairs(OPTIONS)
    assert len(rows) < 40
    for a, b in combinations(OPTIONS, 2):
        assert {(repr(row[a]), repr(row[b])) for row in rows} == {
            (repr(x), repr(y)) for x in OPTIONS[a] for y in OPTIONS[b]
        }


def test_the_requests_end_in_every_way():
    """Else a comparison of endings would say little."""
    ends = {(told.finish, type(told.stop_reason)) for asked in TOY.pairwise_requests() for told in TOY.judged(asked)}
    assert ends == {("length", type(None)), ("stop", int), ("stop", str)}


@everybody
def test_alone(drafter: str):
    for asked in TOY.pairwise_requests(designs=1):
        TOY.check(drafter, (asked,))


@everybody
def test_in_mixed_batches_of_eight(drafter: str):
    requests = TOY.pairwise_requests(designs=2)
    for start in range(len(requests) // 2, len(requests), 8):
        TOY.check(drafter, requests[start : start + 8])


@everybody
def test_where_the_cache_is_too_small_for_all(drafter: str):
    """Four pages for six texts of up to four: they yield to each other again and again."""
    requests = tuple(
        request(range(1, 4 + 3 * i), max_tokens=34, ignore_eos=True, temperature=0.3 * i, seed=i, top_k=6, logprobs=1)
        for i in range(6)
    )
    stats = TOY.check(drafter, requests, cache_tokens=64)
    assert stats.preemptions > 0


@everybody
def test_where_prompts_are_read_in_small_pieces(drafter: str):
    stats = TOY.check(drafter, TOY.pairwise_requests()[:8], limits=EngineLimits(max_batch=3, max_round_tokens=5))
    assert stats.passes > stats.all.rounds  # some passes only read


@everybody
def test_a_second_time_with_everything_warm(drafter: str):
    """Shared pages and whatever the drafter remembers of the first time change nothing."""
    requests = TOY.pairwise_requests()[:6]
    tried = TOY.engine(drafter, requests)
    for _ in range(2):
        for told, asked in zip(run(tried, requests), requests, strict=True):
            assert_same(told, TOY.judged(asked))
    assert tried.stats.shared_tokens > 0


@everybody
def test_long_texts_that_go_in_circles(drafter: str):
    requests = tuple(
        request([i, 3, 5], max_tokens=90, ignore_eos=True, temperature=temperature, seed=i)
        for i, temperature in enumerate((0.0, 0.0, 0.3))
    )
    stats = TOY.check(drafter, requests)
    if drafter in ("suffix", "prompt-lookup", "mix", "oracle", "hidden-oracle", "draft-model:model=draft"):
        assert stats.all.accepted > 80


@everybody
def test_shared_beginnings_with_and_without_salt(drafter: str):
    """Later requests read pages of earlier ones where the salt is equal, and never across salts."""
    rng = random.Random(5)
    beginning = tuple(rng.choices(range(1, VOCAB), k=48))
    params = SamplingParams(max_tokens=20, temperature=0.6, seed=9)
    first = Request(prompt=(*beginning, 1), params=params, salt="x")
    same = Request(prompt=(*beginning, 2), params=params, salt="x")
    other = replace(same, salt="y")
    tried = TOY.engine(drafter, (first, same, other))
    shared: list[int] = []
    for asked in (first, same, other):
        before = tried.stats.shared_tokens
        (told,) = run(tried, [asked])
        assert_same(told, TOY.judged(asked))
        shared.append(tried.stats.shared_tokens - before)
    assert shared == [0, 48, 0]


@pytest.mark.slow
@everybody
def test_a_fuller_product(drafter: str):
    requests = TOY.pairwise_requests(designs=20)
    for start in range(0, len(requests), 8):
        limits = EngineLimits(max_batch=5, max_round_tokens=7 + start)
        TOY.check(drafter, requests[start : start + 8], limits=limits, cache_tokens=96 + 16 * (start % 5))
