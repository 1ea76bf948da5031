"""Mode `distribution` through the whole engine: options hold, runs repeat, greedy is greedy, text is exact.

The tests compare the first two drafted tokens of 512 seeded texts with their distribution (Pearson's chi-square over
25 cells, rare ones pooled). Seeds are fixed, so a test always ends the same way; a correct engine had a chance of
1e-4 a test to be judged wrong when they were chosen.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product
from typing import Literal

import pytest
import torch
from drafter_cast import EVERYBODY, Stage, make_drafter
from plain_decoding import Told, run
from testbed import EOS, TOKENIZER
from toy_world import TOY

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.testing.drafters import ScriptedDrafter
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

everybody = pytest.mark.parametrize("drafter", EVERYBODY)
Mode = Literal["seeded", "distribution"]


def all_texts(drafter: str, count: int | None = None) -> list[list[Told]]:
    requests = TOY.pairwise_requests(designs=1)[:count]
    return run(TOY.engine(drafter, requests, mode="distribution", cache_tokens=512), requests)


@everybody
def test_every_option_and_limit_holds(drafter: str):
    for texts, asked in zip(all_texts(drafter, 14), TOY.pairwise_requests(designs=1), strict=False):
        assert len(texts) == asked.params.n
        for told in texts:
            assert_obeys(told, asked)
        if asked.params.greedy:
            assert texts == TOY.judged(asked)


def assert_obeys(told: Told, asked: Request) -> None:
    """What can be said of one text whatever was drawn."""
    params, tokens = asked.params, told.tokens
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    assert told.finish in ("stop", "length")
    assert len(tokens) <= params.max_tokens
    assert (told.finish == "length") <= (len(tokens) == params.max_tokens)
    assert not set(tokens) & set(params.banned_token_ids)
    assert params.allowed_token_ids is None or set(tokens) <= set(params.allowed_token_ids)
    assert not ends & set(tokens[: params.min_tokens - 1 if params.min_tokens else -1])
    assert told.finish == "length" or len(tokens) >= params.min_tokens
    assert isinstance(told.stop_reason, int) == (tokens[-1] in ends)
    if isinstance(told.stop_reason, str):
        assert told.stop_reason in params.stop
        assert TOKENIZER.decode(tokens).startswith(told.text + told.stop_reason)
    else:
        assert told.text == TOKENIZER.decode(tokens[:-1] if told.finish == "stop" else tokens)
    if params.logits_processors:
        text = (*asked.prompt, *tokens)
        assert all(a != b for a, b in zip(text[len(asked.prompt) - 1 :], tokens, strict=False))
    if params.logprobs is not None:
        assert len(told.logprobs) == len(tokens)


@everybody
def test_the_same_requests_to_a_fresh_engine_give_the_same_texts(drafter: str):
    """Without predictions: draws for a request that has one are random, since it may be an answer to that request."""
    requests = [replace(asked, prediction=()) for asked in TOY.pairwise_requests(designs=1)[:5]]
    one, other = (TOY.engine(drafter, requests, mode="distribution", cache_tokens=512) for _ in range(2))
    assert run(one, requests) == run(other, requests)


def test_without_drafts_the_text_depends_on_the_seed_alone():
    """Alone or in a batch, read at once or in pieces."""
    together = all_texts("none")
    for texts, asked in zip(together, TOY.pairwise_requests(designs=1), strict=True):
        alone = TOY.engine("none", mode="distribution", limits=EngineLimits(max_batch=1, max_round_tokens=7))
        assert run(alone, [asked]) == [texts]


# The distribution of two tokens. A vocabulary of five, and options that hang on what was drafted before.

FIVE, PROMPT, FIRST, TEXTS = 5, (1, 3), 4, 512
PARAMS: dict[str, float] = {"temperature": 0.9, "presence_penalty": 1.2}


class SureAtFirst(ToyRunner):
    """Answers the prompt with one token for certain: nothing is drafted there, so nothing is to be learnt."""

    def _make_row(self, tail: tuple[Token, ...]) -> torch.Tensor:
        row = super()._make_row(tail)
        row[FIRST] += 1e6 * (tail == PROMPT)
        return row


def five(order: int) -> ToyRunner:
    return SureAtFirst(FIVE, order=order, cache_tokens=1 << 12)


TARGET, OTHER = five(2), five(1)


def exact_probs() -> dict[tuple[Token, ...], float]:
    """The chance of every two tokens behind the first, by the book."""
    after = {(): probs_after(TARGET, (FIRST,))} | {(t,): probs_after(TARGET, (FIRST, t)) for t in range(FIVE)}
    return {(a, b): after[()][a] * after[a,][b] for a, b in product(range(FIVE), repeat=2)}


def probs_after(model: ToyRunner, output: Seq[Token]) -> list[float]:
    scores = model.logits_after((*PROMPT, *output)).double().tolist()
    weights = [
        math.exp((x - PARAMS["presence_penalty"] * (t in output)) / PARAMS["temperature"]) for t, x in enumerate(scores)
    ]
    return [w / sum(weights) for w in weights]


def sampled_chain(seq: Sequence, budget: int) -> Draft:
    """Drawn from another model's probabilities, and stating them."""
    rng, tokens, stated = _dice(seq), [], []
    for _ in range(budget):
        stated.append(probs_after(OTHER, [*seq.tokens[2:], *tokens]))
        tokens.append(rng.choices(range(FIVE), stated[-1])[0])
    return Draft(tuple(tokens), probs=torch.tensor(stated, dtype=torch.float64)) if tokens else Draft()


