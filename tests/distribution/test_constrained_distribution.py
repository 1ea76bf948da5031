"""Under a constraint both modes follow plain decoding's distribution with the same mask, whatever was drafted.

The rules are enumerated: every outcome of every draw, in float64. The constraint is a small automaton written
out by hand; the reference masks logits by the automaton itself and knows nothing of the package's pipeline.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from itertools import pairwise, product

import pytest
import torch
from distribution_harness import Context, Model, chains, distance, emitted, fits, joint, plain_probs, request, trees

from outrider.core.draft import Draft, Verdict
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.verify.base import RULES, make_verifier
from outrider.verify.distribution import judge_draft
from outrider.verify.draft_sampling import draft_token, draft_top
from outrider.verify.probs import probs_of, process_logits

LENGTH = 4
NEXT = {0: (1, 2), 1: (1,), 2: (0, 2), None: (0, 2)}
"""What may follow each token; after 1 the next is forced."""
PLANS = {
    "plain": SamplingParams(temperature=1.0),
    "top-p": SamplingParams(temperature=0.7, top_p=0.8),
    "top-k": SamplingParams(temperature=1.3, top_k=2),
}
plans = pytest.mark.parametrize("plan", PLANS)


class Automaton:
    """A constraint by the table above: every text can continue, none may end."""

    done = False
    problem = ""

    def __init__(self, last: Token | None = None) -> None:
        self.last = last

    def allowed(self, paths: Seq[Context], stops: frozenset[Token]) -> torch.Tensor:
        out = torch.zeros(len(paths), 3, dtype=torch.bool)
        for row, path in zip(out, paths, strict=True):
            text = (self.last, *path)
            if all(b in NEXT[a] for a, b in pairwise(text)):
                row[list(NEXT[text[-1]])] = True
        return out

    def advance(self, tokens: Seq[Token]) -> None:
        self.last = tokens[-1]

    def forced(self) -> tuple[Token, ...]:
        return (1, 1) if self.last == 1 else ()

    def fork(self) -> Automaton:
        return Automaton(self.last)


class Masked(Model):
    """The reference model: tokens the table does not name have probability 0. Scores stay raw."""

    def probs(self, context: Context, params: SamplingParams) -> list[float]:
        named = NEXT[context[-1] if context else None]
        raw = self.logits(context).tolist()
        kept = plain_probs([raw[i] for i in named], params)
        return [kept[named.index(i)] if i in named else 0.0 for i in range(3)]


TARGET, OTHER = Masked(3, depth=5), Masked(4, depth=5)
FREE = Model(4, depth=5)
"""A drafter that does not know of the constraint."""


def constrained(params: SamplingParams, tokens: Seq[Token] = (), seed: int = 0) -> Sequence:
    seq = request(params, tokens=tokens, seed=seed)
    seq.constraint = Automaton(tokens[-1] if tokens else None)
    return seq


@plans
def test_each_row_has_the_masked_probabilities_of_its_own_path(plan: str):
    """vLLM #44297, lmdeploy #4559: the mask of a drafted place is that of the drafted path, at every place."""
    params = PLANS[plan]
    paths = [path for n in range(4) for path in product(range(3), repeat=n)]
    rows = probs_of(process_logits(torch.stack([TARGET.logits(path) for path in paths]), constrained(params), paths))
    for row, path in zip(rows, paths, strict=True):
        text = (None, *path)
        if all(b in NEXT[a] for a, b in pairwise(text)):
            assert row.tolist() == pytest.approx(TARGET.probs(path, params), abs=1e-12)
        else:
            assert math.isnan(row[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drafter", [OTHER, FREE], ids=["masked draft", "free draft"])
@plans
def test_sampled_chains(plan: str, rule: str, drafter: Model):
    """Drawn from probabilities under the constraint, or from ones without it: then some tokens break it."""
    params = PLANS[plan]
    found, _ = emitted(
        TARGET,
        params,
        chains(drafter, params, 2),
        lambda draft, rng: judge_draft(constrained(params), draft, TARGET.score(draft), RULES[rule], rng),
        LENGTH,
    )
    assert distance(found, joint(TARGET, params, LENGTH)) < 1e-12


@pytest.mark.parametrize("drafter", [OTHER, FREE], ids=["masked draft", "free draft"])
@plans
def test_sampled_trees(plan: str, drafter: Model):
    params = PLANS[plan]
    found, _ = emitted(
        TARGET,
        params,
        trees(drafter, params, (((), ()), ())),
        lambda draft, rng: judge_draft(constrained(params), draft, TARGET.score(draft), RULES["block"], rng),
        LENGTH,
    )
    assert distance(found, joint(TARGET, params, LENGTH)) < 1e-12


CERTAIN = {
    "chain": Draft((2, 0, 1)),
    "chain that breaks the grammar": Draft((2, 1, 0)),
    "chain that breaks it at once": Draft((1, 1)),
    "tree": Draft((0, 2, 1, 2, 0), (-1, -1, 0, 1, 1)),
    "tree with a broken branch": Draft((1, 0, 1, 0, 1), (-1, -1, 0, 1, 1)),
}


@pytest.mark.parametrize("shape", CERTAIN)
@pytest.mark.parametrize("rule", RULES)
@plans
def test_drafts_that_state_no_probabilities(plan: str, rule: str, shape: str):
    params = PLANS[plan]
    found, _ = emitted(
        TARGET,
        params,
        [(1.0, CERTAIN[shape])],
        lambda draft, rng: judge_draft(constrained(params), draft, TARGET.score(draft), RULES[rule], rng),
        LENGTH,
    )
    assert distance(found, joint(TARGET, params, LENGTH)) < 1e-12


def test_forced_tokens_are_always_accepted():
    """A deterministic draft of the only tokens the target can choose is accepted whole, whatever is drawn."""
    params = PLANS["plain"]
    shifted = {n: torch.stack([TARGET.logits((0, 1, *(1,) * i)) for i in range(n + 1)]) for n in (1, 2)}
    for count, logits in shifted.items():
        for mode in ("seeded", "distribution"):
            for seed in range(20):
                seq = constrained(params, (0, 1), seed)
                (verdict,) = make_verifier(mode).judge([seq], [Draft((1,) * count)], logits)
                assert isinstance(verdict, Verdict)
                assert verdict.accepted == count


def test_a_rule_without_the_mask_is_caught():
    """The same comparison detects a distribution without the constraint."""
    params = PLANS["plain"]
    found, _ = emitted(
        TARGET,
        params,
        [(1.0, CERTAIN["chain"])],
        lambda draft, rng: judge_draft(constrained(params), draft, TARGET.score(draft), RULES["block"], rng),
        LENGTH,
    )
    unmasked = Model(3, depth=5)
    assert distance(found, joint(unmasked, params, LENGTH)) > 0.1


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize("tree", [False, True])
def test_whole_texts_with_real_noise(mode: str, tree: bool):
    """500 seeded texts of four tokens, drafted by a model under the constraint; chance of a false alarm 1e-6."""
    params, verifier = PLANS["plain"], make_verifier(mode)  # pyright: ignore[reportArgumentType]
    counts: Counter[Context] = Counter()
    for seed in range(500):
        seq = constrained(params, (), seed)
        while len(seq.tokens) < LENGTH:
            draft = _tree(seq, mode) if tree else _chain(seq, mode)
            paths = [tuple(draft.tokens[i] for i in draft.path(node)) for node in range(-1, len(draft))]
            logits = torch.stack([TARGET.logits((*seq.tokens, *path)) for path in paths])
            (verdict,) = verifier.judge([seq], [draft], logits)
            assert isinstance(verdict, Verdict)
            seq.tokens += verdict.tokens
            assert seq.constraint is not None
            seq.constraint.advance(verdict.tokens)
        counts[tuple(seq.tokens[:LENGTH])] += 1
    right = joint(TARGET, params, LENGTH)
    assert set(counts) <= set(right)
    assert fits(torch.tensor([counts[c] for c in right]), torch.tensor(list(right.values()))) > 1e-6


def _chain(seq: Sequence, mode: str) -> Draft:
    (token,), probs = draft_token(OTHER.logits(tuple(seq.tokens))[None], [seq], [()], mode)  # pyright: ignore[reportArgumentType]
    return Draft((token,), probs=probs)


def _tree(seq: Sequence, mode: str) -> Draft:
    tokens, stated = draft_top(OTHER.logits(tuple(seq.tokens)), seq, (), 2, mode)  # pyright: ignore[reportArgumentType]
    probs = None if stated is None else stated.expand(len(tokens), -1)
    return Draft(tuple(tokens), (-1,) * len(tokens), probs)
