"""Where drafts are seen before they are scored: who is asked, and how many tokens of each draft are scored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from outrider.control.choose import MIN_GAIN
from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.plan import Plan
from outrider.control.review import Offer, Review, choose_lengths, stated_survival

LOOKUP, MODEL = Member("lookup", 7), Member("model", 5, runs_model=True)
HEAD = Member("head", 7, runs_model=True, lengths=(7,))


def costs_of(slope: float, draft: float = 0.0) -> RoundCosts:
    """A pass of one row takes 1, each further one `slope`; a token of the model's drafts takes `draft`."""
    table = PassTable({(1, 1): 1.0, (1, 64): 1.0 + 63 * slope})
    return RoundCosts(table, {name: PassTable({(1, 1): draft}) for name in ("model", "head")})


def controller(*members: Member, slope: float = 0.2, draft: float = 0.05) -> tuple[Controller, Review]:
    made = Controller(members, costs_of(slope, draft))
    assert made.review is not None
    return made, made.review


def plans(control: Controller, seq_ids: list[int], budget: int = 7) -> Iterator[Plan]:
    """Those that are no probes."""
    while True:
        plan = control.plan(seq_ids, [budget] * len(seq_ids))
        if not plan.probe:
            yield plan


def worth(offer: Offer, length: int) -> float:
    return sum(offer.survival[:length]) if offer.survival else offer.expected * (length == offer.length)


def test_tokens_that_pay_are_scored_by_enumeration():
    """Drafts that are scored token by token, whole or not at all, and whole in any case."""
    rng = random.Random(5)
    for _ in range(100):
        offers = list[Offer]()
        for _ in range(4):
            n = rng.randrange(4)
            stated = stated_survival(np.array([rng.random() for _ in range(n)]))
            style = rng.randrange(4)
            offers.append(Offer(n, sum(stated), stated if style < 2 else (), whole=style == 2))
        costs = costs_of(rng.choice((0.05, 0.2, 0.5)))

        def rate(lengths: tuple[int, ...], offers: list[Offer] = offers, costs: RoundCosts = costs) -> float:
            tokens = 4 + sum(worth(offer, n) for offer, n in zip(offers, lengths, strict=True))
            return tokens / costs.target.rows_seconds(4 + sum(lengths))

        found = choose_lengths(offers, RoundKind(4, 4, 16, ("lookup",)), costs.shared_seconds)
        choices = [[o.length] if o.whole else range(o.length + 1) if o.survival else (0, o.length) for o in offers]
        least = tuple(min(each) for each in choices)
        best = max(map(rate, product(*choices)))
        assert found.promise.rate == pytest.approx(best if best > MIN_GAIN * rate(least) else rate(least))
        assert rate(tuple(found.lengths)) == pytest.approx(found.promise.rate)


def test_a_draft_that_is_known_is_scored_where_its_expectation_pays():
    control, review = controller(LOOKUP)
    plan = control.plan([0], [7])
    assert (plan.lengths, plan.settled) == ([7], True)  # asking costs nothing
    assert control.choose_drafts([0], plan, [Offer(7, 5.0)]) == [7]
    assert control.choose_drafts([0], plan, [Offer(7, 0.3)]) == [0]
    for _ in range(40):
        review.note_expected(0, 0, 5.0, 0)
    assert control.choose_drafts([0], plan, [Offer(7, 5.0)]) == [0]  # it promised too much before


def test_a_head_is_asked_for_its_block_and_scored_as_far_as_it_is_sure():
    control, review = controller(HEAD)
    plan = next(plans(control, [0]))
    assert plan.asks
    assert review.asked(plan, 0) == [min(7, plan.lengths[0] + 2)]
    sure, unsure = stated_survival(np.full(7, 0.95)), stated_survival(np.array([0.9, 0.9, 0.05] + [0.9] * 4))
    assert control.choose_drafts([0], plan, [Offer(7, 1.0, sure)]) == [7]
    assert control.choose_drafts([0], plan, [Offer(7, 1.0, unsure)]) == [2]
    assert control.choose_drafts([0], plan, [Offer(7, 1.0, [0.01] * 7)]) == [0]
    assert control.choose_drafts([0], plan, [Offer(7, 1.0, whole=True)]) == [7]
    for _ in range(60):
        review.note_expected(0, 0, 4.0, 1)
    assert 0 < control.choose_drafts([0], plan, [Offer(7, 1.0, sure)])[0] < 7  # it was surer than it should be


def test_a_model_that_does_not_say_how_sure_it_is_is_scored_as_planned():
    control, review = controller(MODEL)
    plan = next(plans(control, [0]))
    assert review.asked(plan, 0) == plan.lengths
    assert control.choose_drafts([0], plan, [Offer(plan.lengths[0], 0.01)]) == plan.lengths


def test_a_model_is_asked_unless_what_a_lookup_found_promises_more():
    control, review = controller(LOOKUP, HEAD)
    for _ in range(20):
        control.note_guesses(1, [0], [7], [3])
    plan = next(plans(control, [0]))
    assert (plan.drafters, plan.looks, plan.settled) == ([1], [7], False)
    asked = control.settle(plan, [0], [Offer()])
    assert (asked.drafters, asked.lengths, asked.looks, asked.settled) == ([1], plan.lengths, (), False)
    assert control.settle(plan, [0], [Offer(3, 0.5)]).drafters == [1]
    alone = control.settle(plan, [0], [Offer(7, 6.5)])
    assert (alone.drafters, alone.lengths, alone.settled) == ([0], [7], True)
    assert alone.kind.drafters == ("lookup",)
    assert review.asked(plan, 0) == [7]


def test_one_sequence_takes_what_was_found_while_a_model_drafts_for_others():
    control, _ = controller(LOOKUP, HEAD, slope=0.02)
    for _ in range(20):
        control.note_guesses(1, [0], [7], [3])
    plan = next(plans(control, [0, 1]))
    assert plan.drafters == [1, 1]
    settled = control.settle(plan, [0, 1], [Offer(7, 4.0), Offer()])
    assert settled.drafters == [0, 1]
    assert settled.lengths == [7, plan.lengths[1]]
    assert settled.kind.drafters == ("head",)


def test_nobody_but_the_lookup_is_asked_where_a_model_does_not_pay():
    control, _ = controller(LOOKUP, HEAD)
    for _ in range(60):
        control.note_guesses(1, [0], [7], [0])
    plan = next(plans(control, [0]))
    assert (plan.drafters, plan.lengths, plan.looks, plan.settled) == ([0], [7], (), True)


def test_looks_are_cut_to_budgets_and_go_on_with_other_sequences():
    control, _ = controller(LOOKUP, HEAD, slope=0.02)
    for _ in range(20):
        control.note_guesses(1, [0], [7], [3])
    plan = next(plans(control, [0, 1]))
    cut = plan.within([2, 0])
    assert (cut.looks, cut.drafters[1]) == ([2, 0], -1)
    moved = control.move(plan, [0, 1], [1, 2, 3])
    assert (moved.looks, moved.drafters) == ([7] * 3, [1] * 3)
