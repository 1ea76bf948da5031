"""The contract of heads, proven by a toy: same texts in both modes, chains and trees, batched, shared, preempted."""

from __future__ import annotations

import random
from typing import Any, Literal

import pytest
import torch
from conformance_models import native_testbed
from plain_decoding import Told, assert_same, request, run
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed
from toy_eagle import ToyEagle, ToyEagleConfig

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterContext
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier

CHAIN, TREE = ToyEagleConfig(levels=4), ToyEagleConfig(levels=3, branches=3)
configs = pytest.mark.parametrize("config", [CHAIN, TREE], ids=["chain", "tree"])
in_flight = pytest.mark.parametrize("asynchronous", [False, True], ids=["waited", "in flight"])


@pytest.fixture(scope="module")
def world() -> Testbed:
    return native_testbed("llama-deep")


def engine(
    world: Testbed,
    config: ToyEagleConfig,
    *,
    asynchronous: bool = False,
    mode: Literal["seeded", "distribution"] = "seeded",
    cache_tokens: int = 4096,
    limits: EngineLimits | None = None,
) -> Engine:
    target = world.target(cache_tokens)
    target.asynchronous = asynchronous
    drafter = config.build(DrafterContext(vocab_size=VOCAB, context=CONTEXT, mode=mode, target=target))
    target.tap(drafter.traits.taps)
    return Engine(target, drafter, make_verifier(mode), TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)


def some_requests(count: int, **options: Any) -> list[Request]:
    rng = random.Random(count)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.choice((1, 3, 16, 17, 40)))] for _ in range(count)]
    return [
        request(prompt, **({"max_tokens": rng.choice((5, 24, 50)), "seed": i, "ignore_eos": i % 2 == 0} | options))
        for i, prompt in enumerate(prompts)
    ]


def check(world: Testbed, tried: Engine, asked: list[Request]) -> None:
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, world.judged(each), tolerance=1e-4)
    tried.check()


@configs
@in_flight
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_texts_are_plain_decodings(world, config, asynchronous, temperature):
    tried = engine(world, config, asynchronous=asynchronous, limits=EngineLimits(max_batch=4, max_round_tokens=40))
    check(world, tried, some_requests(9, temperature=temperature))
    assert tried.stats.all.drafted > 100
    assert tried.stats.draft_failures == 0


@configs
@in_flight
def test_every_pair_of_options(world, config, asynchronous):
    tried = engine(world, config, asynchronous=asynchronous, limits=EngineLimits(max_batch=8, max_round_tokens=60))
    check(world, tried, list(world.pairwise_requests()[:40]))


@configs
@in_flight
def test_preempted_in_a_small_pool(world, config, asynchronous):
    limits = EngineLimits(max_batch=6, max_round_tokens=30)
    tried = engine(world, config, asynchronous=asynchronous, cache_tokens=192, limits=limits)
    check(world, tried, some_requests(12, temperature=0.7))
    assert tried.stats.preemptions > 0


@configs
@in_flight
def test_cancelled_texts_leave_the_others_alone(world, config, asynchronous):
    asked = some_requests(8, max_tokens=40, temperature=1.0)
    tried = engine(world, config, asynchronous=asynchronous, limits=EngineLimits(max_batch=8))
    ids = [tried.submit(each)[0] for each in asked]
    texts = {i: tried.live(i).seq for i in ids}
    for step in range(500):
        if not tried.busy:
            break
        tried.step()
        if step in (3, 5, 9):
            tried.cancel(ids[step % 8])
    for seq_id, each in zip(ids, asked, strict=True):
        seq = texts[seq_id]
        judged = world.judged(each)[0].tokens
        written = tuple(seq.tokens[seq.prompt_len :])
        assert written == (judged if seq.finish != "cancelled" else judged[: len(written)])
    tried.check()


