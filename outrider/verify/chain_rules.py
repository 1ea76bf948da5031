"""Mode `distribution`, chains: accept a prefix of the draft so that the text follows the target's distribution.

p [n + 1, vocab] are the target's probabilities (after the text, then after each draft token) and
q [n, vocab] those the draft tokens were drawn from, both float64. A rule returns how many tokens
are accepted and the token that follows them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.sampling import Token
from outrider.verify.rng import Rng


class ChainRule(Protocol):
    def __call__(self, tokens: Seq[Token], p: Tensor, q: Tensor, rng: Rng) -> tuple[int, Token]: ...


def stated_probs(draft: Draft, like: Tensor) -> Tensor:
    """The probabilities the draft's tokens were drawn from: float64 [len(draft), vocab], rows summing to 1.

    vocab is that of `like`, or the draft's where that is larger. A draft without probabilities
    gives each of its tokens probability 1. Invalid values count as 0: a drafter that misstates its
    probabilities loses exactness, but can never produce an id outside the vocabulary.
    """
    vocab = like.shape[-1]
    if draft.probs is None:
        cells = [i * vocab + token for i, token in enumerate(draft.tokens) if 0 <= token < vocab]
        q = like.new_zeros(len(draft) * vocab, dtype=torch.float64)
        q[torch.tensor(cells, dtype=torch.int64, device=like.device)] = 1.0
        return q.view(len(draft), vocab)
    q = draft.probs.to(like.device, torch.float64).nan_to_num(0.0, 0.0, 0.0).clamp_(min=0)
    q /= q.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
    return pad_probs(q, vocab)


def pad_probs(probs: Tensor, width: int) -> Tensor:
    """Probabilities [R, vocab] padded with zeros to at least `width` columns."""
    missing = width - probs.shape[-1]
    return torch.nn.functional.pad(probs, (0, missing)) if missing > 0 else probs


def accept_probability(p: Tensor, q: Tensor, token: Token) -> float:
    """The probability of accepting `token`, drawn from q [vocab], where the target has p [vocab]."""
    return min(1.0, _ratio(p, q, token))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The weights of the token recovered after a draw from q is rejected: (p - q)+ [vocab]."""
    left = (p - q).clamp_(min=0)
    return left if bool(left.any()) else p  # nothing left: p equals q except for rounding


def token_rule(tokens: Seq[Token], p: Tensor, q: Tensor, rng: Rng) -> tuple[int, Token]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): the reference."""
    for i, token in enumerate(tokens):
        if not rng.bernoulli(accept_probability(p[i], q[i], token)):
            return i, rng.categorical(residual(p[i], q[i]))
    return len(tokens), rng.categorical(p[len(tokens)])


def block_rule(tokens: Seq[Token], p: Tensor, q: Tensor, rng: Rng) -> tuple[int, Token]:
    """Block verification (Sun et al. 2024): accepts at least as many tokens as `token_rule` on average."""
    weights, chances = block_weights(tokens, p, q)
    accepted = next((i for i in range(len(tokens), 0, -1) if rng.bernoulli(chances[i])), 0)
    if accepted == len(tokens):
        return accepted, rng.categorical(p[accepted])
    return accepted, rng.categorical(residual(weights[accepted] * p[accepted], q[accepted]))


def block_weights(tokens: Seq[Token], p: Tensor, q: Tensor) -> tuple[list[float], list[float]]:
    """For each prefix length 0..n: its weight, and the probability of accepting it if no longer one is.

    weight_i = min(1, weight_(i-1) * p(x_i) / q(x_i));  S_i = sum of (weight_i * p - q)+ after it;
    the probability is S_i / (S_i + 1 - weight_i), and weight_n for the whole block.
    """
    weights = [1.0]
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * _ratio(p[i], q[i], token)))
    n = len(tokens)
    column = torch.tensor(weights[:n], dtype=p.dtype, device=p.device)[:, None]
    excess = (column * p[:n] - q).clamp_(min=0).sum(-1).tolist()  # S_0 .. S_(n-1)
    # 0 over 0: p equals q here, so a longer prefix is accepted with probability 1 except for rounding
    chances = [s / (s + (1 - w)) if s > 0 else 0.0 for s, w in zip(excess, weights, strict=False)]
    return weights, [*chances, weights[n]]


def _ratio(p: Tensor, q: Tensor, token: Token) -> float:
    """p / q of the token; 0 where q is 0 or the token is outside the vocabulary."""
    if not 0 <= token < len(p):
        return 0.0
    stated = float(q[token])
    return float(p[token]) / stated if stated > 0 else 0.0
