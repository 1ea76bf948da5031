"""The random draws of mode `distribution`. A rule asks for a draw; it never sees a random number."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.core.sampling import NO_TOKEN, Token
from outrider.core.sequence import Sequence
from outrider.verify.noise import ACCEPT, RESIDUAL, round_seed, uniform


class Rng(Protocol):
    """What a rule may ask for. Draws are independent of each other and of the draft."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def categorical(self, weights: Tensor) -> Token:
        """A token with probability proportional to its weight [vocab]; NO_TOKEN where all weights are 0 or NaN."""
        ...


class RoundRng:
    """The draws of one sequence in one round: the same seed, nonce and text length give the same draws."""

    def __init__(self, seq: Sequence) -> None:
        self._seed = round_seed(seq.draw_seed, len(seq.tokens))
        self._count = 0

    def bernoulli(self, probability: float) -> bool:
        return self._next(ACCEPT) < probability

    def categorical(self, weights: Tensor) -> Token:
        cumulative = weights.double().cumsum(-1)  # [vocab]
        total = float(cumulative[-1])
        if not total > 0:
            return NO_TOKEN
        # the first token whose cumulative weight exceeds the draw; a token of weight 0 is never the first
        return int((cumulative <= self._next(RESIDUAL) * total).sum())

    def _next(self, stream: int) -> float:
        self._count += 1
        return uniform(self._seed, self._count, stream=stream)
