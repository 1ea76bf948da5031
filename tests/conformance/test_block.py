"""The block drafter: the texts of plain decoding in both modes, chains and trees, batched, shared, preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from block_reference import block_rows, tapped_outputs
from conformance_models import make_model, native_testbed
from plain_decoding import Told, assert_same, request, run
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed, up_to_the_end
from tiny_block import block_config, random_block, save_block

from outrider.core.errors import ConfigError
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext
from outrider.drafters.block import Block, BlockConfig
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.models.heads.block import BlockHead
from outrider.runners.native import NativeRunner
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier
from outrider.verify.noise import gumbel

HEADS: dict[str, dict[str, Any]] = {
    "dspark": {"draft_vocab_size": VOCAB - 4, "confidence": True, "confidence_with_markov": True, "qk_norm": True},
    "dflash": {"markov_rank": 0, "sample_from_anchor": False, "own_mask": False, "mask_token_id": 3, "block_size": 6},
    "causal": {"causal": True, "block_size": 4, "window": 20},
}
kinds = pytest.mark.parametrize(("kind", "tree"), [("dspark", 0), ("dspark", 9), ("dflash", 8), ("causal", 0)])
in_flight = pytest.mark.parametrize("asynchronous", [False, True], ids=["waited", "in flight"])


@pytest.fixture(scope="module")
def world() -> Testbed:
    return native_testbed("llama-deep")


@pytest.fixture(scope="module")
def heads(world: Testbed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    decoder = native(world.target(64)).model.decoder
    folder = tmp_path_factory.mktemp("heads")
    return {
        name: save_block(folder / name, random_block(block_config(decoder.config, **options), decoder))
        for name, options in HEADS.items()
    }


def native(runner: Any) -> NativeRunner:
    assert isinstance(runner, NativeRunner)
    return runner


def engine(
    world: Testbed,
    head: Path,
    tree: int = 0,
    *,
    asynchronous: bool = False,
    mode: Literal["seeded", "distribution"] = "seeded",
    cache_tokens: int = 4096,
    limits: EngineLimits | None = None,
) -> Engine:
    target = world.target(cache_tokens)
    target.asynchronous = asynchronous
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, mode=mode, target=target)
    drafter = BlockConfig(model=str(head), tree=tree).build(context)
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
    assert tried.stats.draft_failures == 0


@kinds
@in_flight
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_texts_are_plain_decodings(world, heads, kind, tree, asynchronous, temperature):
    limits = EngineLimits(max_batch=4, max_round_tokens=40)
    tried = engine(world, heads[kind], tree, asynchronous=asynchronous, limits=limits)
    check(world, tried, some_requests(9, temperature=temperature))
    assert tried.stats.all.drafted > 100
    assert tried.stats.all.accepted > 0


@kinds
@in_flight
def test_every_pair_of_options(world, heads, kind, tree, asynchronous):
    limits = EngineLimits(max_batch=8, max_round_tokens=60)
    tried = engine(world, heads[kind], tree, asynchronous=asynchronous, limits=limits)
    check(world, tried, list(world.pairwise_requests()[:40]))


@kinds
@in_flight
def test_preempted_in_a_small_pool(world, heads, kind, tree, asynchronous):
    limits = EngineLimits(max_batch=6, max_round_tokens=30)
    tried = engine(world, heads[kind], tree, asynchronous=asynchronous, cache_tokens=192, limits=limits)
    check(world, tried, some_requests(12, temperature=0.7))
    assert tried.stats.preemptions > 0


def expected_chain(model: Any, head: BlockHead, seq: Sequence) -> tuple[list[int], float]:
    """The chain behind a text by the recipe, and by how much the closest choice was decided."""
    config, weights, text = head.config, head.state_dict(), list(seq.tokens)
    embedding = model.get_input_embeddings().weight.detach().double()
    mask = weights["mask_embedding"].double() if config.own_mask else embedding[config.mask_token_id]
    rows = torch.stack([embedding[text[-1]], *[mask] * (config.block_size - 1)])
    context = tapped_outputs(model, text[:-1] or [0], config.taps)[: len(text) - 1]
    sizes = {"layers": config.layers, "dim": config.head_dim, "theta": config.rope.theta}
    hidden = block_rows(weights, context, rows, **sizes, causal=config.causal, window=config.window)
    hidden = hidden if config.sample_from_anchor else hidden[1:]
    tokens = torch.arange(VOCAB) if not config.draft_vocab_size else torch.arange(len(weights["d2t"])) + weights["d2t"]
    logits = hidden @ model.lm_head.weight.detach().double()[tokens].T
    chain, lead, temperature = [], float("inf"), seq.params.temperature
    for step, row in enumerate(logits):
        if config.markov_rank:
            w1, w2 = (weights[f"markov_head.markov_{each}.weight"].double() for each in ("w1", "w2"))
            row = row + w2 @ w1[[text[-1], *chain][step]]
        if temperature:
            row = row / temperature + gumbel(seq.seed, len(text) + step, VOCAB)[tokens]
        best, second = row.topk(2).values.tolist()
        lead = min(lead, best - second)
        chain.append(int(tokens[row.argmax()]))
    return chain, lead


@pytest.mark.parametrize("kind", HEADS)
def test_drafts_are_those_of_the_recipe_over_the_whole_text(world, heads, kind):
    """Batched, through pages, in chunks and with prefix hits, against float64 without a cache."""
    model = make_model("llama-deep")
    tried = engine(world, heads[kind], limits=EngineLimits(max_batch=3, max_round_tokens=25))
    drafter, checked = tried.drafter, 0
    assert isinstance(drafter, Block)
    propose = drafter.propose

    def checking(view):
        nonlocal checked
        drafts = propose(view)
        for seq, draft in zip(view.seqs, drafts, strict=True):
            chain, lead = expected_chain(model, drafter.head, seq)
            if draft and lead > 1e-3:
                assert list(draft.tokens) == chain[: len(draft)]
                checked += 1
        return drafts

    drafter.propose = checking  # type: ignore[method-assign]
    asked = some_requests(5, temperature=0.8)
    asked[3:] = [request([*range(1, 20), *range(1, 18), i], temperature=0.4 * i, max_tokens=24) for i in range(3)]
    run(tried, asked[-1:])
    run(tried, asked)
    assert checked > 60
    assert tried.stats.draft_failures == 0
    assert tried.stats.shared_tokens > 0


def test_up_to_the_end_of_the_context(world, heads):
    """Blocks reach beyond the last position that a text may have."""
    for asynchronous in (False, True):
        tried = engine(world, heads["dspark"], asynchronous=asynchronous)
        check(world, tried, up_to_the_end())


def drafts_of(tried: Engine, asked: Request) -> list[tuple[int, ...]]:
    """Every draft the head makes while it answers."""
    made: list[tuple[int, ...]] = []
    drafter = tried.drafter
    assert isinstance(drafter, Block)
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
    assert any(some)
    for one, other in zip(some, others, strict=True):
        shorter = min(len(one), len(other))
        assert one[:shorter] == other[:shorter]


@kinds
@pytest.mark.parametrize("shared", [16, 33, 47])
def test_a_shared_prefix_gives_the_drafts_of_one_that_was_read(world, heads, kind, tree, shared):
    rng = random.Random(5)
    prefix = [rng.randrange(1, VOCAB) for _ in range(shared)]
    first = request([*prefix, 3, 5], max_tokens=20, ignore_eos=True)
    second = request([*prefix, 4, 2, 7], max_tokens=20, ignore_eos=True)
    cold = drafts_of(engine(world, heads[kind], tree), second)
    tried = engine(world, heads[kind], tree)
    run(tried, [first])
    before = tried.stats.shared_tokens
    assert_same_drafts(drafts_of(tried, second), cold)
    assert tried.stats.shared_tokens - before >= shared - 15


@kinds
def test_chunks_of_a_prompt_give_the_drafts_of_a_whole_one(world, heads, kind, tree):
    asked = request([1 + i * 7 % (VOCAB - 1) for i in range(70)], max_tokens=20, ignore_eos=True)
    whole = drafts_of(engine(world, heads[kind], tree), asked)
    for chunk in (7, 33):
        limits = EngineLimits(max_round_tokens=chunk)
        assert_same_drafts(drafts_of(engine(world, heads[kind], tree, limits=limits), asked), whole)


@kinds
def test_drafts_do_not_depend_on_what_the_host_knows(world, heads, kind, tree):
    asked = request([5, 6, 7, 8], max_tokens=60, ignore_eos=True)
    waited, ahead = (drafts_of(engine(world, heads[kind], tree, asynchronous=fly), asked) for fly in (False, True))
    half = len(waited) // 2  # towards the end of a text, budgets depend on what the host knows
    assert_same_drafts(ahead[:half], waited[:half])


@pytest.mark.parametrize("kind", ["dspark", "dflash"])
def test_mode_distribution_follows_the_target(world, heads, kind):
    """Pairs of tokens drawn many times over, against the target's own probabilities."""
    limits = EngineLimits(max_batch=64, max_round_tokens=4096)
    tried = engine(world, heads[kind], mode="distribution", limits=limits)
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
    assert tried.stats.draft_failures == 0


def test_refusals(world, heads):
    with pytest.raises(ConfigError, match="tree must be 0 to 31"):
        BlockConfig(model="x", tree=32)
    native = DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=world.target(64))
    with pytest.raises(ConfigError, match="block needs a head"):
        BlockConfig().build(native)
    toy = ToyRunner()
    context = DrafterContext(vocab_size=toy.vocab_size, context=CONTEXT, target=toy)
    with pytest.raises(ConfigError, match="native family"):
        BlockConfig(model=str(heads["dspark"])).build(context)
