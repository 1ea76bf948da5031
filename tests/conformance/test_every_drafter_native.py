"""Every drafter on tiny random models of real families: the text is what Transformers' own forward passes say."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from conformance_models import fallback_testbed, native_testbed
from drafter_cast import EVERY_NATIVE, NATIVE_ONLY
from plain_decoding import Told, assert_same, request, run
from testbed import VOCAB, Testbed

from outrider.core.sampling import SamplingParams
from outrider.engine.request import EngineLimits, Request
from outrider.runners.native import NativeRunner

everybody = pytest.mark.parametrize("drafter", EVERY_NATIVE)
SOME = (
    "suffix:width=3,min_prob=0",
    "hidden-oracle",
    "random-trees",
    "draft-model:model=other,k=4,min_prob=0.2",
    *(specs[0] for specs in NATIVE_ONLY.values()),
)
CLOSE = 1e-4  # log-probabilities, against Transformers in float32


@pytest.fixture(scope="module")
def beds(tmp_path_factory: pytest.TempPathFactory):
    """Testbeds by name, made when first asked for: `llama`, `llama int4`, `gpt2`."""
    made: dict[str, Testbed] = {}

    def bed(name: str) -> Testbed:
        if name not in made:
            family, _, quantize = name.partition(" ")
            kind: Any = quantize or None
            if family in ("gpt2", "mamba"):
                made[name] = fallback_testbed(family, tmp_path_factory.mktemp(name))
            else:
                made[name] = native_testbed(family, quantize=kind)
        return made[name]

    return bed


@everybody
def test_in_mixed_batches_of_eight(beds: Any, drafter: str):
    bed = beds("llama")
    requests = bed.pairwise_requests(designs=1)[:16]
    for start in range(0, len(requests), 8):
        bed.check(drafter, requests[start : start + 8], tolerance=CLOSE)


@pytest.mark.parametrize("drafter", SOME[:2])
def test_alone(beds: Any, drafter: str):
    bed = beds("llama")
    for asked in bed.pairwise_requests(designs=1):
        bed.check(drafter, (asked,), tolerance=CLOSE)


@pytest.mark.parametrize("drafter", SOME[:2])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2"])
def test_in_every_family(beds: Any, family: str, drafter: str):
    bed = beds(family)
    bed.check(drafter, bed.pairwise_requests(designs=1)[:8], tolerance=CLOSE)


@pytest.mark.parametrize("drafter", SOME)
@pytest.mark.parametrize("family", ["llama", "mistral", "llama int4"])
def test_where_everything_is_tight(beds: Any, family: str, drafter: str):
    """Four pages for six texts, prompts read in pieces: trees, preemption and rereading at once."""
    bed = beds(family)
    requests = tuple(
        request(range(1, 4 + 3 * i), max_tokens=34, ignore_eos=True, temperature=0.3 * i, seed=i, top_k=6, logprobs=1)
        for i in range(6)
    )
    stats = bed.check(drafter, requests, limits=EngineLimits(max_round_tokens=11), cache_tokens=64, tolerance=CLOSE)
    assert stats.preemptions > 0


@pytest.mark.parametrize("drafter", SOME)
@pytest.mark.parametrize("page_size", [1, 3])
def test_on_tiny_pages(beds: Any, page_size: int, drafter: str):
    """Every draft crosses pages, and every page is soon shared."""
    bed = beds("llama")
    requests = bed.pairwise_requests(designs=1)[:8]
    decoder = bed.target(64).model.decoder
    tried = replace(bed, target=lambda _: NativeRunner(decoder, 300, page_size=page_size)).engine(drafter, requests)
    for _ in range(2):
        for told, asked in zip(run(tried, requests), requests, strict=True):
            assert_same(told, bed.judged(asked), tolerance=CLOSE)
    assert tried.stats.shared_tokens > 0


@pytest.mark.parametrize("drafter", SOME)
@pytest.mark.parametrize("family", ["llama", "llama int8"])
def test_shared_beginnings_with_and_without_salt(beds: Any, family: str, drafter: str):
    bed = beds(family)
    beginning = tuple(random.Random(5).choices(range(1, VOCAB), k=48))
    params = SamplingParams(max_tokens=20, temperature=0.6, seed=9, logprobs=2)
    first = Request(prompt=(*beginning, 1), params=params, salt="x")
    same = Request(prompt=(*beginning, 2), params=params, salt="x")
    requests = (first, same, replace(same, salt="y"))
    tried = bed.engine(drafter, requests)
    shared: list[int] = []
    for asked in requests:
        before = tried.stats.shared_tokens
        (told,) = run(tried, [asked])
        assert_same(told, bed.judged(asked), tolerance=CLOSE)
        shared.append(tried.stats.shared_tokens - before)
    assert shared == [0, 48, 0]


def packed_requests() -> list[Request]:
    params = SamplingParams(max_tokens=16, temperature=0.5, ignore_eos=True, logprobs=3)
    return [Request(prompt=(i, *range(2, 9 + 3 * i)), params=replace(params, seed=i)) for i in range(4)]


@pytest.fixture(scope="module")
def told_alone(beds: Any) -> dict[str, list[list[Told]]]:
    """By the packed format: what the package says to `packed_requests` without drafts, one after another."""
    limits = EngineLimits(max_batch=1)
    return {
        each: run(beds(f"llama {each}").engine("none", limits=limits), packed_requests()) for each in ("int4", "int8")
    }


@pytest.mark.parametrize(
    ("packed", "drafter"), [*(("int4", name) for name in EVERY_NATIVE), *(("int8", name) for name in SOME)]
)
def test_packed_models_to_the_last_bit(beds: Any, told_alone: dict[str, list[list[Told]]], packed: str, drafter: str):
    """Log-probabilities too: the same bits drafted or not, alone or in a batch, in one pass or many."""
    requests = packed_requests()
    drafted = beds(f"llama {packed}").engine(drafter, requests, limits=EngineLimits(max_round_tokens=19))
    for told, plain_text_of in zip(run(drafted, requests), told_alone[packed], strict=True):
        assert told == plain_text_of
        assert [one.logprobs for one in told] == [one.logprobs for one in plain_text_of]


@pytest.mark.parametrize("drafter", [*SOME[1:], "mix"])
@pytest.mark.parametrize("packed", ["int4", "int8"])
def test_packed_models_with_every_option(beds: Any, packed: str, drafter: str):
    """Judged by one pass over the whole text for every token."""
    bed = beds(f"llama {packed}")
    bed.check(drafter, bed.pairwise_requests(designs=1), tolerance=1e-5)


@pytest.mark.parametrize("drafter", ["suffix", "wavering-oracle", "hidden-oracle", "liar"])
@pytest.mark.parametrize("family", ["gpt2", "mamba"])
def test_models_that_run_on_transformers(beds: Any, family: str, drafter: str):
    """One whose cache can be cropped and one whose cannot: what was refused is read again."""
    bed = beds(family)
    limits = EngineLimits(max_batch=4, max_round_tokens=21)
    bed.check(drafter, bed.pairwise_requests(designs=1)[:7], limits=limits, cache_tokens=112, tolerance=CLOSE)


@pytest.mark.slow
@everybody
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "llama int4", "llama int8", "gpt2"])
def test_a_fuller_product(beds: Any, family: str, drafter: str):
    bed = beds(family)
    requests = bed.pairwise_requests(designs=3)
    for start in range(0, len(requests), 8):
        limits = EngineLimits(max_batch=5, max_round_tokens=7 + start)
        bed.check(
            drafter, requests[start : start + 8], limits=limits, cache_tokens=96 + start % 5 * 16, tolerance=CLOSE
        )
