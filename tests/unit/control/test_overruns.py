"""What comes between rounds counts against drafts, as far as it costs them more."""

from __future__ import annotations

import pytest

from outrider.control.overruns import Overruns


def test_nothing_known_is_no_overrun():
    assert Overruns().least_gain(4, 1.05) == 1.05


def test_what_plain_decoding_loses_as_well_does_not_count():
    overruns = Overruns()
    for _ in range(500):
        overruns.note(4, 2.6, 2.0)
    gain = overruns.least_gain(4, 1.0)
    assert gain == pytest.approx(1.075, rel=1e-3)
    rounds, between = 2.0, 0.6  # seconds of a text with drafts; without them gain x rounds, and three quarters
    assert (gain * rounds + 0.75 * between) / (rounds + between) == pytest.approx(1.0, rel=1e-3)
    assert overruns.least_gain(3, 1.0) == gain  # passes are padded to the same size
    assert overruns.least_gain(8, 1.0) == 1.0


def test_rounds_that_take_less_than_usual_speak_for_nothing():
    overruns = Overruns()
    for _ in range(100):
        overruns.note(1, 0.5, 1.0)
    assert overruns.least_gain(1, 1.05) == 1.05


def test_a_stall_counts_as_four_rounds_and_what_is_not_known_not_at_all():
    overruns = Overruns()
    overruns.note(1, 1000.0, 1.0)
    expected = pytest.approx(1 + 0.25 * 3 / 17)
    assert overruns.least_gain(1, 1.0) == expected
    for seconds, usual in ((0.0, 1.0), (1.0, 0.0)):
        overruns.note(1, seconds, usual)
    assert overruns.least_gain(1, 1.0) == expected
