"""EAGLE drafters: the texts of plain decoding in both modes, chains and trees, batched, shared, preempted."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conformance_models import make_model, native_testbed
from eagle_reference import Reference
from plain_decoding import Told, assert_same, request, run
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed, up_to_the_end
from tiny_eagle import eagle_config, random_eagle, save_eagle

from outrider.core.errors import ConfigError
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext
from outrider.drafters.eagle import Eagle, EagleConfig
from outrider.drafters.shipped import shipped_folder
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.runners.native import NativeRunner
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier
from outrider.verify.noise import gumbel

HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle", "bias": True},
    "eagle3": {"draft_vocab_size": VOCAB - 4, "own_head": True},
    "eagle3.1": {"norm_output": True, "fc_norm": True, "norm_before_residual": True},
    "speculators": {"norm_before_fc": True, "norm_before_residual": True, "draft_vocab_size": VOCAB - 2},
}
CHAIN, TREE, WIDE = {"k": 4}, {"tree": 9, "depth": 4, "top_k": 3}, {"tree": 15, "depth": 3, "top_k": 5}
ways = pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle1", CHAIN), ("eagle1", TREE), ("eagle3", CHAIN), ("eagle3.1", WIDE), ("speculators", TREE)],
)
in_flight = pytest.mark.parametrize("asynchronous", [False, True], ids=["waited", "in flight"])


@pytest.fixture(scope="module")
def world() -> Testbed:
    return native_testbed("llama-deep")


@pytest.fixture(scope="module")
def heads(world: Testbed, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target = world.target(64)
    assert isinstance(target, NativeRunner)
    decoder, folder = target.model.decoder, tmp_path_factory.mktemp("heads")
    return {
        name: save_eagle(folder / name, random_eagle(eagle_config(decoder.config, **options), decoder))
        for name, options in HEADS.items()
    }


def engine(
    world: Testbed,
    head: Path,
    options: dict[str, int],
    *,
    asynchronous: bool = False,
    mode: Literal["seeded", "distribution"] = "seeded",
    cache_tokens: int = 4096,
    limits: EngineLimits | None = None,
) -> Engine:
    target = world.target(cache_tokens)
    target.asynchronous = asynchronous
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, mode=mode, target=target)
    drafter = EagleConfig(model=str(head), **options).build(context)
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


@ways
@in_flight
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batched_texts_are_plain_decodings(world, heads, kind, options, asynchronous, temperature):
    limits = EngineLimits(max_batch=4, max_round_tokens=40)
    tried = engine(world, heads[kind], options, asynchronous=asynchronous, limits=limits)
    check(world, tried, some_requests(9, temperature=temperature))
    assert tried.stats.all.drafted > 100
    assert tried.stats.all.accepted > 0


@ways
@in_flight
def test_every_pair_of_options(world, heads, kind, options, asynchronous):
    limits = EngineLimits(max_batch=8, max_round_tokens=60)
    tried = engine(world, heads[kind], options, asynchronous=asynchronous, limits=limits)
    check(world, tried, list(world.pairwise_requests()[:24]))


@ways
@in_flight
def test_preempted_in_a_small_pool(world, heads, kind, options, asynchronous):
    limits = EngineLimits(max_batch=6, max_round_tokens=30)
    tried = engine(world, heads[kind], options, asynchronous=asynchronous, cache_tokens=192, limits=limits)
    check(world, tried, some_requests(12, temperature=0.7))
    assert tried.stats.preemptions > 0


@ways
def test_up_to_the_end_of_the_context(world, heads, kind, options):
    for asynchronous in (False, True):
        check(world, engine(world, heads[kind], options, asynchronous=asynchronous), up_to_the_end())


class Judge:
    """What a head must draft behind texts, by the recipe over the whole text."""

    def __init__(self, drafter: Eagle, kind: str) -> None:
        taps = (3,) if kind == "eagle1" else (0, 1, 3)
        self.reference = Reference(
            drafter.head.state_dict(), make_model("llama-deep"), {"taps": taps, "dim": 16} | HEADS[kind]
        )

    def scores(self, seq: Sequence, path: tuple[int, ...]) -> dict[int, float]:
        """log softmax(logits / T + noise) of every token that can be drafted behind a path."""
        tokens, temperature = self.reference.tokens, seq.params.temperature
        row = self.reference.logits(list(seq.tokens), path)
        if temperature:
            row = row / temperature + gumbel(seq.seed, len(seq.tokens) + len(path), VOCAB)[tokens]
        return dict(zip(tokens.tolist(), row.log_softmax(-1).tolist(), strict=True))

    def chain(self, seq: Sequence, length: int) -> tuple[list[tuple[int, ...]], float]:
        """The paths of a chain, and by how much the closest choice was decided."""
        path: tuple[int, ...] = ()
        paths, lead = [], float("inf")
        for _ in range(length):
            (token, best), (_, second) = _ranked(self.scores(seq, path))[:2]
            path, lead = (*path, token), min(lead, best - second)
            paths.append(path)
        return paths, lead

    def tree(self, seq: Sequence, nodes: int, depth: int, top_k: int) -> tuple[list[tuple[int, ...]], float]:
        """EAGLE-2: top_k nodes of each level get top_k children; the best of all, the best first."""
        found: dict[tuple[int, ...], float] = {}
        level, lead = {(): 0.0}, float("inf")
        for _ in range(depth):
            kept = _ranked(level)
            lead = min(lead, _gap(kept, top_k))
            children: dict[tuple[int, ...], float] = {}
            for path, total in kept[:top_k]:
                ranked = _ranked(self.scores(seq, path))
                lead = min(lead, _gap(ranked, top_k))
                children |= {(*path, token): total + score for token, score in ranked[:top_k]}
            found |= children
            level = children
        ranked = _ranked(found)
        # a node that is as likely as its child still comes first
        gaps = [a - b for (above, a), (below, b) in pairwise(ranked[: nodes + 1]) if below[: len(above)] != above]
        return [path for path, _ in ranked[:nodes]], min(lead, *gaps)


def _ranked(scores: dict[Any, float]) -> list[tuple[Any, float]]:
    return sorted(scores.items(), key=lambda item: -item[1])


def _gap(ranked: list[tuple[Any, float]], count: int) -> float:
    """By how much the last of the best `count` leads the next."""
    return ranked[count - 1][1] - ranked[count][1] if len(ranked) > count else float("inf")


@ways
def test_drafts_are_those_of_the_recipe_over_the_whole_text(world, heads, kind, options):
    """Batched, through pages, in chunks and with prefix hits, against float64 without a cache."""
    tried = engine(world, heads[kind], options, limits=EngineLimits(max_batch=3, max_round_tokens=25))
    drafter, checked = tried.drafter, 0
    assert isinstance(drafter, Eagle)
    propose, judge = drafter.propose, Judge(drafter, kind)

    def checking(view):
        nonlocal checked
        drafts = propose(view)
        for seq, draft in zip(view.seqs, drafts, strict=True):
            if not draft or len(seq.tokens) < 2:
                continue
            sizes = (options["tree"], options["depth"], options["top_k"]) if "tree" in options else ()
            paths, lead = judge.tree(seq, *sizes) if sizes else judge.chain(seq, len(draft))
            if lead > 1e-4:
                made = [tuple(draft.tokens[node] for node in draft.path(i)) for i in range(len(draft))]
                assert made == paths[: len(draft)]
                checked += 1
        return drafts

    drafter.propose = checking  # type: ignore[method-assign]
    asked = some_requests(4, temperature=0.8, max_tokens=10)
    asked[2:] = [request([*range(1, 20), *range(1, 18), i], temperature=0.4 * i, max_tokens=10) for i in range(3)]
    run(tried, asked[-1:])
    run(tried, asked)
    assert checked > 15
    assert tried.stats.draft_failures == 0
    assert tried.stats.shared_tokens > 0


def drafts_of(tried: Engine, asked: Request) -> list[tuple[int, ...]]:
    """Every draft the head makes while it answers."""
    made: list[tuple[int, ...]] = []
    drafter = tried.drafter
    assert isinstance(drafter, Eagle)
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


@ways
@pytest.mark.parametrize("shared", [16, 33, 47])
def test_a_shared_prefix_gives_the_drafts_of_one_that_was_read(world, heads, kind, options, shared):
    rng = random.Random(5)
    prefix = [rng.randrange(1, VOCAB) for _ in range(shared)]
    first = request([*prefix, 3, 5], max_tokens=20, ignore_eos=True)
    second = request([*prefix, 4, 2, 7], max_tokens=20, ignore_eos=True)
    cold = drafts_of(engine(world, heads[kind], options), second)
    tried = engine(world, heads[kind], options)
    run(tried, [first])
    before = tried.stats.shared_tokens
    assert_same_drafts(drafts_of(tried, second), cold)
    assert tried.stats.shared_tokens - before >= shared - 15


@ways
def test_drafts_do_not_depend_on_what_the_host_knows(world, heads, kind, options):
    asked = request([5, 6, 7, 8], max_tokens=60, ignore_eos=True)
    waited, ahead = (drafts_of(engine(world, heads[kind], options, asynchronous=fly), asked) for fly in (False, True))
    half = len(waited) // 2  # towards the end of a text, budgets depend on what the host knows
    assert_same_drafts(ahead[:half], waited[:half])


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle1", CHAIN), ("eagle3", TREE), ("eagle3.1", {"tree": 12, "depth": 2, "top_k": 6})],
)
def test_mode_distribution_follows_the_target(world, heads, kind, options):
    """Pairs of tokens drawn many times over, against the target's own probabilities."""
    limits = EngineLimits(max_batch=64, max_round_tokens=4096)
    tried = engine(world, heads[kind], options, mode="distribution", limits=limits)
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


def test_refusals(heads):
    with pytest.raises(ConfigError, match="tree must be 0 to 31"):
        EagleConfig(model="x", tree=32)
    with pytest.raises(ConfigError, match="run 71 nodes of a tree, and 63 is the most"):
        EagleConfig(model="x", tree=24, depth=8, top_k=10)
    toy = ToyRunner()
    context = DrafterContext(vocab_size=toy.vocab_size, context=CONTEXT, target=toy)
    with pytest.raises(ConfigError, match="models of a native family"):
        EagleConfig(model=str(heads["eagle3"])).build(context)
    with pytest.raises(ConfigError, match="eagle needs a head"):
        shipped_folder("eagle", None, "eagle3")
