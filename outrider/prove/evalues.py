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
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FALSE_ALARM = 1e-6
"""The chance that all tests of one proof together find anything in a correct engine, at most."""
REPLACED = (0.06, 0.09, 0.13, 0.2, 0.4, 0.8)
"""Shares of draws that are replaced in simulations."""
RUNS = 5  # simulations of each share
WEIGHTS = (4.0, 32.0, 256.0)
THRESHOLDS = (0.02, 0.1, 0.3)
FACTORS = (0.4, 2.0)
SHARES = (0.05, 0.15, 0.4)
IMPOSSIBLE = 1e3  # the logarithm of what a draw pays that the law rules out


class LawTest:
    """One test: the logarithms of what its bets won, by run and alternative; its e-value is the alternatives' average.

    Run 0 is the real draws; then come RUNS simulations of each share of REPLACED.
    """

    def __init__(self, alternatives: int) -> None:
        self.draws = 0
        self.logs = torch.zeros(1 + len(REPLACED) * RUNS, alternatives, dtype=torch.float64)
        self.reach = 0.0
        """The sum over draws of the total variation between the law and what replaces its draws."""

    def add(self, payoffs: Tensor, distance: float) -> None:
        """What one draw pays in each run, as logarithms [runs, alternatives]. distance: see `Simulated`."""
        self.draws += 1
        self.reach += distance
        self.logs += payoffs

    def join(self, other: LawTest) -> None:
        """Take in what the same bets won on other draws."""
        self.draws += other.draws
        self.reach += other.reach
        self.logs += other.logs

    def beside(self, other: LawTest) -> LawTest:
        """The test whose e-value is the average of both tests' of the same draws."""
        both = LawTest(2)
        both.draws, both.reach = self.draws, self.reach
        both.logs = torch.stack([self._log_e(), other._log_e()], 1)
        return both

    @property
    def log_e(self) -> float:
        return float(self._log_e()[0])

    def visible_bias(self, limit: float) -> float | None:
        """The smallest bias that all its simulations show, in total variation a draw; None where none does."""
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
    """The draw of each run: the real one, then biased ones."""

    tokens: Tensor
    """int64 [runs]."""
    distance: float
    """The total variation between the law and what replaces its draws."""


class Simulator:
    """Biased draws: a share of them is replaced by the law's likeliest token, or by a draw from another law."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._shares = torch.tensor([share for share in REPLACED for _ in range(RUNS)], dtype=torch.float64)

    def draw(self, token: int, law: Tensor, lure: Tensor | None = None) -> Simulated:
        """A token for each run. token: the real one. law, lure [vocab]: each sums to 1."""
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
    """Bets that each context's draws follow a law of their own, learnt from its draws so far: any bias shows in time.

    Before draw n + 1 of a context the alternative is (w law + counts) / (w + n), for each weight w.
    """

    ALTERNATIVES = len(WEIGHTS)

    def __init__(self) -> None:
        self._draws: dict[Hashable, int] = defaultdict(int)
        self._counts: dict[tuple[Hashable, int, int], int] = defaultdict(int)  # by context, run and token

    def payoffs(self, context: Hashable, law: Tensor, tokens: Tensor) -> Tensor:
        """Logarithms [runs, alternatives] for the draw of each run after the context, whose law is [vocab]."""
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
    """Bets that the likeliest token comes too often or too rarely, or that tokens of low probability do.

    law [vocab], tokens [runs]: logarithms [runs, LIKELY_ALTERNATIVES].
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
    """Bets that text leans towards what was drafted, or away from it.

    law, draft [vocab]: the probabilities of target and drafter; tokens [runs]: logarithms [runs, DRAFTED_ALTERNATIVES].
    """
    shares = torch.tensor(SHARES, dtype=torch.float64)[:, None]
    towards = 1 - shares + shares * (draft / law.clamp(min=1e-300))  # [shares, vocab]
    away = (law / towards).sum(-1)  # [shares]
    paid = towards[:, tokens].log()  # [shares, runs]
    return _ruled_out(torch.cat([paid, -paid - away.log()[:, None]]).T, law[tokens])


LIKELY_ALTERNATIVES = 2 * len(SHARES) + len(THRESHOLDS) * len(FACTORS)
DRAFTED_ALTERNATIVES = 2 * len(SHARES)


def _ruled_out(logs: Tensor, chances: Tensor) -> Tensor:
    """Logarithms [runs, alternatives], IMPOSSIBLE where the draw has no chance [runs]."""
    return logs.masked_fill((chances <= 0)[:, None], IMPOSSIBLE)


def threshold(tests: int) -> float:
    """The log e-value at which one of so many tests fails, so that all together keep FALSE_ALARM."""
    return math.log(max(tests, 1) / FALSE_ALARM)
