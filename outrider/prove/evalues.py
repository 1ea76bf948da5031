"""E-values: evidence that draws do not follow a stated law (a distribution of the next token), and the tests' power.

A bet on a draw y pays alternative(y) / law(y), where the alternative is any distribution chosen before the draw. If the
law is right, the product of all payoffs so far has an expectation of at most 1, in whatever order draws come and
wherever one stops (Ville 1939; Shafer 2021). So an e-value reaches 1 / a with a probability of at most a: this holds
for any number of draws, without approximation. The average of e-values is an e-value too.

The power is simulated along with the test: the same bets, on the same texts, on draws that are biased on purpose.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""The max probability that any test of one proof fails for a correct engine."""
REPLACED = (0.06, 0.09, 0.13, 0.2, 0.4, 0.8)
"""The shares of draws that are replaced in simulations."""
RUNS = 5  # simulations of each share
WEIGHTS = (4.0, 32.0, 256.0)
THRESHOLDS = (0.02, 0.1, 0.3)
FACTORS = (0.4, 2.0)
SHARES = (0.05, 0.15, 0.4)
IMPOSSIBLE = 1e3  # log payoff of a draw to which the law gives no probability


class LawTest:
    """One test: the log product of its payoffs, by run and alternative. Its e-value is the average over alternatives.

    Run 0 has the real draws; then come RUNS simulations for each share of REPLACED.
    """

    def __init__(self, alternatives: int) -> None:
        self.draws = 0
        self.logs = torch.zeros(1 + len(REPLACED) * RUNS, alternatives, dtype=torch.float64)
        self.reach = 0.0
        """The sum, over draws, of the total variation between the law and the distribution of replaced draws."""

    def add(self, payoffs: Tensor, distance: float) -> None:
        """Add one draw. payoffs: log payoffs [runs, alternatives]. distance: see `Simulated`."""
        self.draws += 1
        self.reach += distance
        self.logs += payoffs

    def join(self, other: LawTest) -> None:
        """Add the results of the same bets on other draws."""
        self.draws += other.draws
        self.reach += other.reach
        self.logs += other.logs

    def beside(self, other: LawTest) -> LawTest:
        """A test whose e-value is the average of those of this test and of another one of the same draws."""
        both = LawTest(2)
        both.draws, both.reach = self.draws, self.reach
        both.logs = torch.stack([self._log_e(), other._log_e()], 1)
        return both

    @property
    def log_e(self) -> float:
        return float(self._log_e()[0])

    def visible_bias(self, limit: float) -> float | None:
        """The smallest bias, in total variation a draw, with which all simulations reach the limit; None: none."""
        shown = (self._log_e()[1:].view(len(REPLACED), RUNS) >= limit).all(-1).tolist()
        return REPLACED[shown.index(True)] * self.reach / self.draws if True in shown else None

    def _log_e(self) -> Tensor:
        return self.logs.logsumexp(-1) - math.log(self.logs.shape[-1])

    def as_dict(self) -> dict[str, Any]:
        """For the journal."""
        logs = [[round(log, 6) for log in run] for run in self.logs.tolist()]
        return {"draws": self.draws, "reach": self.reach, "logs": logs}

    @staticmethod
    def from_dict(found: dict[str, Any]) -> LawTest:
        out = LawTest(1)
        out.draws, out.reach = found["draws"], found["reach"]
        out.logs = torch.tensor(found["logs"], dtype=torch.float64)
        return out


@dataclass(frozen=True, slots=True)
class Simulated:
    """One draw in each run: the real draw, then those of the simulations."""

    tokens: Tensor
    """int64 [runs]."""
    distance: float
    """The total variation between the law and the distribution of replaced draws."""


