"""Evidence against a stated law, as e-values: bets that win only if the law is wrong; and which bias they would see.

A bet on each draw pays alternative(y) / law(y), where y was drawn and the alternative is any distribution chosen before
it was. If the law is right, the expected product of all that is paid so far is at most 1, whatever was drawn, in
whatever order, and wherever one stops (Ville 1939; Shafer 2021). So an e-value reaches 1 / a with a probability of at
most a: this holds for any number of draws, and needs no approximation. An average of e-values is one too.

The power is simulated along with the test: the same bets, on the same texts, on draws that are biased on purpose.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""The chance that all tests of one proof together find anything in a correct engine, at most."""
REPLACED = (0.06, 0.09, 0.13, 0.2, 0.4)
"""Shares of draws that are replaced in simulations."""
RUNS = 5  # simulations of each share
WEIGHTS = (4.0, 32.0, 256.0)
THRESHOLDS = (0.02, 0.1, 0.3)
FACTORS = (0.4, 2.0)
SHARES = (0.05, 0.15, 0.4)
IMPOSSIBLE = 1e300  # what a draw pays that the law rules out

Payoffs = list[float]
"""What one draw pays, by alternative."""


@dataclass(slots=True)
class EValue:
    """The logarithms of several e-values of one test, one for each alternative; the test's own is their average."""

    logs: list[float]

    def add(self, payoffs: Payoffs) -> None:
        for i, payoff in enumerate(payoffs):
            self.logs[i] += math.log(payoff)

    @property
    def log_e(self) -> float:
        top = max(self.logs)
        return top + math.log(math.fsum(math.exp(each - top) for each in self.logs) / len(self.logs))


class LawTest:
    """One test: what its bets won on the real draws, and on simulated ones."""

    def __init__(self, alternatives: int) -> None:
        self.draws = 0
        self.runs = [EValue([0.0] * alternatives) for _ in range(1 + len(REPLACED) * RUNS)]
        """The real draws, then RUNS simulations of each share."""
        self.reach = 0.0
        """The sum over draws of the total variation between the law and what replaces its draws."""

    def add(self, bet: Callable[[int, int], Payoffs], token: int, simulated: Simulated) -> None:
        """bet(run, token): what a draw pays."""
        self.draws += 1
        self.reach += simulated.distance
        for run, (value, drawn) in enumerate(zip(self.runs, (token, *simulated.tokens), strict=True)):
            value.add(bet(run, drawn))

    def join(self, other: LawTest) -> None:
        """Take in evidence of the same alternatives from other draws."""
        self.draws += other.draws
        self.reach += other.reach
        for own, added in zip(self.runs, other.runs, strict=True):
            own.logs = [one + two for one, two in zip(own.logs, added.logs, strict=True)]

    @property
    def log_e(self) -> float:
        return self.runs[0].log_e

    def visible_bias(self, limit: float) -> float | None:
        """The smallest bias that all its simulations show, in total variation a draw; None where none does."""
        for i, share in enumerate(REPLACED):
            if all(run.log_e >= limit for run in self.runs[1 + i * RUNS : 1 + (i + 1) * RUNS]):
                return share * self.reach / self.draws
        return None

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        runs = [[round(log, 6) for log in run.logs] for run in self.runs]
        return {"draws": self.draws, "reach": self.reach, "runs": runs}

    @staticmethod
    def from_dict(found: dict[str, Any]) -> LawTest:
        out = LawTest(1)
        out.draws, out.reach, out.runs = found["draws"], found["reach"], [EValue(list(logs)) for logs in found["runs"]]
        return out


@dataclass(frozen=True, slots=True)
class Simulated:
    """A biased draw in each simulation."""

    tokens: list[int]
    distance: float
    """The total variation between the law and what replaces its draws."""


