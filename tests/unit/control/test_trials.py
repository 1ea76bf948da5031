"""A drafter that costs the host's time alone: asked while that pays, else for newcomers, and for all now and then."""

from __future__ import annotations

import pytest

from outrider.control.controller import Controller, Member
from outrider.control.costs import PassTable, RoundCosts
from outrider.control.trials import TRIAL_ROUNDS, Trials


def test_who_is_asked_for():
    trials = Trials()
    assert trials.choose([1, 2], 0) == [True, True]  # nothing is known yet
    for _ in range(64):
        trials.note(-1.0)
    assert not trials.pays
    assert trials.choose([1, 2], 16) == [True, True]  # now and then
    assert trials.choose([1, 2, 3], 17) == [False, False, True]
    assert trials.choose([1, 2, 3], 18) == [False, False, False]
    asked = [now for now in range(19, 1000) if any(trials.choose([1, 2, 3], now))]
    assert asked == [48, 112, 240, 496, 752]  # after 32, 64, 128, 256, 256 rounds
    trials.forget(3)
    assert trials.choose([1, 2, 3], 1000) == [False, False, True]
    for _ in range(80):
        trials.note(1.0)
    assert trials.choose([1, 2], 1001) == [True, True]


@pytest.mark.parametrize(("asking", "share"), [(0.05, 0.16), (0.005, 1.0)])
def test_asking_for_drafts_that_rarely_come_has_its_price(asking: float, share: float):
    """A draft of one token is accepted in one round of thirty: worth 3 % of a round, less its row."""
    control = Controller([Member("lookup", 7)], RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 1.7})))
    asked, left, plan = 0, 0, control.plan([0], [7])
    for i in range(2000):
        if left == 0:
            plan = control.plan([0], [7])
            left = max(1, plan.rounds)
        left -= 1
        came = int(plan.asks and i % 30 == 0)
        control.note([0], [0], plan, [came], [came], asking if plan.asks else 0.0)
        asked += plan.asks
    assert asked / 2000 == pytest.approx(share, abs=0.1)
    assert TRIAL_ROUNDS > 1
