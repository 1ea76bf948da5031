"""What is lost where a drafter begins."""

from __future__ import annotations

import pytest

from outrider.control.beginnings import Beginnings


def begun(known: Beginnings, drafter: int, batch: int, *lost: float) -> None:
    """A whole beginning, of rounds that lose so much each."""
    for each in lost:
        known.note(drafter, batch, each, begun=False)
    known.note(drafter, batch, 0.0, begun=True)


def test_the_seconds_of_a_beginning_are_added_up():
    known = Beginnings()
    assert known.seconds(0, 4) == 0.0
    begun(known, 0, 4, 1.0, 0.5, 0.25)
    assert known.seconds(0, 4) == known.seconds(0, 3) == pytest.approx(1.75)
    assert known.seconds(0, 8) == known.seconds(1, 4) == 0.0


def test_later_beginnings_count_more_the_later_they_are():
    known = Beginnings()
    for lost in (1.0, 2.0, 2.0):
        begun(known, 0, 4, lost)
    assert known.seconds(0, 4) == pytest.approx(1.51)


def test_luck_at_the_start_costs_nothing_and_rounds_that_go_on_are_no_beginning():
    known = Beginnings()
    begun(known, 0, 4, -1.0, 0.25)
    assert known.seconds(0, 4) == 0.0
    known.note(0, 4, 5.0, begun=True)
    assert known.seconds(0, 4) == 0.0


def test_one_that_is_broken_off_does_not_count():
    known = Beginnings()
    known.note(0, 4, 3.0, begun=False)
    known.drop()
    begun(known, 0, 4, 1.0)
    assert known.seconds(0, 4) == 1.0
    known.note(0, 4, 3.0, begun=False)
    begun(known, 1, 4, 2.0)
    assert (known.seconds(0, 4), known.seconds(1, 4)) == (1.0, 2.0)