class Simulator:
    """Simulates draws with a bias: some are replaced by the law's most likely token, or by a draw from another law."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._shares = torch.tensor([share for share in REPLACED for _ in range(RUNS)], dtype=torch.float64)

    def draw(self, token: int, law: Tensor, lure: Tensor | None = None) -> Simulated:
        """A token for each run. token: the real draw. law, lure [vocab]: each sums to 1. lure: the distribution of the
        replaced draws; None: they become the law's most likely token."""
        count = len(self._shares)
        honest = torch.multinomial(law, count, replacement=True, generator=self._random)
        if lure is None:
            false, distance = law.argmax().expand(count), 1 - float(law.max())
        else:
            false = torch.multinomial(lure, count, replacement=True, generator=self._random)
            distance = float((law - lure).abs().sum()) / 2
        replaced = torch.rand(count, generator=self._random, dtype=torch.float64) < self._shares
        drawn = torch.where(replaced, false, honest)
        return Simulated(torch.cat([torch.tensor([token]), drawn]), distance)


class LearntLaw:
    """Bets that the draws after each context follow a law learnt from the draws so far, so that any bias shows in time.

    Before draw n + 1 of a context the alternative is (w law + counts) / (w + n), for each weight w.
    """

    ALTERNATIVES = len(WEIGHTS)

    def __init__(self) -> None:
        self._draws: dict[Hashable, int] = defaultdict(int)
        self._counts: dict[tuple[Hashable, int, int], int] = defaultdict(int)  # by context, run and token

    def payoffs(self, context: Hashable, law: Tensor, tokens: Tensor) -> Tensor:
        """Log payoffs [runs, alternatives] of the runs' draws `tokens` [runs] after a context. law [vocab]."""
        before: list[int] = []
        for run, token in enumerate(tokens.tolist()):
            before.append(self._counts[context, run, token])
            self._counts[context, run, token] += 1
        n = self._draws[context]
        self._draws[context] += 1
        times = (torch.tensor(before, dtype=torch.float64) / law[tokens])[:, None]  # [runs, 1]
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
        return _ruled_out(((weights + times) / (weights + n)).log(), law[tokens])


def likely_payoffs(law: Tensor, tokens: Tensor) -> Tensor:
    """Bets that the most likely token comes too often or too rarely, or that tokens of low probability do.

    law [vocab], tokens [runs]. Returns log payoffs [runs, LIKELY_ALTERNATIVES].
    """
    chances, likeliest = law[tokens], int(law.argmax())
    top = float(law[likeliest])
    shares = torch.tensor(SHARES, dtype=torch.float64)
    best, other = 1 - shares + shares / top, 1 - shares  # [shares]: of the likeliest token, of all others
    towards = torch.where((tokens == likeliest)[:, None], best.log(), other.log())  # [runs, shares]
    columns = [towards, -towards - (top / best + (1 - top) / other).log()]
    factors = torch.tensor(FACTORS, dtype=torch.float64)
    for threshold in THRESHOLDS:
        rare = float(law[law < threshold].sum())
        columns.append((chances < threshold)[:, None] * factors.log() - (1 + (factors - 1) * rare).log())
    return _ruled_out(torch.cat(columns, 1), chances)


def drafted_payoffs(law: Tensor, draft: Tensor, tokens: Tensor) -> Tensor:
    """Bets that drafted tokens come too often or too rarely in the text.

    law, draft [vocab]: the probabilities of target and drafter. tokens [runs]. Returns log payoffs [runs,
    DRAFTED_ALTERNATIVES].
    """
    shares = torch.tensor(SHARES, dtype=torch.float64)[:, None]
    towards = 1 - shares + shares * (draft / law.clamp(min=1e-300))  # [shares, vocab]
    away = (law / towards).sum(-1)  # [shares]
    paid = towards[:, tokens].log()  # [shares, runs]
    return _ruled_out(torch.cat([paid, -paid - away.log()[:, None]]).T, law[tokens])


LIKELY_ALTERNATIVES = 2 * len(SHARES) + len(THRESHOLDS) * len(FACTORS)
DRAFTED_ALTERNATIVES = 2 * len(SHARES)


def _ruled_out(logs: Tensor, chances: Tensor) -> Tensor:
    """The log payoffs [runs, alternatives], IMPOSSIBLE for runs whose draw has no probability (chances [runs])."""
    return logs.masked_fill((chances <= 0)[:, None], IMPOSSIBLE)


def threshold(tests: int) -> float:
    """The log e-value at which each of so many tests fails, so that all of them together keep to FALSE_ALARM."""
    return math.log(max(tests, 1) / FALSE_ALARM)
