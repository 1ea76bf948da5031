"""Which figures fade, and in which rounds."""

from __future__ import annotations

import random

from outrider.control import fading
from outrider.control.fading import Fading

EVERY = fading._FADE_ROUNDS


def test_figures_fade_once_in_so_many_rounds_since_a_drafter_was_asked_or_judged():
    """As a look at every round would find it: rates at each multiple since the drafter was judged, own figures a round
    before each since it was asked."""
    rng, tried, now = random.Random(2), Fading(3), 0
    asked, judged = [0] * 3, [0] * 3
    for _ in range(5000):
        rounds = rng.choice((1, 1, 2, 8, EVERY))
        last = range(now + 1, now + rounds + 1)
        now += rounds
        rates = [i for i in range(3) if any((each - judged[i]) % EVERY == 0 for each in last)]
        own = [i for i in range(3) if any((each + 1 - asked[i]) % EVERY == 0 for each in last)]
        assert tried.due(now, rounds) == (rates, own)
        for i in range(3):
            if rng.random() < 0.02:
                tried.note_asked(i, now)
                asked[i] = judged[i] = now
            elif rng.random() < 0.02:
                tried.note_judged(i, now)
                judged[i] = now
    assert tried.asked == asked


def test_without_drafters_nothing_fades():
    tried = Fading(0)
    assert all(tried.due(now, 1) == ([], []) for now in range(1, 200))
