"""How the logits of a head that drafts token by token become draft tokens, on the device: one, or the best few.

Mode `seeded` adds the target's noise at a token's position, as the target will, so that both tend to choose the same.
Mode `distribution` draws from the head's own probabilities q with noise of its own, fresh every round, and states q.
A request of temperature 0 takes the best tokens in both. Draws are from float64 whatever the head computes in.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from outrider.verify.largest import largest
from outrider.verify.noise import DRAFT, ROUND, TARGET, gumbel_at, keys_at


class HeadLogits(NamedTuple):
    """A head's logits for the tokens that follow the R nodes at one depth of its drafts, for B sequences."""

    rows: Tensor  # float32 [B, R, V]: for what follows each node
    step: int
    """The tokens that follow the nodes are at position lengths + step."""
    lengths: Tensor  # int64 [B]: tokens of each text
    seeds: Tensor  # int64 [B]
    temperatures: Tensor  # float64 [B]
    vocab: int
    """The size of the target's vocabulary."""
    tokens: Tensor | None = None  # int64 [V]: the token of each column; None: columns are tokens

    def token_of(self, columns: Tensor) -> Tensor:
        return columns if self.tokens is None else self.tokens[columns]

    def scaled(self) -> Tensor:
        """Logits divided by temperature, as they are where temperature is 0: float64 [B, R, V]"""
        return self.rows / torch.where(self.temperatures > 0, self.temperatures, 1.0)[:, None, None]

    def noise(self, *, drawn: bool) -> Tensor:
        """float64 [B, 1, V], the same for all nodes of a depth; 0 where temperature is 0. drawn: the draft's own."""
        seeds = keys_at(self.seeds, self.lengths, ROUND) if drawn else self.seeds
        stream, positions = DRAFT if drawn else TARGET, self.lengths + self.step
        noise = gumbel_at(seeds, positions, self.rows.shape[-1], stream=stream, tokens=self.tokens)
        return (noise * (self.temperatures > 0)[:, None])[:, None]

    def widened(self, probs: Tensor) -> Tensor:
        """[B, R, V] -> [B, R, vocab], 0 for tokens that the head cannot draft"""
        if self.tokens is None:
            return probs
        wide = probs.new_zeros(*probs.shape[:-1], self.vocab)
        return wide.index_copy_(-1, self.tokens, probs)


class Children(NamedTuple):
    """The best few tokens after each of R nodes, the best first."""

    tokens: Tensor  # int64 [B, R, count], different ones
    scores: Tensor  # float64 [B, R, count]: estimated log probability that each is accepted
    probs: Tensor | None = None  # float64 [B, R, vocab]: the distribution each node's tokens were drawn from


def next_tokens(logits: HeadLogits) -> Tensor:
    """Mode `seeded`: the token after the only node of each sequence. int64 [B]"""
    if logits.rows.is_cuda:
        from outrider.kernels.triton_sample import sample_tokens

        places = logits.lengths + logits.step if logits.step else logits.lengths
        chosen = sample_tokens(logits.rows[:, 0], logits.temperatures, logits.seeds, places, ids=logits.tokens)
        return chosen.clamp_(min=0)
    warm = bool((logits.temperatures > 0).any())
    scores = logits.scaled() + logits.noise(drawn=False) if warm else logits.rows
    return logits.token_of(largest(scores[:, 0])[1])


def noisy_children(logits: HeadLogits, count: int) -> Children:
    """Mode `seeded`: the `count` tokens of the largest logits / T + noise.

    Given the noise, softmax(logits / T + noise) is about how likely a target with similar logits takes each token.
    """
    log_probs = (logits.scaled() + logits.noise(drawn=False)).log_softmax(-1)
    scores, columns = log_probs.topk(count, -1)
    return Children(logits.token_of(columns), scores.nan_to_num(-torch.inf).clamp(min=_MIN_LOG_PROB, max=0))


def drawn_children(logits: HeadLogits, count: int) -> Children:
    """Mode `distribution`: `count` draws from q without replacement, in order."""
    log_q = logits.scaled().log_softmax(-1)
    columns = (log_q + logits.noise(drawn=True)).topk(count, -1).indices
    scores = log_q.gather(-1, columns).nan_to_num(-torch.inf).clamp(min=_MIN_LOG_PROB, max=0)
    return Children(logits.token_of(columns), scores, logits.widened(log_q.exp()))


_MIN_LOG_PROB = -1000.0
"""Finite, so that sums of scores can be compared."""
