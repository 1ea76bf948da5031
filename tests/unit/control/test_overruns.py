"""What comes between rounds counts against drafts."""

from __future__ import annotations

import pytest

from outrider.control.overruns import Overruns


def test_nothing_known_is_no_overrun():
    assert Overruns().of_drafts(4) == 1.0


def test_rounds_with_drafts_are_held_against_those_without():
    overruns = Overruns()
    for _ in range(500):
        overruns.note(4, 1.1, 1.0, drafted=False)
        overruns.note(4, 2.6, 2.0, drafted=True)
    assert overruns.of_drafts(4) == pytest.approx(1.3 / 1.1, rel=1e-3)
    assert overruns.of_drafts(3) == overruns.of_drafts(4)  # passes are padded to the same size
    assert overruns.of_drafts(8) == 1.0


def test_rounds_without_drafts_that_overrun_more_speak_for_nothing():
    overruns = Overruns()
    for _ in range(100):
        overruns.note(1, 1.5, 1.0, drafted=False)
        overruns.note(1, 1.0, 1.0, drafted=True)
    assert overruns.of_drafts(1) == 1.0


def test_a_stall_counts_as_four_rounds_and_what_is_not_known_not_at_all():
    overruns = Overruns()
    overruns.note(1, 1000.0, 1.0, drafted=True)
    assert overruns.of_drafts(1) == pytest.approx(1 + 3 / 17)
    for seconds, usual in ((0.0, 1.0), (1.0, 0.0)):
        overruns.note(1, seconds, usual, drafted=True)
    assert overruns.of_drafts(1) == pytest.approx(1 + 3 / 17)
