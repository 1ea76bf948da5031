"""Mode `distribution`, for a chain: keep a prefix of the draft so that the text follows the target's law.

p [n + 1, vocab] are the target's laws (after the text, then after each draft token) and
q [n, vocab] the laws the draft tokens were drawn from, both float64. A rule returns how many
tokens stand and the token that follows them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.sampling import Token
from outrider.verify.dice import Dice


class ChainRule(Protocol):
    def __call__(self, tokens: Seq[Token], p: Tensor, q: Tensor, dice: Dice) -> tuple[int, Token]: ...


def stated_probs(draft: Draft, like: Tensor) -> Tensor:
    """The laws the draft's tokens were drawn from: float64 [len(draft), at least like's vocab], summing to 1.

    A draft that states none was certain of each token. What is no probability counts as 0: a
    drafter that misstates its law forfeits exactness, but can never bring about a non-token.
    """
    vocab = like.shape[-1]
    if draft.probs is None:
        cells = [i * vocab + token for i, token in enumerate(draft.tokens) if 0 <= token < vocab]
        q = like.new_zeros(len(draft) * vocab, dtype=torch.float64)
        q[torch.tensor(cells, dtype=torch.int64, device=like.device)] = 1.0
        return q.view(len(draft), vocab)
    q = draft.probs.to(like.device, torch.float64).nan_to_num(0.0, 0.0, 0.0).clamp_(min=0)
    q /= q.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float64).tiny)
    return pad(q, vocab)


def pad(laws: Tensor, width: int) -> Tensor:
    """Laws [R, vocab] over at least `width` tokens; those added have probability 0."""
    missing = width - laws.shape[-1]
    return torch.nn.functional.pad(laws, (0, missing)) if missing > 0 else laws


def acceptance(p: Tensor, q: Tensor, token: Token) -> float:
    """The chance of keeping `token`, drawn from q [vocab], where the target's law is p [vocab]."""
    return min(1.0, _ratio(p, q, token))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The law, up to a factor, of the token that replaces a refused draw from q: (p - q)+ [vocab]."""
    left = (p - q).clamp_(min=0)
    return left if bool(left.any()) else p  # nothing left: p equals q but for rounding


def token_rule(tokens: Seq[Token], p: Tensor, q: Tensor, dice: Dice) -> tuple[int, Token]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): the reference."""
    for i, token in enumerate(tokens):
        if not dice.chance(acceptance(p[i], q[i], token)):
            return i, dice.draw(residual(p[i], q[i]))
    return len(tokens), dice.draw(p[len(tokens)])


def block_rule(tokens: Seq[Token], p: Tensor, q: Tensor, dice: Dice) -> tuple[int, Token]:
    """Block verification (Sun et al. 2024): the longest prefix that stands; never fewer than `token_rule`."""
    weights, stands = block_weights(tokens, p, q)
    kept = next((i for i in range(len(tokens), 0, -1) if dice.chance(stands[i])), 0)
    if kept == len(tokens):
        return kept, dice.draw(p[kept])
    return kept, dice.draw(residual(weights[kept] * p[kept], q[kept]))


def block_weights(tokens: Seq[Token], p: Tensor, q: Tensor) -> tuple[list[float], list[float]]:
    """For each prefix length 0..n: its weight, and the chance that it stands when no longer one does.

    weight_i = min(1, weight_(i-1) * p(x_i) / q(x_i));  S_i = sum of (weight_i * p - q)+ after it;
    the chance is S_i / (S_i + 1 - weight_i), and weight_n for the whole block.
    """
    weights = [1.0]
    for i, token in enumerate(tokens):
        weights.append(min(1.0, weights[-1] * _ratio(p[i], q[i], token)))
    n = len(tokens)
    column = torch.tensor(weights[:n], dtype=p.dtype, device=p.device)[:, None]
    excess = (column * p[:n] - q).clamp_(min=0).sum(-1).tolist()  # S_0 .. S_(n-1)
    # 0 over 0: p equals q here, so a longer prefix stands all but surely
    stands = [s / (s + (1 - w)) if s > 0 else 0.0 for s, w in zip(excess, weights, strict=False)]
    return weights, [*stands, weights[n]]


def _ratio(p: Tensor, q: Tensor, token: Token) -> float:
    """p / q of the token; 0 where the draft says it cannot have drawn it."""
    if not 0 <= token < len(p):
        return 0.0
    stated = float(q[token])
    return float(p[token]) / stated if stated > 0 else 0.0
