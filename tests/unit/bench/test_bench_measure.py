"""Measuring a batch: the window in which all decode, and the figures of just these requests."""

from __future__ import annotations

import pytest

from outrider.bench.llm_factory import DRAFT_MODEL, LLMFactory
from outrider.bench.measure import Measurement, measure, random_prompts
from outrider.bench.syncs import SyncCounter
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.engine.stats import Times
from outrider.testing.synthetic import synthetic_pair

PAIR = synthetic_pair("tiny", seed=2)
RIG = LLMFactory(PAIR, cache_tokens=2048, context=256)


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_a_window_of_plain_decoding():
    llm = RIG.llm("none", max_batch=3)
    found = measure(llm.engine, random_prompts(3, 20, 512, first=257), params(10), salt="a")
    assert (found.batch, found.rounds, found.tokens, found.tau) == (3, 8, 24, 1.0)
    assert found.times.rounds == 8
    assert found.stats.tokens == 30
    assert 0 < found.seconds <= found.total_seconds
    assert not llm.engine.busy
    llm.engine.check()


def test_a_window_of_speculation_counts_only_what_it_saw():
    llm = RIG.llm(f"{DRAFT_MODEL},k=5", max_batch=2)
    prompts = random_prompts(2, 20, 512, first=257)
    first = measure(llm.engine, prompts, params(25), salt="b")
    second = measure(llm.engine, prompts, params(25), salt="c")
    for found in (first, second):
        assert (found.rounds, found.tokens, found.tau) == (3, 36, 6.0)
        assert found.stats.all.rounds == 2 * 5  # and those that read the prompt, for the target and for the draft
        assert found.times.rounds == 3
        assert (found.alpha, found.gamma) == (1.0, 5.0)
    llm.engine.check()


def test_staggered_prompts_open_the_window_when_the_last_is_read():
    """Eight tokens a round: the second prompt is read rounds after the first began to decode."""
    llm = RIG.llm("none", max_batch=2, max_round_tokens=8)
    found = measure(llm.engine, random_prompts(2, 16, 512, first=257), params(12), salt="d")
    assert 0 < found.rounds < 10
    assert found.tokens == 2 * found.rounds
    assert found.times.rounds == found.rounds


def test_to_the_end_brings_whole_texts_the_same_with_and_without_drafts():
    prompts = random_prompts(4, 12, 512, first=257)
    texts = [
        measure(RIG.llm(drafter, max_batch=2).engine, prompts, params(20), salt=drafter, to_end=True).texts
        for drafter in ("none", DRAFT_MODEL)
    ]
    assert texts[0] == texts[1]
    assert [len(text) for text in texts[0]] == [20] * 4


def test_max_draft_0_is_plain():
    llm = RIG.llm(DRAFT_MODEL)
    found = measure(llm.engine, random_prompts(1, 12, 512, first=257), params(8), salt="e", max_draft=0)
    assert (found.rounds, found.stats.all.drafted) == (6, 0)


def test_too_few_tokens_to_decode_together_is_said():
    llm = RIG.llm("none", max_batch=2, max_round_tokens=4)
    with pytest.raises(ConfigError, match="raise max_tokens"):
        measure(llm.engine, random_prompts(2, 40, 512, first=257), params(2), salt="f")
    assert not llm.engine.busy


def test_figures_of_a_round():
    times = Times(draft=0.1, verify=0.3, host=0.05, rounds=2)
    found = Measurement(2, tokens=24, seconds=0.5, rounds=2, drafted=40, accepted=20, rejected=2, times=times)
    assert found.rate == 48
    assert found.tau == 6
    assert (found.alpha, found.gamma) == (pytest.approx(20 / 22), 10)
    assert found.split_ms() == pytest.approx((50, 150, 50)), "what nobody timed is the host's too"
    assert found.host_share == pytest.approx(0.2)
    none = Measurement(1)
    assert none.rate == none.tau == none.alpha == none.gamma == none.host_share == 0
    assert none.split_ms() == (0, 0, 0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("drafter", ["none", "suffix", "prompt-lookup", DRAFT_MODEL, f"{DRAFT_MODEL},beams=2,k=3"])
def test_the_figures_of_a_window_agree(drafter: str, batch: int):
    """Drafts that are empty, rejected or as long as they may be, of chains and trees."""
    llm = RIG.llm(drafter, max_batch=batch)
    prompts = [each * 3 for each in random_prompts(batch, 6, 512, first=257)]
    found = measure(llm.engine, prompts, params(60), salt=drafter, to_end=True)
    assert found.rounds > 2
    assert found.rate * found.round_ms / 1000 == pytest.approx(found.tau * batch)
    assert found.tau == pytest.approx(1 + found.accepted / (found.rounds * batch))
    assert 1 <= found.tau <= found.gamma + 1
    assert 0 <= found.alpha <= 1
    assert (found.drafted == 0) == (drafter == "none")
    assert found.accepted + found.rejected <= max(found.drafted, found.accepted)
    draft, verify, host = found.split_ms()
    assert draft + verify + host == pytest.approx(found.round_ms)
    assert min(draft, verify, host) >= 0
    assert host >= 1000 * found.times.host / found.rounds
    assert found.times.rounds == found.rounds


def test_prompts_are_seeded_and_distinct():
    one, again = random_prompts(3, 8, 300, first=257, seed=1), random_prompts(3, 8, 300, first=257, seed=1)
    assert one == again
    assert len({tuple(prompt) for prompt in one}) == 3
    assert all(257 <= token < 300 for prompt in one for token in prompt)


def test_without_a_device_nobody_waits_for_it():
    with SyncCounter() as waits:
        RIG.llm("none").generate([300, 301], params(2))
    assert waits.count == 0
