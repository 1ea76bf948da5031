"""Medians, confidence intervals, and how much a text repeats itself."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from statistics import median

LEVEL = 0.95
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with a confidence interval."""

    value: float
    low: float
    high: float
    level: float
    """The chance that the interval holds the true value: at least LEVEL, or less where there are too few values."""

    def as_dict(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high, "level": self.level}


def median_estimate(values: Seq[float]) -> Estimate:
    """The median, and between two order statistics an interval that holds for any distribution.

    It leaves out as many of the lowest and of the highest values as a level of at least LEVEL allows. The true median
    is below the lowest value with probability 1/2^n, below the second lowest with (1 + n)/2^n, and so on. Fewer than 6
    values cannot reach 95 %: their interval is their range, and `level` says what that is worth.
    """
    if not values:
        raise ValueError("no values to take a median of")
    ordered, count = sorted(values), len(values)
    left_out, outside = 0, 2 * comb(count, 0) / 2**count
    while left_out + 1 < (count + 1) // 2:
        wider = outside + 2 * comb(count, left_out + 1) / 2**count
        if 1 - wider < LEVEL:
            break
        left_out, outside = left_out + 1, wider
    return Estimate(median(ordered), ordered[left_out], ordered[-1 - left_out], max(0.0, 1 - outside))


def ratio_estimate(pairs: Seq[tuple[float, float]], *, seed: int = 0) -> Estimate:
    """The sum of the first over the sum of the second, and its bootstrap interval over the pairs.

    Pairs are drawn with replacement RESAMPLES times; the interval lies between the percentiles (1 - LEVEL) / 2 and
    (1 + LEVEL) / 2 of the ratios. A denominator of 0 gives 0. With one pair there is nothing to resample: level 0.
    """

    def ratio(chosen: Seq[tuple[float, float]]) -> float:
        below = sum(b for _, b in chosen)
        return sum(a for a, _ in chosen) / below if below else 0.0

    value = ratio(pairs)
    if len(pairs) < 2:
        return Estimate(value, value, value, 0.0)
    draw = random.Random(seed)
    ratios = sorted(ratio(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    cut = round(RESAMPLES * (1 - LEVEL) / 2)
    return Estimate(value, ratios[cut], ratios[-1 - cut], LEVEL)


def percentile(values: Seq[float], percent: float) -> float:
    """The percentile, interpolated between the two nearest values as numpy does; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def bigrams(tokens: Seq[int]) -> tuple[int, int]:
    """(distinct pairs of neighbouring tokens, all of them). A low share is a text that repeats itself."""
    pairs = list(pairwise(tokens))
    return len(set(pairs)), len(pairs)
