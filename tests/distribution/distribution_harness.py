"""Shared by these tests: models whose probabilities depend on context, and exact references.

Draws are enumerated as in `outrider prove`; the probabilities that its outcomes are compared with are computed here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.prove.enumerate_rules import EnumeratedRng, outcomes

VOCAB = 3
Context = tuple[Token, ...]
Joint = dict[Context, float]
Node = tuple[int, Token, list[float]]  # its parent, its token, and the probabilities at the parent
Shape = tuple["Shape", ...]  # a tree without tokens: a node is the tuple of its children


class Model:
    """Random logits, different after every context of up to `depth` tokens."""

    def __init__(self, seed: int, *, depth: int = 3, vocab: int = VOCAB, spread: float = 1.5) -> None:
        contexts = [c for n in range(depth + 1) for c in product(range(vocab), repeat=n)]
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(len(contexts), vocab, generator=generator, dtype=torch.float64) * spread
        self.depth = depth
        self.vocab = vocab
        self._rows = dict(zip(contexts, table, strict=True))

    def logits(self, context: Context) -> Tensor:
        return self._rows[context]

    def probs(self, context: Context, params: SamplingParams) -> list[float]:
        return plain_probs(self.logits(context).tolist(), params)

    def score(self, draft: Draft) -> Tensor:
        """What a target returns: [1 + len(draft), vocab]."""
        paths = [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(-1, len(draft))]
        return torch.stack([self.logits(path) for path in paths])


def plain_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k and top-p by the book, in Python floats: the reference for the production pipeline."""
    p = _normal([math.exp((x - max(logits)) / params.temperature) for x in logits])
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if params.top_k:
        p = _normal([x if i in order[: params.top_k] else 0.0 for i, x in enumerate(p)])
    before = 0.0
    kept: list[int] = []
    for i in order:
        if before < params.top_p:
            kept.append(i)
        before += p[i]
    return _normal([x if i in kept else 0.0 for i, x in enumerate(p)])


def _normal(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [w / total for w in weights]


def joint(model: Model, params: SamplingParams, length: int, start: Context = ()) -> Joint:
    """The model's own distribution of the first `length` tokens, given that they begin with `start`."""
    if len(start) == length:
        return {start: 1.0}
    out: Joint = {}
    for token, p in enumerate(model.probs(start, params)):
        if p > 0:
            out |= {c: p * rest for c, rest in joint(model, params, length, (*start, token)).items()}
    return out


def chains(model: Model, params: SamplingParams, length: int) -> Iterator[tuple[float, Draft]]:
    """Every chain a faithful drafter may sample, with its probability."""
    for tokens in product(range(model.vocab), repeat=length):
        rows = [model.probs(tokens[:i], params) for i in range(length)]
        chance = math.prod(row[t] for row, t in zip(rows, tokens, strict=True))
        if chance > 0:
            yield chance, Draft(tokens, probs=torch.tensor(rows, dtype=torch.float64))


def trees(model: Model, params: SamplingParams, shape: Shape) -> Iterator[tuple[float, Draft]]:
    """Every tree of this shape that is drawn without replacement; smaller where too few tokens have probability."""

    def grow(nodes: list[Node], todo: list[tuple[int, Context, Shape]]) -> Iterator[tuple[float, list[Node]]]:
        if not todo:
            yield 1.0, nodes
            return
        (parent, context, children), *rest = todo
        probs = model.probs(context, params)
        count = min(len(children), sum(p > 0 for p in probs))
        for picked in permutations(range(model.vocab), count):
            chance = without_replacement(probs, picked)
            if chance > 0:
                new = [(parent, token, probs) for token in picked]
                below = [(len(nodes) + i, (*context, t), children[i]) for i, t in enumerate(picked)]
                for tail, tree in grow([*nodes, *new], [*rest, *below]):
                    yield chance * tail, tree

    for chance, nodes in grow([], [(-1, (), shape)]):
        parents, tokens, probs = zip(*nodes, strict=True)
        yield chance, Draft(tokens, parents=parents, probs=torch.tensor(probs, dtype=torch.float64))


def without_replacement(probs: list[float], picked: tuple[Token, ...]) -> float:
    """The probability of drawing just these, in this order."""
    out, left = 1.0, 1.0
    for token in picked:
        out *= probs[token] / left
        left -= probs[token]
    return out


def emitted(
    target: Model,
    params: SamplingParams,
    drafts: Iterable[tuple[float, Draft]],
    judge: Callable[[Draft, EnumeratedRng], Verdict],
    length: int,
) -> tuple[Joint, float]:
    """The distribution of the first `length` tokens when `judge` judges the drafts, and the expected tokens of a round.

    What a round leaves open is drawn from the target's own distribution, so a correct rule gives exactly
    `joint(target, params, length)`.
    """
    out: Joint = defaultdict(float)
    expected = 0.0
    for drawn, draft in drafts:
        for answered, verdict in outcomes(lambda rng, draft=draft: judge(draft, rng)):
            chance = drawn * answered
            expected += chance * len(verdict.tokens)
            for context, rest in joint(target, params, length, verdict.tokens).items():
                out[context] += chance * rest
    return dict(out), expected


def distance(a: Joint, b: Joint) -> float:
    """The sum of absolute differences: twice the total variation."""
    return math.fsum(abs(a.get(c, 0.0) - b.get(c, 0.0)) for c in a.keys() | b.keys())


def request(params: SamplingParams, *, tokens: Iterable[Token] = (), seed: int = 0) -> Sequence:
    """A sequence whose whole text is the prompt."""
    text = list(tokens)
    return Sequence(id=0, tokens=text, prompt_len=len(text), params=params, seed=seed)


def chi_squared_tail(statistic: float, freedom: int) -> float:
    """The chance that a chi-squared variable exceeds `statistic`."""
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def fits(counts: Tensor, probs: Tensor) -> float:
    """Pearson's test of counts against probabilities, both [..., cells]: the chance of a worse fit."""
    counts, probs = counts.double().flatten(), probs.double().flatten()
    if bool(counts[probs == 0].any()):
        return 0.0
    counts, probs = counts[probs > 0], probs[probs > 0]
    wanted = probs / probs.sum() * counts.sum()
    return chi_squared_tail(float(((counts - wanted) ** 2 / wanted).sum()), len(probs) - 1)