class Simulator:
    """Biased draws: a share of them is replaced by the law's likeliest token, or by a draw from another law."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._shares = torch.tensor([share for share in REPLACED for _ in range(RUNS)], dtype=torch.float64)

    def draw(self, law: Tensor, lure: Tensor | None = None) -> Simulated:
        """A token for each simulation. law, lure [vocab]: each sums to 1."""
        count = len(self._shares)
        honest = torch.multinomial(law, count, replacement=True, generator=self._random)
        if lure is None:
            false, distance = law.argmax().expand(count), 1 - float(law.max())
        else:
            false = torch.multinomial(lure, count, replacement=True, generator=self._random)
            distance = float((law - lure).abs().sum()) / 2
        replaced = torch.rand(count, generator=self._random, dtype=torch.float64) < self._shares
        return Simulated(torch.where(replaced, false, honest).tolist(), distance)


class LearntLaw:
    """Bets that each context's draws follow a law of their own, learnt from its draws so far: any bias shows in time.

    Before draw n + 1 of a context the alternative is (w law + counts) / (w + n), for each weight w.
    """

    ALTERNATIVES = len(WEIGHTS)

    def __init__(self) -> None:
        self._counts: dict[Hashable, dict[int, int]] = defaultdict(lambda: defaultdict(int))

    def bet(self, context: Hashable, token: int, chance: float) -> Payoffs:
        """chance: of this token in this context, by the law."""
        counts = self._counts[context]
        n, counts[-1] = counts[-1], counts[-1] + 1
        before, counts[token] = counts[token], counts[token] + 1
        if chance <= 0:
            return [IMPOSSIBLE] * len(WEIGHTS)
        return [(w + before / chance) / (w + n) for w in WEIGHTS]


class LikelyTokens:
    """Bets that the likeliest token comes too often or too rarely, or that tokens of low probability do."""

    ALTERNATIVES = 2 * len(SHARES) + len(THRESHOLDS) * len(FACTORS)

    def __init__(self, law: Tensor) -> None:
        """law [vocab]."""
        self._law, self._likeliest = law, int(law.argmax())
        top = float(law[self._likeliest])
        best, others = [1 - share + share / top for share in SHARES], [1 - share for share in SHARES]
        away = [top / one + (1 - top) / other for one, other in zip(best, others, strict=True)]
        self._best = best + [1 / one / total for one, total in zip(best, away, strict=True)]
        self._others = others + [1 / other / total for other, total in zip(others, away, strict=True)]
        rare = [float(law[law < threshold].sum()) for threshold in THRESHOLDS]
        self._scales = [[1 / (1 + (factor - 1) * mass) for factor in FACTORS] for mass in rare]

    def bet(self, run: int, token: int) -> Payoffs:
        chance = float(self._law[token])
        if chance <= 0:
            return [IMPOSSIBLE] * self.ALTERNATIVES
        return (self._best if token == self._likeliest else self._others) + [
            scale * (factor if chance < threshold else 1.0)
            for threshold, scales in zip(THRESHOLDS, self._scales, strict=True)
            for factor, scale in zip(FACTORS, scales, strict=True)
        ]


class DraftedTokens:
    """Bets that text leans towards what was drafted, or away from it."""

    ALTERNATIVES = 2 * len(SHARES)

    def __init__(self, law: Tensor, draft: Tensor) -> None:
        """law, draft [vocab]: the probabilities of the target and of the drafter."""
        ratio = draft / law.clamp(min=1e-300)
        self._law = law
        self._towards = [1 - share + share * ratio for share in SHARES]
        self._away = [float((law / towards).sum()) for towards in self._towards]

    def bet(self, run: int, token: int) -> Payoffs:
        if float(self._law[token]) <= 0:
            return [IMPOSSIBLE] * self.ALTERNATIVES
        factors = [float(towards[token]) for towards in self._towards]
        return factors + [1 / factor / away for factor, away in zip(factors, self._away, strict=True)]


def threshold(tests: int) -> float:
    """The log e-value at which one of so many tests fails, so that all together keep FALSE_ALARM."""
    return math.log(max(tests, 1) / FALSE_ALARM)
