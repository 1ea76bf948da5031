"""What goes by beside rounds, for each token, beyond what goes by beside those of plain decoding."""

from __future__ import annotations

import pytest

from outrider.control.overheads import PLAIN, Overheads

LOOKUP, MODEL = 0, 1


def noted(rounds: int, figures: dict[int, tuple[float, float, float]], batch: int = 4) -> Overheads:
    """After so many rounds. figures: of each drafter tokens of a round, its usual seconds, and those that passed."""
    overheads = Overheads()
    for _ in range(rounds):
        for drafter, (tokens, usual, passed) in figures.items():
            overheads.note(drafter, batch, tokens, usual, passed)
    return overheads


def test_at_first_drafters_have_the_overhead_of_plain_decoding():
    assert Overheads().seconds(LOOKUP, 4) == 0.0
    few = noted(1, {PLAIN: (4, 1.0, 1.4), LOOKUP: (8, 1.0, 9.0)})
    assert 0.0 < few.seconds(LOOKUP, 4) < 0.01


def test_what_goes_by_beyond_plain_decoding_counts_for_each_token():
    """Texts end after so many tokens whoever drafts: .1 s a token go by beside plain rounds, .25 beside the model's."""
    overheads = noted(4000, {PLAIN: (4, 1.0, 1.4), LOOKUP: (8, 1.2, 2.0), MODEL: (12, 2.0, 5.0)})
    assert overheads.seconds(LOOKUP, 4) == pytest.approx(0.0, abs=1e-6)
    assert overheads.seconds(MODEL, 4) == pytest.approx(0.25 - 0.1, rel=0.01)


def test_where_plain_decoding_was_not_seen_the_least_is_no_overhead():
    overheads = noted(4000, {LOOKUP: (8, 1.2, 2.0), MODEL: (12, 2.0, 5.0)})
    assert overheads.seconds(LOOKUP, 4) == 0.0
    assert overheads.seconds(MODEL, 4) == pytest.approx(0.25 - 0.1, rel=0.01)


def test_a_drafter_that_is_not_asked_is_taken_to_be_as_plain_decoding_after_a_while():
    overheads = noted(4000, {PLAIN: (4, 1.0, 1.4), MODEL: (12, 2.0, 5.0)})
    before = overheads.seconds(MODEL, 4)
    overheads.fade(MODEL, 0.25)
    assert overheads.seconds(MODEL, 4) == pytest.approx(0.75 * before)
    overheads.fade(LOOKUP, 1.0)
    assert overheads.seconds(MODEL, 4) == pytest.approx(0.75 * before)


def test_a_stall_counts_as_three_rounds_at_most():
    figures = {PLAIN: (4, 1.0, 1.0)}
    once, long = noted(4000, figures), noted(4000, figures)
    once.note(MODEL, 4, 4, 1.0, 4.0)
    long.note(MODEL, 4, 4, 1.0, 1000.0)
    assert long.seconds(MODEL, 4) == pytest.approx(once.seconds(MODEL, 4))
    together = noted(4000, figures)
    together.note(MODEL, 4, 32, 8.0, 1000.0, rounds=8)
    assert together.seconds(MODEL, 4) == pytest.approx(once.seconds(MODEL, 4), rel=0.2)


def test_batches_of_other_sizes_and_rounds_that_say_nothing_do_not_count():
    overheads = noted(4000, {PLAIN: (4, 1.0, 1.0), MODEL: (4, 1.0, 2.0)})
    assert overheads.seconds(MODEL, 8) == 0.0
    known = overheads.seconds(MODEL, 3)
    assert known == overheads.seconds(MODEL, 4) > 0.2  # padded to the same size
    for usual, passed in ((0.0, 1.0), (1.0, 0.0)):
        overheads.note(MODEL, 4, 4, usual, passed)
    assert overheads.seconds(MODEL, 4) == known


def test_rounds_noted_together_count_as_one_by_one():
    figures = {PLAIN: (4, 1.0, 1.0)}
    one, together = noted(100, figures), noted(100, figures)
    for _ in range(64):
        one.note(MODEL, 4, 8, 1.0, 1.3)
    for _ in range(8):
        together.note(MODEL, 4, 64, 8.0, 10.4, rounds=8)
    assert together.seconds(MODEL, 4) == pytest.approx(one.seconds(MODEL, 4), rel=0.05)
