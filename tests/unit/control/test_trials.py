"""A drafter that costs the host's time alone: asked while that pays, else for newcomers, and for all now and then."""

from __future__ import annotations

import pytest

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts
from outrider.control.member import Member
from outrider.control.review import Offer
from outrider.control.trials import TRIAL_ROUNDS, AskedRound, Trials


def note(trials: Trials, seq_ids: list[int], *accepted: int, extra: float = 0.1, row: float = 0.25) -> None:
    """A round; one without drafts takes 1."""
    trials.note(seq_ids, AskedRound(accepted or [0] * len(seq_ids), extra, 1.0, row))


def test_who_is_asked_for():
    trials = Trials()
    assert trials.choose([1, 2], 0) == [True, True]  # nothing is known yet
    for _ in range(64):
        note(trials, [1, 2])
    assert not trials.pays(2)
    assert trials.choose([1, 2], 16) == [True, True]  # now and then
    assert trials.choose([1, 3], 17) == [False, True]
    assert trials.choose([1, 3], 18) == [False, False]
    asked = [now for now in range(19, 1000) if any(trials.choose([1, 3], now))]
    assert asked == [48, 112, 240, 496, 752]  # after 32, 64, 128, 256, 256 rounds
    trials.forget(3)
    assert trials.choose([1, 3], 1000) == [False, True]
    for _ in range(80):
        note(trials, [1, 2], 1, 1)
    assert trials.choose([1, 2], 1001) == [True, True]


def test_asking_stops_when_it_lost_a_round_and_at_most_two_of_what_it_gained():
    trials = Trials()
    rounds = [0, 0]
    for tries in range(2):
        while trials.pays(1):
            note(trials, [1], row=1.0)
            rounds[tries] += 1
        for _ in range(100):
            note(trials, [1], 9, row=1.0)
    assert rounds == [pytest.approx(10, abs=1), pytest.approx(20, abs=1)]


def test_what_paid_for_one_request_is_found_out_anew_for_four():
    trials = Trials()
    for _ in range(100):
        note(trials, [1], 9, row=1.0)
    for _ in range(11):
        note(trials, [1, 2, 3, 4])
    assert [trials.pays(batch) for batch in (1, 2, 4)] == [True, True, False]


@pytest.mark.parametrize(("row", "pays"), [(0.05, False), (0.25, True)])
def test_a_request_ahead_of_the_others_saves_no_more_than_its_rows(row: float, pays: bool):
    """Four tokens for one of four requests: as many as there are requests, but the others go on as long."""
    trials = Trials()
    for _ in range(64):
        note(trials, [1, 2, 3, 4], 4, 0, 0, 0, extra=0.3, row=row)
    assert trials.pays(4) == pays
    for _ in range(64):
        note(trials, [1, 2, 3, 4], 1, 1, 1, 1, extra=0.3, row=row)
    assert trials.pays(4)


def test_a_request_that_just_came_is_not_slow():
    trials = Trials()
    for _ in range(64):
        note(trials, [1, 2], 1, 1, row=0.05)
    for i in range(TRIAL_ROUNDS - 1):
        note(trials, [1, 2, 100 + i], 1, 1, 0, extra=0.5, row=0.05)
        note(trials, [1, 2], 1, 1, row=0.05)
    assert trials.pays(3)


def test_drafts_of_a_trial_are_not_scored_until_they_promise_enough():
    control = Controller([Member("lookup", 7)], RoundCosts(PassTable({(1, 1): 1.0, (1, 4): 1.3, (1, 8): 1.7})))
    ids, budgets = [0, 1, 2, 3], [7] * 4
    assert control.review is not None
    trials, one, all_four = control.review.trials, [Offer(2, 1.9), Offer(), Offer(), Offer()], [Offer(2, 1.9)] * 4
    while (plan := control.plan(ids, budgets)).asks:
        control.note(ids, ids, plan, [0] * 4, [[0] * 4], 0.2)
        assert control.choose_drafts(ids, plan, one)[0] == 2 * trials.pays(4)
    while not (plan := control.plan(ids, budgets)).asks:
        control.note_plain(plan, ids, [1.3])
    assert plan.rounds == TRIAL_ROUNDS
    assert control.choose_drafts(ids, plan, one) == [0] * 4
    control.note(ids, ids, plan, [0] * 4, [[0] * 4], 0.01)
    assert not trials.pays(4)  # nothing for the others
    for _ in range(TRIAL_ROUNDS):
        control.choose_drafts(ids, plan, all_four)
        control.note(ids, ids, plan, [0] * 4, [[0] * 4], 0.01)
    assert control.choose_drafts(ids, plan, all_four) == [2] * 4


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
        control.note([0], [0], plan, [came], [[came]], asking if plan.asks else 0.0)
        asked += plan.asks
    assert asked / 2000 == pytest.approx(share, abs=0.1)
    assert TRIAL_ROUNDS > 1