def drafts_of(tried: Engine, asked: Request) -> list[tuple[int, ...]]:
    """Every draft the head makes while it answers."""
    made: list[tuple[int, ...]] = []
    drafter = tried.drafter
    assert isinstance(drafter, ToyEagle)
    propose = drafter.propose

    def noting(view):
        drafts = propose(view)
        made.extend(tuple(draft.tokens) for draft in drafts)
        return drafts

    drafter.propose = noting  # type: ignore[method-assign]
    run(tried, [asked])
    drafter.propose = propose  # type: ignore[method-assign]
    return made


def assert_same_drafts(some: list[tuple[int, ...]], others: list[tuple[int, ...]]) -> None:
    """The same, but for budgets: where less was asked for, a draft is the beginning of another."""
    assert len(some) == len(others) > 5
    for one, other in zip(some, others, strict=True):
        shorter = min(len(one), len(other))
        assert one[:shorter] == other[:shorter]


@configs
@pytest.mark.parametrize("shared", [16, 32, 33, 47])
def test_a_shared_prefix_gives_the_drafts_of_one_that_was_read(world, config, shared):
    """The head's keys and values come with the pages, and what precedes the first own token is kept with them."""
    rng = random.Random(5)
    prefix = [rng.randrange(1, VOCAB) for _ in range(shared)]
    first = request([*prefix, 3, 5], max_tokens=20, ignore_eos=True)
    second = request([*prefix, 4, 2, 7][: shared + 3], max_tokens=20, ignore_eos=True)
    cold = drafts_of(engine(world, config), second)
    tried = engine(world, config)
    run(tried, [first])
    before = tried.stats.shared_tokens
    assert_same_drafts(drafts_of(tried, second), cold)
    assert tried.stats.shared_tokens - before >= shared - 15


@configs
def test_chunks_of_a_prompt_give_the_drafts_of_a_whole_one(world, config):
    asked = request([1 + i * 7 % (VOCAB - 1) for i in range(70)], max_tokens=20, ignore_eos=True)
    whole = drafts_of(engine(world, config), asked)
    for chunk in (7, 16, 33):
        assert_same_drafts(drafts_of(engine(world, config, limits=EngineLimits(max_round_tokens=chunk)), asked), whole)


@configs
def test_drafts_do_not_depend_on_the_batch_or_on_the_host(world, config):
    asked = request([5, 6, 7, 8], max_tokens=60, ignore_eos=True)
    waited, ahead = (drafts_of(engine(world, config, asynchronous=fly), asked) for fly in (False, True))
    half = len(waited) // 2  # towards the end of a text, budgets depend on what the host knows
    assert_same_drafts(ahead[:half], waited[:half])


@configs
def test_mode_distribution_follows_the_target(world, config):
    """Pairs of tokens drawn many times over, against the target's own probabilities."""
    tried = engine(world, config, mode="distribution", limits=EngineLimits(max_batch=64, max_round_tokens=4096))
    prompt, draws = [3, 4, 5], 3000
    asked = [request(prompt, max_tokens=3, temperature=1.0, seed=i, ignore_eos=True) for i in range(draws)]
    told: list[Told] = [each for (each,) in run(tried, asked)]
    first = world.world.logits_after(prompt).double().softmax(-1)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    expected = torch.zeros_like(counts)
    for token in range(VOCAB):
        expected[token] = first[token] * world.world.logits_after([*prompt, token]).double().softmax(-1)
    for each in told:
        counts[each.tokens[0], each.tokens[1]] += 1
    big = expected * draws >= 8
    observed = torch.cat([counts[big], counts[~big].sum()[None]])
    wanted = torch.cat([expected[big], expected[~big].sum()[None]]) * draws
    chi = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert chi < freedom + 6 * (2 * freedom) ** 0.5  # a false alarm in about a billion
    assert tried.stats.all.accepted > 0


def test_a_runner_without_layers_refuses_the_head():
    with pytest.raises(ConfigError, match="use a model of a native family"):
        ToyRunner().tap((0, 1))
