"""Rounds that are noted together count as those noted one by one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import cast

import numpy as np
import pytest

from outrider.control import round_log
from outrider.control.acceptance import Acceptance, DraftedRounds
from outrider.control.controller import Controller
from outrider.control.costs import PassTable
from outrider.control.member import Member
from outrider.control.overlapped_costs import OverlappedCosts
from outrider.control.plan import Plan

WIDTHS = (1, 2, 4, 6, 8)
MEMBERS = [Member("lookup", 5, pays_budget=True), Member("head", 7, runs_model=True, pays_budget=True, lengths=(7,))]


def test_rounds_noted_together_count_as_one_after_the_other():
    rng = random.Random(3)
    together, alone = Acceptance(5), Acceptance(5)
    for _ in range(60):
        ids = rng.sample(range(9), rng.randint(1, 6))
        lengths = [[rng.randint(1, 7) for _ in ids] for _ in range(rng.randint(1, 9))]
        accepted = [[rng.randint(0, n) for n in each] for each in lengths]
        parts = [DraftedRounds(ids, lengths, accepted)]
        if rng.random() < 0.5 and len(ids) > 1:  # others come and go meanwhile
            parts = [
                DraftedRounds(ids[1:], [each[1:] for each in lengths], [each[1:] for each in accepted]),
                DraftedRounds(ids[:1], [each[:1] for each in lengths], [each[:1] for each in accepted]),
            ]
        together.note_rounds(parts)
        for part in parts:
            for length, right in zip(part.lengths, part.accepted, strict=True):
                alone.note(part.seq_ids, length, right)
    assert together.drafts == alone.drafts
    ids = [*range(10)]
    assert together.survival(ids) == pytest.approx(alone.survival(ids), rel=1e-9, abs=0)
    assert together._first_weight == pytest.approx(alone._first_weight, rel=1e-9)
    assert together._all == pytest.approx(alone._all, rel=1e-9)


def test_figures_are_those_of_a_plain_count():
    """A draft of n tokens, a accepted, reached min(n, a + 1) positions and was accepted at a; older ones count less."""
    rng, known, max_tokens = random.Random(4), Acceptance(4), 4
    own, every = np.zeros((3, 2, max_tokens)), np.zeros((2, max_tokens))
    for _ in range(20):
        lengths = [[rng.randint(1, 4) for _ in range(3)] for _ in range(3)]
        accepted = [[rng.randint(0, n) for n in each] for each in lengths]
        known.note_rounds([DraftedRounds([0, 1, 2], lengths, accepted)])
        drafts = [each for part in zip(lengths, accepted, strict=True) for each in zip(*part, strict=True)]
        for row, (n, a) in zip([0, 1, 2] * 3, drafts, strict=True):
            told = [[float(j < min(n, a + 1)) for j in range(4)], [float(j < a) for j in range(4)]]
            own[row] = 0.9 * own[row] + told
            every = (1 - 1 / 300) * every + told  # 100 rounds of three drafts
    assert known._figures[[known._rows[i] for i in range(3)]] == pytest.approx(own, rel=1e-9)
    assert known._all == pytest.approx(every, rel=1e-9)


def make_controller() -> Controller:
    table = PassTable({(4, w): 1 + 0.05 * (w - 1) for w in WIDTHS}, padded=True)
    costs = OverlappedCosts(table, {"head": PassTable({(4, 1): 0.02}, padded=True)})
    return Controller(MEMBERS, costs, WIDTHS)


def drive(seed: int) -> list[object]:
    """All that a controller decides and keeps in random rounds of texts that come, go, and near their ends."""
    rng, control, told = random.Random(seed), make_controller(), list[object]()
    ids, coming, plan = [0, 1, 2], 3, None
    for _ in range(400):
        if plan is None or len(plan.lengths) != len(ids) or rng.random() < 0.1:
            plan = control.plan(ids, [7] * len(ids))
            told.append((plan.lengths, plan.drafters, plan.probe, plan.tokens))
        note_round(control, plan, ids, rng)
        if rng.random() < 0.05:
            control.note_guesses(0, ids[:1], [3], [rng.randint(0, 3)])
        if rng.random() < 0.03:
            control.note_stated(1, ids, [np.full(7, rng.random()) for _ in ids], [7] * len(ids), [3] * len(ids))
        if rng.random() < 0.05:
            told.append(control.forget(ids.pop(0)).as_dict())
            ids, coming = [*ids, coming], coming + 1
            plan = None if rng.random() < 0.5 else plan
    told += [each.survival([*ids, -1]).tolist() for each in control.acceptance]
    return told + [control.forget(seq_id).as_dict() for seq_id in ids] + [len(control._decisions)]


def note_round(control: Controller, plan: Plan, ids: list[int], rng: random.Random) -> None:
    """A round of a plan: cut where texts end, now and then with one that ended meanwhile."""
    cut = plan.within([rng.randint(0, 7) if rng.random() < 0.05 else 7 for _ in ids])
    if not cut.asks:
        control.note_plain(cut, ids, [1.0])
        return
    drafted = list(cut.lengths)
    accepted = [rng.randint(0, n) if rng.random() < 0.7 else n for n in drafted]
    rows = [row for row in range(len(ids)) if rng.random() < 0.99]
    control.note(list(ids), rows, cut, drafted, [accepted])
    control.note_seconds(cut, drafted, 1 + 0.1 * max(drafted))


def flat(told: object) -> list[str | float]:
    """The numbers and names in what was told, in order."""
    if isinstance(told, dict):
        return flat([*told.items()])
    if isinstance(told, list | tuple):
        return [each for part in told for each in flat(part)]
    return [told if isinstance(told, str) else float(cast(float, told))]


@pytest.mark.parametrize("seed", range(6))
def test_a_controller_decides_the_same_whenever_rounds_are_noted(seed: int, monkeypatch: pytest.MonkeyPatch):
    together = flat(drive(seed))
    monkeypatch.setattr(round_log, "_ROUNDS", 1)
    alone = flat(drive(seed))
    assert [x for x in together if isinstance(x, str)] == [x for x in alone if isinstance(x, str)]
    numbers = [x for x in alone if isinstance(x, float)]
    assert [x for x in together if isinstance(x, float)] == pytest.approx(numbers, rel=1e-9)


def test_the_rounds_of_one_plan_are_noted_in_one_go(monkeypatch: pytest.MonkeyPatch):
    control, calls = make_controller(), list[int]()
    noted = Acceptance.note_rounds
    monkeypatch.setattr(
        Acceptance,
        "note_rounds",
        lambda self, parts: (calls.extend(len(part.accepted) for part in parts), noted(self, parts)),
    )
    plan = next(p for p in (control.plan([0, 1], [7, 7]) for _ in range(9)) if p.asks)
    short = replace(plan, lengths=[plan.lengths[0], 1])  # where a text is about to end
    for i in range(35):
        control.note([0, 1], range(2), short if i > 5 else plan, [*(short if i > 5 else plan).lengths], [[1, 1]])
    assert calls == [16, 16]
    assert control.forget(0).rounds == 35
    assert calls == [16, 16]  # a text's end is no time for it
    assert 0 in control._acceptance[plan.drafters[0]]._rows
    assert 0 not in control.acceptance[plan.drafters[0]]._rows
    assert calls == [16, 16, 3]
    assert control.forget(1).rounds == 35
    assert not any(each._rows for each in control._acceptance)


def test_texts_that_share_rows_tell_what_that_gains_before_they_are_noted(monkeypatch: pytest.MonkeyPatch):
    """Of rounds that are noted together the longest streak tells; each expects what is known before them."""
    control, told = make_controller(), list[tuple[float, ...]]()
    plan = next(p for p in (control.plan([0, 1], [7, 7]) for _ in range(9)) if p.asks)
    by, length = plan.drafters[0], plan.lengths[0]
    expected = control.acceptance[by].survival([0, 1]).cumsum(1).sum(0)
    monkeypatch.setattr(control._sharing, "note", lambda *figures: told.append(figures))
    for ids, rounds in (([0, 1], 3), ([2, 1], 5), ([2, 3], 2)):
        for _ in range(rounds):
            control.note(ids, range(2), plan, [*plan.lengths], [[1, 0]], shared=True)
    assert not told
    assert control.acceptance[by].drafts == 20
    assert told == [(by, length, 5, pytest.approx(5 * expected), 10)]


def test_a_streak_is_priced_as_its_rounds_would_be():
    """Rounds get slower: after so many the price is asked for again, whatever plan goes on."""
    control, saved = make_controller(), 0.0
    plan = next(p for p in (control.plan([0], [7]) for _ in range(9)) if p.asks)
    found = set[float]()
    for i in range(60):
        price = control.prices.of(control.prices.kind_of(plan, plan.lengths), control._round)
        saved += 2 * price.plain - price.extra
        found.add(price.extra)
        control.note([0], [0], plan, plan.lengths, [[2]])
        control.note_seconds(plan, plan.lengths, 1 + 0.05 * i)
    assert len(found) == 4
    assert control.forget(0).saved == pytest.approx(saved)