def sampled_tree(seq: Sequence, budget: int) -> Draft:
    """Two children everywhere, drawn without replacement from another model's probabilities, and stating them."""
    rng, tokens, parents, stated = _dice(seq), [], [], []
    paths: list[list[Token]] = [[]]
    for parent, _ in zip((-1, 0, 1), range(budget // 2), strict=False):
        path = paths[parent + 1]
        probs = probs_after(OTHER, [*seq.tokens[2:], *path])
        first = rng.choices(range(FIVE), probs)[0]
        second = rng.choices(range(FIVE), [0 if t == first else p for t, p in enumerate(probs)])[0]
        for token in (first, second):
            tokens.append(token)
            parents.append(parent)
            stated.append(probs)
            paths.append([*path, token])
    return Draft(tuple(tokens), tuple(parents), torch.tensor(stated, dtype=torch.float64)) if tokens else Draft()


def certain_chain(seq: Sequence, budget: int) -> Draft:
    return Draft((2, 0, 4)[:budget])


def certain_tree(seq: Sequence, budget: int) -> Draft:
    return Draft((2, 0, 1, 3), (-1, -1, 0, 0)).first_nodes(budget)


def misstated_chain(seq: Sequence, budget: int) -> Draft:
    """Always token 2, but claimed to be drawn evenly."""
    return Draft((2,) * budget, probs=torch.full((budget, FIVE), 1 / FIVE))


def _dice(seq: Sequence) -> random.Random:
    return random.Random(seq.seed * 64 + len(seq.tokens))


def worse_fit(drafter: Drafter, mode: Mode, rule: Literal["block", "token"] = "block") -> float:
    """The chance that a right engine fits the distribution worse than this one."""
    tried = Engine(
        five(2),
        drafter,
        make_verifier(mode, rule),
        ByteTokenizer(),
        limits=EngineLimits(max_batch=128, max_round_tokens=4096),
    )
    asked = [
        Request(prompt=PROMPT, params=SamplingParams(max_tokens=4, seed=1000 + i, n=128, **PARAMS))  # pyright: ignore[reportArgumentType]
        for i in range(TEXTS // 128)
    ]
    counts = Counter(told.tokens[1:3] for texts in run(tried, asked) for told in texts)
    assert tried.stats.all.drafted > TEXTS  # two a text, but for rounds that ended early
    return chi_square_tail(counts, exact_probs())


def chi_square_tail(counts: Counter[tuple[Token, ...]], probs: dict[tuple[Token, ...], float]) -> float:
    """Pearson's test; cells expected less than five times are pooled."""
    total = sum(counts.values())
    cells = [(counts[c], p * total) for c, p in probs.items() if p * total >= 5]
    rare = [(counts[c], p * total) for c, p in probs.items() if p * total < 5]
    cells.append((sum(n for n, _ in rare), sum(e for _, e in rare)))
    statistic = sum((n - e) ** 2 / e for n, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


SCRIPTS: dict[str, Callable[[Sequence, int], Draft]] = {
    "sampled chain": sampled_chain,
    "sampled tree": sampled_tree,
    "certain chain": certain_chain,
    "certain tree": certain_tree,
}


@pytest.mark.parametrize(("script", "rule"), [*((script, "block") for script in SCRIPTS), ("sampled chain", "token")])
def test_the_text_has_the_target_s_distribution(script: str, rule: Literal["block", "token"]):
    assert worse_fit(ScriptedDrafter(SCRIPTS[script], max_tokens=6), "distribution", rule) > 1e-4


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("draft-model:model=other,k=3", "distribution"),
        ("draft-model:model=other,k=2,beams=2", "distribution"),
        ("draft-model:model=other,k=2,beams=2", "seeded"),
    ],
)
def test_with_a_draft_model_the_text_has_the_target_s_distribution(name: str, mode: Mode):
    stage = Stage(FIVE, TARGET.context, TOKENIZER, lambda _: five(1), mode)
    assert worse_fit(make_drafter(name, stage), mode) > 1e-4


def test_the_text_has_the_target_s_distribution_in_mode_seeded():
    assert worse_fit(ScriptedDrafter(sampled_tree, max_tokens=6), "seeded") > 1e-4


def test_another_distribution_would_be_noticed():
    """The same test finds a drafter that misstates the probabilities it draws from."""
    assert worse_fit(ScriptedDrafter(misstated_chain, max_tokens=6), "distribution") < 1e-9
