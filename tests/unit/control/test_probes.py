"""Which drafters are tried again, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outrider.control.choose import best_plan_of
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.plan import Outlook, Plan, plain_plan
from outrider.control.probes import Probes

WIDTHS = (1, 2, 4, 8)
ALONE = [frozenset[int](), frozenset[int]()]
"""Two drafters that have no part in each other's drafts."""
COSTS = RoundCosts(PassTable({(b, w): 1.0 + 0.1 * w for b in (1, 2) for w in WIDTHS}, padded=True))


def outlooks() -> list[Outlook]:
    survival, budgets = np.full((1, 7), 0.1).cumprod(1), np.array([7])
    return [Outlook("lookup", survival, budgets, False, ()), Outlook("head", survival, budgets, True, (7,))]


def tried(probes: Probes, drafts: list[int], rounds: int) -> list[int]:
    """Which drafter each probe of so many rounds is of."""
    found: list[int] = []
    for _ in range(rounds):
        plan = probes.due(outlooks(), plain_plan(1, COSTS), drafts)
        if plan is not None:
            found.append(plan.drafters[0])
        probes.count_rounds()
    return found


def test_all_are_tried_again_after_the_start():
    probes = Probes(ALONE, COSTS, WIDTHS)
    assert tried(probes, [0, 0], 200).count(0) >= 3
    assert set(tried(probes, [3, 100], 20_000)) == {0, 1}


def test_one_of_which_enough_drafts_are_known_is_not_new():
    """It is tried as seldom as any other then."""
    found = tried(Probes(ALONE, COSTS, WIDTHS), [100, 100], 20_000)
    assert abs(found.count(0) - found.count(1)) <= 1


@pytest.mark.parametrize(("lost", "most"), [(0.0, 2500), (4.0, 20), (1000.0, 10)])
def test_what_a_probe_lost_keeps_off_the_next(lost: float, most: int):
    """Of two, a round lost is 500 rounds of each, at most 4096; by what it should lose, another is due after 16."""
    probes = Probes(ALONE, COSTS, WIDTHS)
    found = 0
    for _ in range(20_000):
        if tried(probes, [100, 100], 1):
            found += 1
            probes.charge(0, lost / probes.rate, 1)
    assert most / 2 <= found <= most


def test_what_one_lost_keeps_off_no_other():
    probes, found = Probes(ALONE, COSTS, WIDTHS), [0, 0]
    for _ in range(20_000):
        for drafter in tried(probes, [100, 100], 1):
            found[drafter] += 1
            probes.charge(0, 1000.0 / probes.rate if drafter else 0.0, 1)
    assert found[0] > 1000
    assert 4 <= found[1] <= 6


def probed(plan: Plan, known: list[Outlook], seconds: float, rounds: int = 20_000) -> int:
    """How often drafter 1 is tried beside a plan of drafter 0, where each try brings two tokens in so many seconds."""
    probes, found = Probes(ALONE, COSTS, WIDTHS), 0
    for _ in range(rounds):
        if probes.due(known, plan, [100, 100]) is not None:
            found += 1
            probes.charge(2, seconds, 1)
        probes.count_rounds()
    return found


def test_a_probe_beside_drafts_costs_what_these_would_have_brought():
    """Both beat plain decoding, but one takes twice as long as the other in use: to try it is not free."""
    known = [replace(each, survival=np.full((1, 7), 0.9).cumprod(1)) for each in outlooks()]
    plan = best_plan_of(known, 0, COSTS, WIDTHS)
    equal, slower = 2 / plan.rate, 3 / plan.rate
    assert 2 / slower > plain_plan(1, COSTS).rate
    assert probed(plan, known, equal) > 1000
    assert probed(plan, known, slower) <= 20_000 / 200 + 1  # a token lost is 200 rounds: half a per cent each


def test_one_of_less_weight_is_tried_the_less():
    known = [replace(each, survival=np.full((1, 7), 0.9).cumprod(1)) for each in outlooks()]
    plan = best_plan_of(known, 0, COSTS, WIDTHS)
    light = [known[0], replace(known[1], weight=0.5)]
    assert probed(plan, light, 0.0) < probed(plan, known, 0.0) / 10


def test_luck_is_not_charged():
    """Rounds of a probe that bring no tokens and twice as many, in turn, lose nothing."""
    known = [replace(each, survival=np.full((1, 7), 0.9).cumprod(1)) for each in outlooks()]
    plan, probes, found = best_plan_of(known, 0, COSTS, WIDTHS), Probes(ALONE, COSTS, WIDTHS), 0
    for _ in range(20_000):
        if probes.due(known, plan, [100, 100]) is not None:
            found += 1
            for tokens in (0, 8):
                probes.charge(tokens, 4 / plan.rate, 1)
        probes.count_rounds()
    assert found > 1000


def test_one_that_drafts_all_that_the_plan_does_is_tried_more_often():
    """Whatever is known of it, it loses no more than the time that it takes beside the plan's drafter."""
    known = outlooks()
    known[0] = replace(known[0], survival=np.full((1, 7), 0.9).cumprod(1))
    plan, found = best_plan_of(known, 0, COSTS, WIDTHS), list[int]()
    for includes in (ALONE, [frozenset[int](), frozenset({0})]):
        probes, count = Probes(includes, COSTS, WIDTHS), 0
        for _ in range(20_000):
            probe = probes.due(known, plan, [100, 100])
            count += probe is not None and probe.drafters == [1]
            probes.count_rounds()
        found.append(count)
    assert found[1] > 4 * found[0] > 0


def test_what_an_including_one_lost_keeps_it_off_less():
    """What it lost beside worse drafts says little once those have become better: but it may not lose without end."""
    known, lost = outlooks(), 4.0
    known[0] = replace(known[0], survival=np.full((1, 7), 0.9).cumprod(1))
    plan, found = best_plan_of(known, 0, COSTS, WIDTHS), list[int]()
    for includes in (ALONE, [frozenset[int](), frozenset({0})]):
        probes, count = Probes(includes, COSTS, WIDTHS), 0
        tried(probes, [100, 100], 100)  # by itself it should lose much, so that its next probe is far off
        for _ in range(20_000):
            if probes.due(known, plan, [100, 100]) is not None:
                count += 1
                probes.charge(0, lost / probes.rate, 1)
            probes.count_rounds()
        found.append(count)
    assert found[0] <= 20_000 / 800  # four tokens are 800 rounds at half a per cent each
    assert 20_000 / 250 < found[1] <= 20_000 / 200 + 1


@pytest.mark.parametrize(("batch", "rounds"), [(1, 16), (4, 16), (16, 4), (64, 2)])
def test_a_probe_for_many_sequences_is_short(batch: int, rounds: int):
    costs = RoundCosts(PassTable({(batch, w): 1.0 for w in WIDTHS}, padded=True))
    costs.observe(RoundKind(batch, 2, 2 * batch, ("lookup",)), 1.0, 100)
    free = replace(outlooks()[0], survival=np.full((batch, 7), 0.1).cumprod(1), budgets=np.full(batch, 7))
    plan = Probes(ALONE[:1], costs, WIDTHS).due([free], plain_plan(batch, costs), [0])
    assert plan is not None
    assert plan.rounds == rounds
