"""Acceptance by position, request and drafter, against draws of a known law."""

from __future__ import annotations

import random

import numpy as np
import pytest

from outrider.control.acceptance import Acceptance, Calibration


def accepted_of(rates: list[float], length: int, rng: random.Random) -> int:
    return next((j for j in range(length) if rng.random() >= rates[j]), length)


def test_rates_are_those_of_the_law_whatever_the_lengths():
    """Short drafts that are accepted whole must not count against positions they did not reach."""
    rng, rates = random.Random(1), [0.9, 0.7, 0.5, 0.3]
    acceptance = Acceptance(4)
    for _ in range(6000):
        length = rng.choice((1, 2, 4))
        acceptance.note([rng.randrange(50)], [length], [accepted_of(rates, length, rng)])
    found = acceptance.survival([-1])[0]  # of a request that nothing is known of
    survival = [0.9, 0.9 * 0.7, 0.9 * 0.7 * 0.5, 0.9 * 0.7 * 0.5 * 0.3]
    assert found == pytest.approx(survival, abs=0.06)


def test_a_full_acceptance_is_censored():
    acceptance = Acceptance(4)
    before = acceptance.survival([1])[0]
    acceptance.note([1], [2], [2])
    after = acceptance.survival([1])[0]
    conditional = after[2] / after[1], before[2] / before[1]
    assert after[0] > before[0]
    assert conditional[0] >= conditional[1]  # position 3 was not reached: no less likely than before


def test_requests_differ_and_lean_on_the_others():
    """About ten drafts of a request's own are known, beside 30 of all: of those, half are accepted here."""
    acceptance = Acceptance(2)
    for _ in range(60):
        acceptance.note([1, 2], [2, 2], [2, 0])
    good, bad, new = acceptance.survival([1, 2, 3])[:, 0]
    assert good == pytest.approx((10 + 30 * new) / 40, abs=0.01)
    assert bad == pytest.approx(30 * new / 40, abs=0.01)
    assert new == pytest.approx(0.5, abs=0.05)


def test_a_request_that_changes_is_believed_before_its_drafter():
    acceptance = Acceptance(1)
    for _ in range(200):
        acceptance.note([1], [1], [1])
    for _ in range(20):
        acceptance.note([1], [1], [0])
    own, others = acceptance.survival([1, 2])[:, 0]
    assert own < 0.8 * others


def test_drafts_of_requests_one_by_one_count_as_those_noted_together():
    rng = random.Random(2)
    together, alone, every = Acceptance(5), Acceptance(5), np.zeros((2, 5))
    for _ in range(50):
        lengths = [rng.randint(1, 5) for _ in range(3)]
        accepted = [rng.randint(0, n) for n in lengths]
        together.note([1, 2, 3], lengths, accepted)
        for seq_id, length, right in zip([1, 2, 3], lengths, accepted, strict=True):
            alone.note([seq_id], [length], [right])
            every = 0.99 * every + [[j < min(length, right + 1) for j in range(5)], [j < right for j in range(5)]]
    assert together.drafts == alone.drafts == 150
    assert alone._figures == pytest.approx(together._figures)
    assert alone._all == pytest.approx(every)  # rounds of one: the last 100 count
    together._all, together._first_weight = alone._all, alone._first_weight
    assert alone.survival([1, 2, 3, 4]) == pytest.approx(together.survival([1, 2, 3, 4]))


@pytest.mark.parametrize(("batch", "memory"), [(1, 100), (2, 200), (4, 333.3), (16, 333.3)])
def test_a_drafter_is_judged_by_its_last_drafts_and_rounds(batch: int, memory: float):
    """By at most 333 drafts, and at most 100 rounds; a request that is new is judged by these alone."""
    acceptance, rounds = Acceptance(1), 1000
    ids = [*range(batch)]
    for came in [1] * rounds + [0] * 40:
        acceptance.note(ids, [1] * batch, [came] * batch)
    left = (1 - 1 / memory) ** (40 * batch)
    assert acceptance.survival([99])[0, 0] == pytest.approx(max(left, 0.005), rel=0.01)


def test_forgotten_rows_are_used_again_and_hold_nothing():
    acceptance = Acceptance(1)
    for seq_id in range(100):
        acceptance.note([seq_id], [1], [0])
        acceptance.forget(seq_id)
    assert len(acceptance._figures) == 8
    other = Acceptance(1)
    for name in ("_all", "_first_weight"):
        setattr(other, name, getattr(acceptance, name))
    assert acceptance.survival([500])[0, 0] == other.survival([500])[0, 0]


def test_what_is_assumed_at_first_counts_less_with_every_draft_and_again_with_time():
    acceptance = Acceptance(1)
    acceptance.note([1] * 400, [1] * 400, [0] * 400)
    assert acceptance.survival([2])[0, 0] < 0.006
    for _ in range(100):
        acceptance.fade(0.08)
    assert acceptance.survival([2])[0, 0] > 0.7


def test_calibration_is_the_ratio_of_accepted_to_expected():
    calibration = Calibration()
    assert calibration.ratio(1) == 1.0
    for _ in range(200):
        calibration.note(1, 4.0, 1)
    assert calibration.ratio(1) == pytest.approx(0.25, abs=0.02)
    assert calibration.ratio(2) < 0.6  # another request leans on this one
    calibration.forget(1)
    assert calibration.ratio(1) == calibration.ratio(2)
