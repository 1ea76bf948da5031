"""Drafters that decide for each text how far they draft: asked for all of it, and judged by what came of asking."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest

from outrider.control.choose import best_plan_of, choose_plan
from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.own_drafts import OwnDrafts, OwnFigures
from outrider.control.plan import Outlook, Plan

WIDTHS = (1, 2, 4, 8, 16)
BATCHES = (1, 2, 4, 8)
MEMBER = Member("lookup", 15, pays_budget=True, limits_itself=True)


def costs(row: float = 0.02) -> RoundCosts:
    """A pass of one row takes a millisecond, each row more a part of that."""
    times = {(b, w): (1 + row * (b * w - 1)) / 1e3 for b in BATCHES for w in WIDTHS}
    packed = {(b, n): (1 + row * (n - 1)) / 1e3 for b in BATCHES if b > 1 for n in (2 * b, 3 * b, 4 * b, 8 * b)}
    return RoundCosts(PassTable(times, padded=True, packed=packed))


def outlook(batch: int, own: OwnDrafts, rate: float = 0.5) -> Outlook:
    survival = np.tile(np.power(rate, np.arange(1.0, 16.0)), (batch, 1))
    return Outlook("lookup", survival, np.full(batch, 15), own=own)


@pytest.mark.parametrize("batch", BATCHES)
def test_it_is_asked_for_all_and_costs_what_it_drafts(batch: int):
    """One token drafted on average takes what one row more takes, whatever it may draft."""
    plan = choose_plan([outlook(batch, OwnDrafts(1.0, 1.0, 0.9))], costs(), WIDTHS)
    assert plan.own
    assert plan.lengths == [15] * batch
    assert plan.drafters == [0] * batch
    assert plan.tokens == pytest.approx(1.9 * batch)
    assert plan.kind.rows == 2 * batch
    assert plan.seconds == pytest.approx((1 + 0.02 * (2 * batch - 1)) / 1e3)


def test_rounds_in_which_it_drafts_nothing_are_as_narrow_as_plain_ones():
    """Ten tokens in every tenth round: nine rounds of one row, and one of eleven, in a pass of sixteen."""
    plan = choose_plan([outlook(1, OwnDrafts(0.1, 1.0, 0.9))], costs(), WIDTHS)
    assert plan.kind == RoundKind(1, 16, 16, ("lookup",))
    assert plan.seconds == pytest.approx((0.9 * 1 + 0.1 * (1 + 0.02 * 15)) / 1e3)
    several = choose_plan([outlook(4, OwnDrafts(0.1, 1.0, 0.9))], costs(), WIDTHS)
    idle = 0.9**4
    rows = 16  # 4, and the 4 / (1 - idle) tokens of a round with drafts: more than 12, of which passes are captured
    assert several.kind.rows == rows
    assert several.seconds == pytest.approx((idle * (1 + 0.02 * 3) + (1 - idle) * (1 + 0.02 * (rows - 1))) / 1e3)


def test_what_came_of_asking_counts_and_not_what_tokens_are_likely_to_survive():
    """A drafter that is mostly right where it drafts, and seldom does, is not asked where asking costs more."""
    seldom = outlook(1, OwnDrafts(0.2, 0.2, 0.1), rate=0.9)
    assert not choose_plan([seldom], costs(row=0.6), WIDTHS).asks
    assert choose_plan([seldom], costs(row=0.02), WIDTHS).own
    often = outlook(1, OwnDrafts(1.0, 2.0, 1.8), rate=0.1)
    assert choose_plan([often], costs(row=0.2), WIDTHS).own


def test_sequences_without_room_are_not_asked_for():
    tight = Outlook("lookup", np.full((3, 15), 0.9), np.array([0, 3, 15]), own=OwnDrafts(1.0, 2.0, 1.5))
    plan = choose_plan([tight], costs(), WIDTHS)
    assert plan.lengths == [0, 3, 15]
    assert plan.drafters == [-1, 0, 0]
    assert plan.tokens == pytest.approx(3 + 2 * 1.5)
    nobody = Outlook("lookup", np.full((3, 15), 0.9), np.zeros(3, dtype=np.int64), own=OwnDrafts(1.0, 2.0, 1.5))
    assert not best_plan_of([nobody], 0, costs(), WIDTHS).asks


def learned(rounds: int, drafted: int, accepted: int, every: int, batch: int = 2) -> Controller:
    """After rounds that asked it, every so many of which it drafted in."""
    controller, ids = Controller([MEMBER], costs(), WIDTHS), [*range(batch)]
    for i in range(rounds):
        plan = best_plan_of([outlook(batch, OwnDrafts(1.0, 1.0, 1.0))], 0, controller.costs, WIDTHS)
        some = [drafted if (i + row) % every == 0 else 0 for row in ids]
        controller.note(ids, ids, plan, some, [[min(n, accepted) for n in some]])
    return controller


def plan_of(controller: Controller) -> Plan:
    """The next plan that is not one to try a drafter again."""
    plan = controller.plan([0, 1], [15, 15])
    return controller.plan([0, 1], [15, 15]) if plan.probe else plan


def test_spells_in_which_it_drafts_nothing_count():
    """So that what it brings is known, and it goes on being asked where that pays: here 4 tokens in every 4th round."""
    busy = learned(300, drafted=8, accepted=4, every=4)
    plan = busy.plan([0, 1], [15, 15])
    assert plan.own
    assert plan.tokens == pytest.approx(2 * (1 + 4 / 4), rel=0.15)
    assert plan.kind.width == 16  # of eight tokens, where it drafts
    idle = learned(300, drafted=8, accepted=0, every=4)
    assert not plan_of(idle).asks
    nothing = learned(300, drafted=0, accepted=0, every=4)
    assert not plan_of(nothing).asks


def test_guesses_that_the_text_judged_count_as_drafts():
    controller = learned(300, drafted=0, accepted=0, every=1)
    assert not controller.would_pay(0, 2, 0.0)
    for _ in range(200):
        controller.note_guesses(0, [0, 1], [6, 1], [6, 0])
    assert controller.would_pay(0, 2, 3.0)
    plan = controller.plan([0, 1], [15, 15])
    assert plan.own
    assert plan.tokens == pytest.approx(2 * (1 + 3.0), rel=0.05)


def test_a_guess_counts_by_the_rounds_that_it_stands_for():
    """A guess with one right token stands for three rounds, one with three for one: six tokens in four rounds."""
    controller = learned(300, drafted=0, accepted=0, every=1)
    for _ in range(200):
        controller.note_guesses(0, [0, 1], [1, 3], [1, 3], [3.0, 1.0])
    assert plan_of(controller).tokens == pytest.approx(2 * (1 + (3 * 1 + 1 * 3) / 4), rel=0.05)


def test_many_guesses_at_once_weigh_as_much_as_one_after_the_other():
    at_once, one_by_one = OwnFigures(frozenset({0})), OwnFigures(frozenset({0}))
    at_once.note_guesses(0, [3] * 8, [2] * 8)
    for _ in range(8):
        one_by_one.note_guesses(0, [3], [2])
    assert at_once.of(0) == pytest.approx(one_by_one.of(0))


def test_rare_guesses_weigh_more():
    rare, often = OwnFigures(frozenset({0})), OwnFigures(frozenset({0}))
    for _ in range(8):
        rare.note_guesses(0, [3], [2], rare=True)
        often.note_guesses(0, [3], [2])
    assert cast(OwnDrafts, rare.of(0)).accepted > cast(OwnDrafts, often.of(0)).accepted > 0.5


def test_of_long_guesses_only_some_tokens_count_beyond_those_that_came():
    """Where it is asked it learns to draft no farther: four tokens each, of which two came, and not fifteen."""
    controller = learned(300, drafted=0, accepted=0, every=1)
    for _ in range(200):
        controller.note_guesses(0, [0, 1], [15, 15], [2, 2])
    plan = plan_of(controller)
    assert plan.own
    assert plan.tokens == pytest.approx(2 * (1 + 2), rel=0.05)
    assert plan.kind == controller.costs.padded_kind(RoundKind(2, 5, 10, ("lookup",)), WIDTHS)


def test_its_plan_moves_to_others_with_what_it_costs_them():
    controller = learned(300, drafted=4, accepted=4, every=1)
    plan = controller.plan([0, 1], [15, 15])
    moved = controller.move(plan, [0, 1], [1, 2, 3])
    assert moved.own
    assert moved.lengths == [15] * 3
    assert moved.kind == controller.costs.padded_kind(RoundKind(3, 5, 15, ("lookup",)), WIDTHS)


def test_it_is_asked_again_after_a_while():
    """What was learned of it fades, at the cost of a few rounds in hundreds."""
    controller, ids = learned(300, drafted=8, accepted=0, every=2), [0, 1]
    plans = [plan_of(controller)]
    while not plans[-1].asks and len(plans) < 2000:
        controller.note_plain(plans[-1], ids, [0.0])
        plans.append(plan_of(controller))
    assert 64 < len(plans) < 1000
    assert plans[-1].own


def test_others_must_promise_what_they_must_and_it_no_more_than_two_per_cent():
    """A model of which one token survives, where drafts must promise 1.2 times plain decoding, and 2.5 times."""
    model = Outlook("model", np.power(0.5, np.arange(1.0, 8.0))[None], np.array([7]))
    lookup = outlook(1, OwnDrafts(0.1, 0.3, 0.1), rate=0.1)
    assert choose_plan([lookup, model], costs(), WIDTHS, least=1.2).drafters == [1]
    assert choose_plan([lookup, model], costs(), WIDTHS, least=2.5).drafters == [0]
    nothing = outlook(1, OwnDrafts(0.0, 0.0, 0.0))
    assert not choose_plan([nothing, model], costs(), WIDTHS, least=2.5).asks
    better = outlook(1, OwnDrafts(1.0, 6.0, 5.0))
    assert choose_plan([better, model], costs(), WIDTHS, least=1.2).drafters == [0]


def test_beside_a_model_it_is_asked_for_all_as_well():
    """Were every sequence to take it in place of the model, for as many tokens as survive: it knows better."""
    model = Outlook("model", np.full((1, 7), 0.01).cumprod(1), np.array([7]), True, (7,))
    plan = choose_plan([outlook(1, OwnDrafts(1.0, 6.0, 5.0), rate=0.9), model], costs(), WIDTHS)
    assert plan.own
    assert plan.lengths == [15]
    no_use = choose_plan([outlook(1, OwnDrafts(1.0, 6.0, 0.0), rate=0.9), model], costs(), WIDTHS)
    assert not no_use.asks


def test_where_passes_are_not_padded_nothing_changes():
    """There its drafts are seen before they are scored."""
    controller = Controller([Member("lookup", 15, limits_itself=True)], RoundCosts(PassTable({(1, 1): 1e-3})))
    assert not controller.plan([0], [15]).own


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_few_lucky_rounds_change_little(batch: int):
    """Else it would be asked when it had luck, bring less, and not be trusted: some 50 rounds count."""
    figures = OwnFigures(frozenset({0}))
    for _ in range(500):
        figures.note_rounds(0, [2] * batch, [[0] * batch])
    figures.note_rounds(0, [2] * batch, [[2] * batch] * 4)
    known = figures.of(0)
    assert known is not None
    assert 0.1 < known.accepted < 0.2
    figures.note_rounds(0, [2] * batch, [[2] * batch] * 150)
    known = figures.of(0)
    assert known is not None
    assert known.accepted > 1.9


def test_where_drafts_have_lost_too_much_only_the_last_rounds_count():
    """Texts that repeat themselves, then others: fifty rounds must not go by before that is believed."""
    figures = OwnFigures(frozenset({0}))
    figures.note_rounds(0, [6, 6], [[5, 5]] * 300)
    for _ in range(12):
        figures.note_rounds(0, [2, 2], [[0, 0]])
    known = figures.of(0)
    assert known is not None
    assert known.accepted > 3.5
    figures.forget_before_late(0)
    late = figures.of(0)
    assert late is not None
    assert late.accepted < 1.1
    figures.forget_before_late(1)  # one that does not limit itself: nothing is kept of it here


def test_drafts_that_lost_too_much_are_judged_by_their_last_rounds():
    controller = learned(300, drafted=4, accepted=4, every=1)
    assert plan_of(controller).own
    before = controller._own.of(0)
    controller._lost = 1000.0
    for _ in range(12):
        controller._own.note_rounds(0, [4, 4], [[0, 0]])
    plan_of(controller)
    after = controller._own.of(0)
    assert before is not None
    assert after is not None
    assert after.accepted < 0.3 * before.accepted
    assert controller._lost == 0.0
