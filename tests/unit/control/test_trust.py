"""How far plans are trusted, by what came of earlier ones."""

from __future__ import annotations

import pytest

from outrider.control.trust import PLAIN, Trust

FIRST_ROUNDS = 32


def known() -> Trust:
    """Of drafters 0 and 1, whose first rounds, which say nothing, are over."""
    trust = Trust()
    for drafter in (0, 1):
        for _ in range(FIRST_ROUNDS):
            trust.note(drafter, 4, 0.1, 1.0, 9.0)
    return trust


def told(rounds: int, **figures: tuple[float, float, float]) -> Trust:
    """After so many rounds of batches of four. figures: of each drafter tokens over those promised, usual, passed."""
    trust, drafters = known(), {"plain": PLAIN, "lookup": 0, "model": 1}
    for _ in range(rounds):
        for name, (fulfilled, usual, passed) in figures.items():
            trust.note(drafters[name], 4, fulfilled, usual, passed)
    return trust


def test_at_first_every_plan_is_trusted():
    assert Trust().rate(0, 4) == Trust().pace(0, 4) == 1.0


def test_a_drafters_first_plans_say_nothing():
    """What they promise is assumed."""
    assert known().rate(0, 4) == known().pace(1, 4) == 1.0


def test_trust_comes_back_while_nobody_asks():
    trust = told(2000, plain=(1.0, 1.0, 1.3), lookup=(0.5, 1.0, 1.3), model=(0.5, 1.0, 1.3))
    for _ in range(4):
        trust.fade(0, 0.15)
    assert 0.5 < trust.rate(0, 4) < 0.6
    assert trust.rate(1, 4) == pytest.approx(0.5, abs=0.01)
    for _ in range(100):
        trust.fade(0, 0.15)
    assert trust.rate(0, 4) == pytest.approx(1.0, abs=0.01)
    for _ in range(24):  # as many rounds as full trust counts for
        trust.note(0, 4, 0.5, 1.0, 1.3)
    assert trust.rate(0, 4) == pytest.approx(0.75, abs=0.02)


def test_what_slows_every_round_down_is_held_against_nobody():
    """Texts are read beside plain rounds too: a fifth of the time, whoever drafts."""
    trust = told(2000, plain=(1.0, 1.0, 1.25), lookup=(1.0, 1.2, 1.5))
    assert trust.rate(0, 4) == pytest.approx(1.0, abs=0.01)
    assert trust.pace(0, 4) == pytest.approx(1.0, abs=0.01)


def test_rounds_that_take_longer_and_tokens_that_do_not_come_count():
    trust = told(2000, plain=(1.0, 1.0, 1.1), lookup=(0.9, 1.2, 1.2 * 1.1 * 1.25), model=(1.0, 2.0, 2.2))
    assert trust.rate(0, 4) == pytest.approx(0.9 / 1.25, abs=0.01)
    assert trust.pace(0, 4) == pytest.approx(1 / 1.25, abs=0.01)
    assert trust.rate(1, 4) == pytest.approx(1.0, abs=0.01)


def test_a_faster_drafter_stays_the_better_one_whatever_comes_between_rounds():
    """One brings 3 tokens in 2 seconds, plain decoding 1 in 1; reading texts takes a second for every token."""
    trust = told(2000, plain=(1.0, 1.0, 2.0), lookup=(1.0, 2.0, 5.0))
    assert trust.rate(0, 4) * 3 / 2 > 1.0


def test_few_rounds_tell_little_and_a_stall_no_more_than_four_rounds():
    trust = told(200, plain=(1.0, 1.0, 1.0))
    trust.note(0, 4, 1.0, 1.0, 2.0)
    assert trust.rate(0, 4) == pytest.approx(25 / 26, abs=0.01)
    stalled = told(200, plain=(1.0, 1.0, 1.0))
    stalled.note(0, 4, 1.0, 1.0, 1000.0)
    assert stalled.rate(0, 4) == pytest.approx(25 / 28, abs=0.01)
    together = told(200, plain=(1.0, 1.0, 1.0))
    together.note(0, 4, 1.0, 8.0, 1000.0, rounds=8)
    assert together.rate(0, 4) == pytest.approx(32 / 35, abs=0.01)


def test_batches_of_other_sizes_and_rounds_that_say_nothing_do_not_count():
    trust = told(200, plain=(1.0, 1.0, 1.0), lookup=(0.5, 1.0, 1.0))
    assert trust.rate(0, 8) == 1.0
    assert trust.rate(0, 3) == trust.rate(0, 4) < 0.6  # padded to the same size
    before = trust.rate(0, 4)
    for usual, passed in ((0.0, 1.0), (1.0, 0.0)):
        trust.note(0, 4, 1.0, usual, passed)
    assert trust.rate(0, 4) == before


def test_rounds_told_together_count_as_one_by_one():
    one, together = told(64, plain=(1.0, 1.0, 1.3)), known()
    for _ in range(8):
        together.note(PLAIN, 4, 1.0, 8.0, 8 * 1.3, rounds=8)
    for trust in (one, together):
        trust.note(0, 4, 1.0, 1.0, 1.3)
        assert trust.rate(0, 4) == pytest.approx(1.0, abs=0.02)
