"""The randomness of the p/q rules, as two questions. A rule asks; it never sees a number."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.core.sampling import NO_TOKEN, Token
from outrider.core.sequence import Sequence
from outrider.verify.noise import ACCEPT, RESIDUAL, round_seed, uniform


class Dice(Protocol):
    """What a rule may ask. Answers are independent of each other and of the draft."""

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def draw(self, weights: Tensor) -> Token:
        """A token with probability proportional to its weight [vocab]; NOTHING where there is no mass."""
        ...


class RoundDice:
    """The dice of one sequence's round: the same questions get the same answers for the same seed."""

    def __init__(self, seq: Sequence) -> None:
        self._seed = round_seed(seq.seed, len(seq.tokens))
        self._asked = 0

    def chance(self, probability: float) -> bool:
        return self._next(ACCEPT) < probability

    def draw(self, weights: Tensor) -> Token:
        reached = weights.double().cumsum(-1)  # [vocab]
        total = float(reached[-1])
        if not total > 0:
            return NO_TOKEN
        # the first token past the mark: one of no weight never is, since it does not move the sum
        return int((reached <= self._next(RESIDUAL) * total).sum())

    def _next(self, stream: int) -> float:
        self._asked += 1
        return uniform(self._seed, self._asked, stream=stream)
