"""Plans of padded and packed passes, against a plain search over random states of the controller."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from outrider.control.acceptance import _DRAFTER_WEIGHT, _MAX_RATE, _MIN_RATE, Acceptance
from outrider.control.choose import LEEWAY, MIN_GAIN, OWN_LENGTHS_GAIN, choose_plan
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.plan import Outlook, Plan, plain_plan

WIDTHS = (1, 2, 4, 6, 8, 16)
NAMES = ("lookup", "head")


def survival_of(known: Acceptance, seq_id: int) -> list[float]:
    """By the formula, one position after another."""
    found, product, row = list[float](), 1.0, known._rows.get(seq_id)
    for j, rate in enumerate(known._rates()):
        if row is not None:
            rate = (known._figures[row, 1, j] + _DRAFTER_WEIGHT * rate) / (known._figures[row, 0, j] + _DRAFTER_WEIGHT)
            if known._times_stated[j] > 0 and not np.isnan(known._stated[row, j]):
                rate += known.slope * (known._stated[row, j] - known._sum_stated[j] / known._times_stated[j])
        product *= min(max(rate, _MIN_RATE), _MAX_RATE)
        found.append(product)
    return found


def plan_of(who: list[int], lengths: list[int], outlooks: list[Outlook], costs: RoundCosts, length: int = 0) -> Plan:
    """length: that every sequence has room for; 0: it is packed."""
    batch, width = len(who), next(w for w in WIDTHS if w > (length or max(lengths)))
    drafts = list(zip(who, lengths, strict=True))
    asked = sorted({i for i, n in drafts if n})
    steps = max(outlooks[i].steps(max(n for by, n in drafts if by == i)) for i in asked)
    rows = batch * width if length else costs.target.padded_rows(batch, width, batch + sum(lengths))
    kind = RoundKind(batch, width, rows, tuple(outlooks[i].name for i in asked), steps)
    tokens = batch + sum(float(outlooks[i].survival[row, :n].sum()) for row, (i, n) in enumerate(drafts))
    return Plan(kind, lengths, [i if n else -1 for i, n in drafts], tokens, costs.seconds(kind))


def padded(group: list[int], outlooks: list[Outlook], costs: RoundCosts, best: Plan) -> Plan:
    top, found, batch = best.rate, False, len(best.lengths)
    most = min(max(int(outlooks[i].budgets.max()) for i in group), WIDTHS[-1] - 1)
    lengths = {min(w - 1, most) for w in WIDTHS} | {n for i in group for n in outlooks[i].lengths if n <= most}
    for length in sorted(lengths - {0}):
        room = [{i: min(length, int(outlooks[i].budgets[row])) for i in group} for row in range(batch)]
        who = [max(group, key=lambda i: outlooks[i].survival[row, : own[i]].sum()) for row, own in enumerate(room)]
        if max(own[i] for i, own in zip(who, room, strict=True)) < length:
            continue
        plan = plan_of(who, [own[i] for i, own in zip(who, room, strict=True)], outlooks, costs, length)
        same = found and plan.kind.drafters == best.kind.drafters
        if plan.rate > (LEEWAY * top if same else top):
            best, found, top = plan, True, max(top, plan.rate)
    return best


def packed(group: list[int], outlooks: list[Outlook], costs: RoundCosts, best: Plan) -> Plan:
    batch = len(best.lengths)
    own = [{i: outlooks[i].survival[row, : outlooks[i].budgets[row]] for i in group} for row in range(batch)]
    who = [max(group, key=lambda i: each[i].sum()) for each in own]
    most = min(max(len(outlooks[i].survival[0]) for i in group), WIDTHS[-1] - 1)
    for longest in sorted({most, *(n for i in group for n in outlooks[i].lengths if n < most)}):
        gains = [(-float(g), row) for row, i in enumerate(who) for g in own[row][i][:longest]]
        likeliest = [row for _, row in sorted(gains, key=lambda each: each[0])]
        for count in sorted({min(rows - batch, len(likeliest)) for rows in costs.target.packed_rows(batch)} - {0}):
            lengths = [likeliest[:count].count(row) for row in range(batch)]
            plan = plan_of(who, lengths, outlooks, costs)
            best = plan if plan.rate > best.rate else best
    return best


def best_plan(outlooks: list[Outlook], costs: RoundCosts) -> Plan:
    plain = best = plain_plan(len(outlooks[0].budgets), costs)
    best = Plan(plain.kind, plain.lengths, plain.drafters, MIN_GAIN * plain.tokens, plain.seconds)
    for group in ([0], [1], [0, 1]):
        even = padded(group, outlooks, costs, best)
        own = packed(group, outlooks, costs, even)
        same = own.kind.drafters == even.kind.drafters
        best = own if own.rate > (OWN_LENGTHS_GAIN if same else 1) * even.rate else even
    return best if best.asks else plain


def random_costs(rng: random.Random, batch: int) -> RoundCosts:
    size, row, head = 1 << (batch - 1).bit_length(), rng.choice((0.003, 0.02, 0.1)), rng.choice((0.01, 0.05, 0.3))
    shapes = {(size, w): 1 + row * size * w for w in WIDTHS}
    packs = {(size, n): 1 + row * n for n in (8, 16, 32, 64) if size >= 4 and size < n < size * WIDTHS[-1]}
    costs = RoundCosts(PassTable(shapes, padded=True, packed=packs), {"head": PassTable({(size, 1): head})})
    for _ in range(rng.randrange(6)):
        costs.observe(RoundKind(batch, 1, batch), rng.uniform(1, 1.5))
        width, asked = rng.choice(WIDTHS[1:]), rng.choice(((NAMES[0],), (NAMES[1],), NAMES))
        kind = RoundKind(batch, width, batch * width, asked, 7 if "head" in asked else 0)
        costs.observe(kind, costs.shared_seconds(kind) * rng.uniform(1.01, 2.0))
    return costs


def random_outlooks(rng: random.Random, batch: int) -> list[Outlook]:
    ids, room = list(range(batch)), np.array([rng.choice((0, 2, 5, 64, 64, 64)) for _ in range(batch)])
    room[0] = 64
    found = list[Outlook]()
    for name, most in zip(NAMES, (15, 7), strict=True):
        known, rate = Acceptance(most), rng.choice((0.1, 0.4, 0.6, 0.8, 0.95))
        for _ in range(rng.randrange(12)):
            some = rng.sample(ids, rng.randint(1, batch))
            right = [next((j for j in range(most) if rng.random() >= rate), most) for _ in some]
            if name == "head":
                told = np.array([[rng.random() * (0.2 + n / most) for _ in range(most)] for n in right])
                known.note_stated(some, told, [most] * len(some), right)
            known.note(some, [most] * len(some), right)
        survival = known.survival(ids)
        assert survival.tolist() == pytest.approx(np.array([survival_of(known, i) for i in ids]), rel=1e-12)
        model = {"runs_model": True, "lengths": (7,)} if name == "head" else {}
        found.append(Outlook(name, survival, np.minimum(room, most), **model))
    return found


@pytest.mark.parametrize("batch", [1, 2, 3, 8, 13])
def test_plans_are_those_of_a_plain_search(batch: int):
    rng, kinds = random.Random(batch), set[RoundKind]()
    for _ in range(60):
        costs, outlooks = random_costs(rng, batch), random_outlooks(rng, batch)
        found, wanted = choose_plan(outlooks, costs, WIDTHS), best_plan(outlooks, costs)
        assert (found.kind, found.lengths, found.drafters) == (wanted.kind, wanted.lengths, wanted.drafters)
        assert (found.tokens, found.seconds) == pytest.approx((wanted.tokens, wanted.seconds), rel=1e-12)
        kinds.add(found.kind)
    assert len(kinds) > 5  # else nothing was to choose
    assert any(kind.plain for kind in kinds)
    assert len({kind.drafters for kind in kinds}) > 2 - (batch == 1)


def test_gains_fall_along_a_draft():
    """What `_first` goes by: the likeliest tokens of a sequence are the first of its draft."""
    for outlook in random_outlooks(random.Random(1), 5):
        assert all(a >= b for row in outlook.survival.tolist() for a, b in pairwise(row))


def test_a_drafter_that_promises_more_and_costs_more_does_not_hide_another():
    """By tokens alone the lookup is ahead at every length; the head is worth its time, and the lookup is not."""
    costs = RoundCosts(PassTable({(1, w): 1.0 + 0.01 * w for w in WIDTHS}, padded=True))
    costs.observe(RoundKind(1, 1, 1), 1.0)
    for name, seconds in (("lookup", 3.0), ("head", 1.3)):
        for _ in range(20):
            costs.observe(RoundKind(1, 8, 8, (name,), 7 * (name == "head")), seconds)
    room = np.array([7])
    lookup = Outlook("lookup", np.full((1, 7), 0.52).cumprod(1), room)
    head = Outlook("head", np.full((1, 7), 0.5).cumprod(1), room, True, (7,))
    assert set(choose_plan([lookup, head], costs, WIDTHS).drafters) == {1}
