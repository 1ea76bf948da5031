"""The chosen plan is the best of all plans, by enumeration."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from outrider.control.choose import LEEWAY, MIN_GAIN, OWN_LENGTHS_GAIN, choose_plan
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.plan import Outlook, plain_plan


def outlook(name: str, rates: list[list[float]], budgets: list[int], **more) -> Outlook:
    return Outlook(name, np.array(rates).cumprod(1), np.array(budgets), **more)


def costs_of(slope: float, batch: int = 64, **draft: PassTable) -> RoundCosts:
    return RoundCosts(PassTable({(1, 1): 1.0, (1, batch): 1.0 + slope * (batch - 1)}), draft)


def test_every_sequence_gets_the_tokens_that_pay_by_enumeration():
    rng = random.Random(3)
    for _ in range(40):
        rates = [[rng.random() for _ in range(3)] for _ in range(3)]
        budgets = [rng.randrange(4) for _ in range(3)]
        costs = costs_of(rng.choice((0.02, 0.1, 0.3, 0.8)))
        found = choose_plan([outlook("lookup", rates, budgets)], costs)
        best = 0.0
        for lengths in product(*(range(b + 1) for b in budgets)):
            tokens = 3 + sum(float(np.cumprod(r)[:n].sum()) for r, n in zip(rates, lengths, strict=True))
            best = max(best, tokens / costs.target.rows_seconds(3 + sum(lengths)))
        plain = plain_plan(3, costs).rate
        assert found.rate == pytest.approx(best if best >= MIN_GAIN * plain else plain)
        assert all(n <= budget for n, budget in zip(found.lengths, budgets, strict=True))


def test_padded_widths_by_enumeration():
    """The longest plan of those that promise next to what the best does."""
    rng = random.Random(4)
    widths, longer = (1, 2, 4, 8), 0
    for _ in range(40):
        table = PassTable({(2, w): 1 + 0.05 * w * rng.random() for w in widths}, padded=True)
        costs = RoundCosts(table)
        rates = [[rng.random() for _ in range(6)] for _ in range(2)]
        found = choose_plan([outlook("lookup", rates, [6, 5])], costs, widths)
        plain, by_width = plain_plan(2, costs).rate, list[float]()
        for width in widths[1:]:
            own = [min(width - 1, 6), min(width - 1, 5)]
            tokens = 2 + sum(float(np.cumprod(r)[:n].sum()) for r, n in zip(rates, own, strict=True))
            by_width.append(tokens / table.pass_seconds(2, width))
        best = max(by_width)
        longest = [rate for rate in by_width if rate > LEEWAY * best][-1]
        longer += best > longest
        assert found.rate == pytest.approx(longest if best >= MIN_GAIN * plain else plain)
    assert longer


@pytest.mark.parametrize("step", [0.0, 0.2])
def test_packed_passes_by_enumeration(step: float):
    """Any lengths, each round at the cost of the smallest pass that takes it: uniform, or packed of 6 or 9 rows."""
    rng = random.Random(5)
    widths, packs, mixed = (1, 2, 4), (6, 9), 0
    for _ in range(120):
        price = rng.choice((0.01, 0.05, 0.1, 0.2))
        table = PassTable(
            {(3 + 1, w): 1 + price * 4 * w for w in widths}, padded=True, packed={(4, n): 1 + price * n for n in packs}
        )
        costs = RoundCosts(table, {"model": PassTable({(4, 1): step})})
        rates = [[rng.choice((0.1, 0.5, 0.95)) for _ in range(3)] for _ in range(3)]
        model = outlook("model", rates, [3, 3, 2], runs_model=step > 0, lengths=(1, 2, 3) if step else ())
        found = choose_plan([model], costs, widths)
        best = even = plain = plain_plan(3, costs).rate
        for lengths in product(range(4), range(4), range(3)):
            tokens = 3 + sum(float(np.cumprod(r)[:n].sum()) for r, n in zip(rates, lengths, strict=True))
            rows = min(
                4 * next(w for w in widths if w > max(lengths)), *(n for n in packs if n >= 3 + sum(lengths)), 99
            )
            best = max(best, tokens / (1 + price * rows + step * max(lengths)))
            if lengths in ((1, 1, 1), (2, 2, 2), (3, 3, 2)):
                width = next(w for w in widths if w > max(lengths))
                rows = min(4 * width, *(n for n in packs if n >= 3 * width), 99)
                even = max(even, tokens / (1 + price * rows + step * max(lengths)))
        if best < MIN_GAIN * plain:
            assert found.rate == pytest.approx(plain)
        elif even <= MIN_GAIN * plain or best > OWN_LENGTHS_GAIN * even:
            assert found.rate == pytest.approx(best)
        else:  # the same for all is as good
            assert LEEWAY * even * (1 - 1e-9) <= found.rate <= best * (1 + 1e-9)
        assert all(n <= budget for n, budget in zip(found.lengths, [3, 3, 2], strict=True))
        mixed += len(set(found.lengths)) > 1
    assert mixed > 5


@pytest.mark.parametrize("widths", [(), (1, 2, 4, 8)])
def test_what_never_stands_is_not_drafted(widths: tuple[int, ...]):
    table = PassTable({(4, w): 1 + 0.01 * w for w in (1, 2, 4, 8)} | {(1, 1): 1.0}, padded=bool(widths))
    plan = choose_plan([outlook("lookup", [[0.001] * 7] * 4, [7] * 4)], RoundCosts(table), widths)
    assert plan.lengths == [0] * 4
    assert plan.drafters == [-1] * 4
    assert plan.kind.plain


def test_a_draft_model_is_asked_only_where_its_steps_pay():
    free = outlook("lookup", [[0.2] * 5] * 2, [5, 5])
    model = outlook("model", [[0.9] * 5] * 2, [5, 5], runs_model=True, lengths=(1, 2, 5))
    table = PassTable({(2, w): 1 + 0.01 * w for w in (1, 2, 4, 6)}, padded=True)
    cheap, dear = (PassTable({(2, 1): seconds}) for seconds in (0.1, 1.5))
    widths = (1, 2, 4, 6)
    plan = choose_plan([free, model], RoundCosts(table, {"model": cheap}), widths)
    assert plan.drafters == [1, 1]
    assert plan.kind.steps == 5
    plan = choose_plan([free, model], RoundCosts(table, {"model": dear}), widths)
    assert 1 not in plan.drafters


def test_each_sequence_takes_the_drafter_that_knows_it():
    free = outlook("lookup", [[0.95] * 5, [0.05] * 5], [5, 5])
    model = outlook("model", [[0.5] * 5, [0.8] * 5], [5, 5], runs_model=True)
    table = PassTable({(2, w): 1 + 0.01 * w for w in (1, 2, 4, 6)}, padded=True)
    plan = choose_plan([free, model], RoundCosts(table, {"model": PassTable({(2, 1): 0.01})}), (1, 2, 4, 6))
    assert plan.drafters == [0, 1]
    assert plan.kind.drafters == ("lookup", "model")


def test_nobody_is_asked_where_asking_takes_longer_than_all_tokens_are_worth():
    """Rounds of a drafter take three times a plain one: its tokens would have to be three for each."""
    costs = RoundCosts(PassTable({(2, w): 1.0 for w in (1, 2, 4)}, padded=True))
    for _ in range(60):
        costs.observe(RoundKind(2, 1, 2), 1.0)
        costs.observe(RoundKind(2, 2, 4, ("dear",)), 3.0)
    good = [[0.99] * 3] * 2
    assert choose_plan([outlook("dear", good, [1, 1])], costs, (1, 2, 4)) == plain_plan(2, costs)
    assert choose_plan([outlook("cheap", good, [1, 1])], costs, (1, 2, 4)).kind.drafters == ("cheap",)
    both = [outlook("dear", good, [3, 3]), outlook("cheap", [[0.5] * 3] * 2, [3, 3])]
    assert choose_plan(both, costs, (1, 2, 4)).asks


def test_the_rate_that_a_plan_promises_counts_by_the_weight_of_its_drafter():
    """Two drafters and plain decoding, by enumeration of who drafts: the best once each rate is multiplied."""
    rng, chosen, widths = random.Random(5), set[tuple[str, ...]](), (1, 2, 4)
    for _ in range(200):
        table = PassTable({(2, w): 1 + 0.1 * (w - 1) for w in widths}, padded=True)
        costs = RoundCosts(table, {"model": PassTable({(2, 1): 0.2})})
        rates, weights = [rng.uniform(0.1, 0.9) for _ in range(2)], [rng.uniform(0.6, 1.1) for _ in range(2)]
        lookup = outlook("lookup", [[rates[0]] * 3] * 2, [3, 3], weight=weights[0])
        model = outlook("model", [[rates[1]] * 3] * 2, [3, 3], weight=weights[1], runs_model=True)
        found = choose_plan([lookup, model], costs, widths)
        alone = [choose_plan([replace(each, weight=1.0)], costs, widths, least=0.0) for each in (lookup, model)]
        worth = [plan.rate * weight for plan, weight in zip(alone, weights, strict=True)]
        best, plain = max(range(2), key=lambda i: worth[i]), plain_plan(2, costs)
        if min(abs(worth[0] / worth[1] - 1), abs(max(worth) / plain.rate / MIN_GAIN - 1)) < 0.05:
            continue  # plans of nearly the same worth differ by what they are compared with
        expected = alone[best].kind.drafters if worth[best] > MIN_GAIN * plain.rate else ()
        assert found.kind.drafters == expected
        chosen.add(found.kind.drafters)
    assert chosen == {(), ("lookup",), ("model",)}
