"""A model that says NaN once it reads one token: whoever reads it fails, and nobody else, whatever they share."""

from __future__ import annotations

import random
from typing import Any

import pytest
from conformance_models import native_testbed
from plain_decoding import assert_same, request, run
from testbed import TOKENIZER, VOCAB, Testbed

from outrider.core.draft import Draft
from outrider.core.sequence import Sequence
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.testing.drafters import ScriptedDrafter
from outrider.verify.base import make_verifier

POISON = 13
PAGE = 16


@pytest.fixture(scope="module", params=[None, "int4"], ids=["float32", "int4"])
def bed(request: Any) -> Testbed:
    return native_testbed("llama", quantize=request.param, poison=POISON)


def bad(length: int = 40, at: int = 0) -> Request:
    """A request whose prompt holds the poison."""
    prompt = random.Random(length).choices([t for t in range(1, VOCAB) if t != POISON], k=length)
    prompt[at] = POISON
    return request(prompt, max_tokens=20, ignore_eos=True)


def good(count: int, length: int = 3, max_tokens: int = 30) -> list[Request]:
    """Requests that never come upon the poison."""
    options = {"max_tokens": max_tokens, "ignore_eos": True, "banned_token_ids": (POISON,)}
    beginning = [1 + i % (POISON - 1) for i in range(length - 1)]
    return [request([i + 1, *beginning], temperature=0.4 * i, seed=i, **options) for i in range(count)]


def assert_well(bed: Testbed, tried: Engine, requests: list[Request]) -> None:
    for told, asked in zip(run(tried, requests), requests, strict=True):
        assert_same(told, bed.judged(asked), tolerance=1e-4)


@pytest.mark.parametrize("drafter", ["none", "suffix", "oracle"])
@pytest.mark.parametrize("at", [0, 20, 39])
def test_it_fails_alone(bed: Testbed, drafter: str, at: int):
    fine = good(5)
    tried = bed.engine(drafter, fine)
    told = run(tried, [*fine[:2], bad(at=at), *fine[2:]])
    ((failed,),) = [each for each in told if each[0].finish == "error"]
    assert failed.tokens == ()
    for each, asked in zip([each for each in told if each[0].finish != "error"], fine, strict=True):
        assert_same(each, bed.judged(asked), tolerance=1e-4)
    assert tried.target.pool.used == 0


def test_whoever_gets_its_pages_is_well(bed: Testbed):
    """The pool is as large as one text, so that the next one must take the pages of the failed one."""
    tried = bed.engine("none", cache_tokens=4 * PAGE)
    for _ in range(2):
        ((failed,),) = run(tried, [bad()])
        assert failed.finish == "error"
        assert_well(bed, tried, good(1, length=5, max_tokens=50))


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_whoever_gets_its_pages_after_it_was_cancelled_while_reading_is_well(bed: Testbed, rounds: int):
    """Cancelled before anybody noticed: the poison has been read, its keys and values are in the pages."""
    tried = bed.engine("none", limits=EngineLimits(max_round_tokens=9), cache_tokens=4 * PAGE)
    (seq_id,) = tried.submit(bad())
    for _ in range(rounds):
        assert tried.step() == []
    assert tried.cancel(seq_id) is not None
    tried.check()
    assert_well(bed, tried, good(1, length=5, max_tokens=50))


def test_whoever_gets_its_pages_after_it_was_preempted_while_reading_is_well(bed: Testbed):
    """Five pages: the first text grows and takes, one by one, those of the newcomer that reads the poison."""
    fine = good(1, length=30, max_tokens=45)
    tried = bed.engine("none", limits=EngineLimits(max_round_tokens=9), cache_tokens=5 * PAGE)
    told = run(tried, [*fine, bad(length=60)])
    assert tried.stats.preemptions > 0
    assert_same(told[0], bed.judged(fine[0]), tolerance=1e-4)
    assert told[1][0].finish == "error"


def test_two_that_share_its_pages_both_fail_and_leave_nothing(bed: Testbed):
    tried = bed.engine("none", limits=EngineLimits(max_round_tokens=21), cache_tokens=8 * PAGE)
    asked = bad()
    first, second = tried.submit(asked)[0], tried.submit(asked)[0]
    tried.step()
    tried.cancel(first)
    tried.check()
    ends = {event.seq_id: event.finish for _ in range(20) for event in tried.step() if event.finish}
    assert ends == {second: "error"}
    tried.check()
    assert_well(bed, tried, good(3, length=5, max_tokens=25))


@pytest.mark.parametrize("shape", [None, (-1, 0, 1), (-1, -1, 1)])
@pytest.mark.parametrize("often", [1, 3])
def test_a_draft_that_holds_the_poison_costs_time_and_no_more(bed: Testbed, shape: tuple[int, ...] | None, often: int):
    """A drafter may be wrong at will: the target bans the token, so no text holds it, drafted or not."""

    def script(seq: Sequence, budget: int) -> Draft:
        return Draft((5, POISON, 7), shape).first_nodes(budget if seq.round % often == 0 else 0)

    tried = Engine(
        bed.target(1024), ScriptedDrafter(script), make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids
    )
    assert_well(bed, tried, good(3))
