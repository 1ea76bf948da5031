"""Medians, intervals and shares, against independent calculations."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import numpy as np
import pytest

from outrider.bench.statistics import LEVEL, bigrams, median_estimate, percentile, ratio_estimate


@pytest.mark.parametrize("count", range(1, 13))
def test_the_level_of_a_median_s_interval_by_enumeration(count):
    """Each value lies above the true median with chance 1/2: all patterns, counted one by one."""
    values = [float(10 * i) for i in range(count)]
    found = median_estimate(values)
    left_out = values.index(found.low)
    assert found.high == values[-1 - left_out]
    assert found.value == statistics.median(values)

    def level(k: int) -> float:
        """Of the interval without the k lowest and the k highest values: more than k on either side."""
        held = sum(k < sum(pattern) < count - k for pattern in itertools.product((0, 1), repeat=count))
        return held / 2**count

    assert found.level == pytest.approx(level(left_out))
    assert found.level >= LEVEL or left_out == 0
    if left_out + 1 < count - left_out - 1:
        assert level(left_out + 1) < LEVEL  # a narrower one would not do


def test_the_interval_of_a_median_holds_as_often_as_it_says():
    draw, held, runs = random.Random(1), 0, 4000
    level = median_estimate([0.0] * 9).level
    for _ in range(runs):
        found = median_estimate([draw.expovariate(1.0) for _ in range(9)])
        held += found.low <= math.log(2) <= found.high
    assert held / runs == pytest.approx(level, abs=4 * math.sqrt(level * (1 - level) / runs))


def test_a_ratio_s_interval_is_that_of_the_delta_method_where_there_are_many():
    rng = np.random.default_rng(3)
    below = rng.integers(5, 30, 400)
    above = below + rng.binomial(4 * below, 0.6)
    found = ratio_estimate(list(zip(above.tolist(), below.tolist(), strict=True)))
    ratio = above.sum() / below.sum()
    error = np.sqrt(((above - ratio * below) ** 2).sum()) / below.sum()
    assert found.value == pytest.approx(ratio)
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.08)
    assert found == ratio_estimate(list(zip(above.tolist(), below.tolist(), strict=True)))  # seeded


def test_ratios_of_one_pair_and_of_nothing():
    one = ratio_estimate([(6, 2)])
    assert (one.value, one.low, one.high, one.level) == (3, 3, 3, 0)
    assert ratio_estimate([(1, 0), (2, 0)]).value == 0


def test_percentiles_are_numpy_s():
    values = [3.0, 9.0, 1.0, 4.0, 4.5, 20.0]
    for percent in (0, 1, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([], 50) == 0


def test_bigrams_by_hand():
    assert bigrams([1, 2, 1, 2, 1]) == (2, 4)  # 12, 21, 12, 21
    assert bigrams([7]) == (0, 0)
