"""A drafter that costs the host's time alone: asked while that pays, else for newcomers, and for all now and then."""

from __future__ import annotations

from itertools import pairwise

import pytest

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.plan import Plan
from outrider.control.review import Offer
from outrider.control.trials import TRIAL_ROUNDS, Trials


def test_who_is_asked_for():
    trials = Trials()
    assert trials.choose([1, 2], 0) == [True, True]  # nothing is known yet
    for _ in range(64):
        trials.note(2, -0.1)
    assert not trials.pays(2)
    assert trials.choose([1, 2], 16) == [True, True]  # now and then
    assert trials.choose([1, 3], 17) == [False, True]
    assert trials.choose([1, 3], 18) == [False, False]
    asked = [now for now in range(19, 100) if any(trials.choose([1, 3], now))]
    assert asked == [32, 48, 64, 80, 96]
    trials.forget(3)
    assert trials.choose([1, 3], 100) == [False, True]
    trials.note(2, 0.5)
    assert trials.choose([1, 2], 101) == [True, True]


@pytest.mark.parametrize(("loss", "rest"), [(0.05, 16), (0.2, 29), (0.9, 64)])
def test_trials_are_rarer_where_they_take_longer(loss: float, rest: int):
    """A fiftieth of the time, three rounds at a time; at most 64 rounds pass."""
    trials = Trials()
    trials.choose([1], 0)
    for _ in range(200):
        trials.note(1, -loss)
    asked = [now for now in range(1, 400) if any(trials.choose([1], now))]
    assert {later - now for now, later in pairwise(asked[1:])} == {rest}


def test_asking_stops_when_it_lost_three_rounds_and_at_most_six_of_what_it_gained():
    trials = Trials()
    rounds = [0, 0]
    for tries in range(2):
        while trials.pays(1):
            trials.note(1, -0.1)
            rounds[tries] += 1
        for _ in range(100):
            trials.note(1, 9.0)
    assert rounds == [pytest.approx(30, abs=1), pytest.approx(60, abs=1)]


def test_what_paid_for_one_request_is_found_out_anew_for_four():
    trials = Trials()
    for _ in range(100):
        trials.note(1, 9.0)
    for _ in range(31):
        trials.note(4, -0.1)
    assert [trials.pays(batch) for batch in (1, 2, 4)] == [True, True, False]


@pytest.mark.parametrize(("extra", "pays"), [(0.9, True), (1.1, False)])
def test_what_asking_gains_is_the_tokens_of_all_requests_against_the_seconds(extra: float, pays: bool):
    """Four tokens for one of four requests, which take as long as a round without drafts brings four in."""
    control = Controller([Member("lookup", 7)], RoundCosts(PassTable({(1, 1): 1.0, (4, 1): 1.0})))
    review = control.review
    assert review is not None
    settled = Plan(RoundKind(4, 1, 4, ("lookup",)), [7] * 4, [0] * 4, 4.0, 1.0, settled=True)
    for i in range(64):
        review.note([0, 1, 2, 3], settled, [4, 0, 0, 0], extra, 0.1, i)
    assert review.trials.pays(4) == pays


def test_drafts_of_a_trial_are_scored_where_they_pay():
    control = Controller([Member("lookup", 7)], RoundCosts(PassTable({(1, 1): 1.0, (1, 4): 1.3, (1, 8): 1.7})))
    ids, budgets = [0, 1, 2, 3], [7] * 4
    assert control.review is not None
    while (plan := control.plan(ids, budgets)).asks:
        control.note(ids, ids, plan, [0] * 4, [[0] * 4], 0.2)
    while not (plan := control.plan(ids, budgets)).asks:
        control.note_plain(plan, ids, [1.3])
    assert not control.review.trials.pays(4)
    assert plan.rounds == TRIAL_ROUNDS
    assert control.choose_drafts(ids, plan, [Offer(2, 0.1), Offer(), Offer(), Offer()]) == [0] * 4
    assert control.choose_drafts(ids, plan, [Offer(2, 1.9), Offer(), Offer(), Offer()]) == [2, 0, 0, 0]
    control.note(ids, ids, plan, [2, 0, 0, 0], [[2, 0, 0, 0]], 0.01)
    assert control.review.trials.pays(4)


@pytest.mark.parametrize(("asking", "share"), [(0.05, 0.3), (0.005, 1.0)])
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
        control.note([0], [0], plan, [came], [[came]], asking if plan.asks else 0.0)
        asked += plan.asks
    assert asked / 2000 == pytest.approx(share, abs=0.1)
    assert TRIAL_ROUNDS > 1


def test_a_round_in_which_nothing_is_found_is_no_round_without_drafts():
    """Asking takes .1 s of it, and .2 more are the host's: neither makes rounds without drafts slower."""
    control = Controller([Member("lookup", 7)], RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 1.7})))
    plan = control.plan([0], [7])
    assert plan.settled
    for _ in range(200):
        control.note([0], [0], plan, [0], [[0]], 0.1)
        control.note_seconds(plan, [0], 1.2)
    assert control.plain_rate(1) == pytest.approx(1.0, rel=0.01)
    assert control.usual_seconds(plan, [0]) == pytest.approx(1.2, rel=0.01)
    control.note_seconds(plan, [0], 60.0)  # a stall
    assert control.usual_seconds(plan, [0]) == pytest.approx(1.2, rel=0.02)
    assert control.forget(0).saved == pytest.approx(-200 * 0.3, rel=0.1)  # the first rounds do not know of the .2
