"""The controller, driven round by round with a drafter of known acceptance and rounds of known cost."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from outrider.control.acceptance import _DRAFTER_DECAY
from outrider.control.choose import best_plan_of
from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts, RoundKind
from outrider.control.member import Member
from outrider.control.overheads import PLAIN
from outrider.control.overlapped_costs import OverlappedCosts
from outrider.control.plan import Outlook, Plan, plain_plan

WIDTHS = (1, 2, 4, 6, 8)


def true_seconds(kind: RoundKind) -> float:
    return 1 + 0.02 * (kind.width - 1) + 0.3 * kind.steps


def controller(*members: Member) -> Controller:
    table = PassTable({(4, w): 1 + 0.02 * (w - 1) for w in WIDTHS}, padded=True)
    return Controller(members, RoundCosts(table, {"model": PassTable({(4, 1): 0.3})}), WIDTHS)


def drive(control: Controller, rounds: int, rate: dict[str, float], seed: int = 1) -> tuple[float, float, list]:
    """Tokens, seconds and plans of so many rounds of four sequences whose drafters have these rates."""
    rng = random.Random(seed)
    tokens, seconds, plans = 0.0, 0.0, []
    for _ in range(rounds):
        plan = control.plan([0, 1, 2, 3], [7] * 4)
        accepted = []
        for who, length in zip(plan.drafters, plan.lengths, strict=True):
            p = rate[control.members[who].name] if who >= 0 else 0.0
            accepted.append(next((j for j in range(length) if rng.random() >= p), length))
        took = true_seconds(plan.kind)
        control.note([0, 1, 2, 3], [0, 1, 2, 3], plan, plan.lengths, [accepted])
        control.note_seconds(plan, plan.lengths, took)
        tokens, seconds = tokens + 4 + sum(accepted), seconds + took
        plans.append(plan)
    return tokens, seconds, plans


LOOKUP = Member("lookup", 7, pays_budget=True)
MODEL = Member("model", 5, runs_model=True, pays_budget=True, lengths=(1, 2, 3, 5))


def test_drafts_that_never_stand_cost_next_to_nothing():
    tokens, seconds, plans = drive(controller(LOOKUP, MODEL), 12_000, {"lookup": 0.0, "model": 0.0})
    assert tokens / seconds > 0.998 * 4  # plain decoding yields 4 a second
    assert np.mean([plan.asks for plan in plans[1000:]]) < 0.02
    assert np.mean([plan.asks for plan in plans[2000:3000]]) < 0.02


def test_good_drafts_are_used_and_long():
    tokens, seconds, plans = drive(controller(LOOKUP), 600, {"lookup": 0.9})
    assert np.mean([max(plan.lengths) for plan in plans[50:]]) > 5
    best = 4 * (1 - 0.9**8) / 0.1 / (1 + 0.02 * 7)
    assert tokens / seconds > 0.95 * best


@pytest.mark.parametrize(("lookup", "model", "winner"), [(0.1, 0.9, "model"), (0.8, 0.82, "lookup")])
def test_the_better_drafter_wins(lookup: float, model: float, winner: str):
    control = controller(LOOKUP, MODEL)
    _, _, plans = drive(control, 400, {"lookup": lookup, "model": model})
    names = [control.members[p.drafters[0]].name for p in plans[100:] if p.asks]
    assert names.count(winner) > 0.9 * len(names)


def test_a_drafter_that_was_bad_is_found_out_when_it_becomes_good():
    control = controller(LOOKUP)
    drive(control, 500, {"lookup": 0.0})
    _, _, plans = drive(control, 1500, {"lookup": 0.9}, seed=2)
    assert np.mean([max(plan.lengths) for plan in plans[-100:]]) > 4


def test_guesses_that_cost_nothing_wake_it_sooner():
    control = controller(LOOKUP)
    drive(control, 500, {"lookup": 0.0})
    for _ in range(12):
        control.note_guesses(0, [0, 1, 2, 3], [7] * 4, [7] * 4)
    assert control.plan([0, 1, 2, 3], [7] * 4).asks


def test_costs_that_nobody_measured_are_learned():
    """Rounds with drafts take twice what the table says: the gain is gone, and so are the drafts."""
    control = controller(LOOKUP)
    rng = random.Random(5)
    plans = []
    for _ in range(400):
        plan = control.plan([0, 1, 2, 3], [7] * 4)
        accepted = [next((j for j in range(n) if rng.random() >= 0.4), n) for n in plan.lengths]
        control.note([0, 1, 2, 3], [0, 1, 2, 3], plan, plan.lengths, [accepted])
        control.note_seconds(plan, plan.lengths, true_seconds(plan.kind) * (1 if plan.kind.plain else 2))
        plans.append(plan)
    assert np.mean([plan.asks for plan in plans[-200:]]) < 0.1


def test_budgets_hold_and_none_means_plain():
    control = controller(LOOKUP)
    plan = control.plan([0, 1, 2, 3], [0, 2, 7, 0])
    assert all(n <= budget for n, budget in zip(plan.lengths, [0, 2, 7, 0], strict=True))
    assert not control.plan([0, 1], [0, 0]).asks
    assert plan.within([0, 1, 7, 0]).lengths[1] <= 1


def test_decisions_are_told():
    control = controller(LOOKUP)
    tokens, seconds, _ = drive(control, 200, {"lookup": 0.9})
    told = control.forget(0)
    assert told.rounds == 200
    assert sum(told.lengths.values()) == 200
    saved = sum(control.forget(i).saved for i in (1, 2, 3)) + told.saved
    assert saved / 4 == pytest.approx(tokens / 4 - seconds, rel=0.15)  # plain: a second a token
    assert control.forget(0).rounds == 0


def test_a_drafter_that_was_bad_is_judged_anew_after_a_while():
    """Tried 20 times for nothing, then not asked for 640 rounds: half of that is forgotten, and more."""
    table = PassTable({(1, w): 1.0 for w in (1, 2, 4, 8)}, padded=True)
    control = Controller([Member("head", 7, runs_model=True, pays_budget=True)], RoundCosts(table), (1, 2, 4, 8))
    head = control.acceptance[0]
    head.note([9] * 20, [7] * 20, [0] * 20)
    noted, weight = head._all[0, 0], 4 * _DRAFTER_DECAY**20
    assert head.survival([0])[0, 0] == pytest.approx(0.75 * weight / (weight + noted))
    for _ in range(640):
        control.note_plain(plain_plan(1, control.costs), [0], [0.0])
    weight = 4 - (4 - weight) * 0.92**10
    assert head.survival([0])[0, 0] == pytest.approx(0.75 * weight / (weight + noted * 0.92**10))


def test_a_probe_is_the_best_plan_of_a_drafter_that_is_left_out():
    """The model is known to be good, of the lookup nothing: it is tried with the length that promises most."""
    control = controller(LOOKUP, MODEL)
    control.note_guesses(0, [9] * 8, [7] * 8, [1] * 8)
    control.note_guesses(1, [9] * 400, [5] * 400, [5] * 400)
    plan = control.plan([0, 1, 2, 3], [7] * 4)
    assert (plan.probe, plan.drafters, plan.rounds) == (True, [0] * 4, 5)
    rate = {w: (1 + control.acceptance[0].survival([0])[0, : w - 1].sum()) / (1 + 0.02 * (w - 1)) for w in WIDTHS[1:]}
    assert 1 + max(plan.lengths) == max(rate, key=lambda w: rate[w])


def test_a_plan_is_moved_to_other_sequences():
    control = controller(LOOKUP, MODEL)
    plan = Plan(RoundKind(3, 4, 12, ("lookup",)), [3, 0, 3], [0, -1, 0], 6.0, 1.06)
    moved = control.move(plan, [5, 6, 7], [6, 7, 8, 9])
    assert (moved.lengths, moved.drafters) == ([0, 3, 3, 3], [-1, 0, 0, 0])
    assert moved.kind == RoundKind(4, 4, 16, ("lookup",))
    assert moved.tokens == 8.0
    assert moved.seconds == pytest.approx(1.06)
    assert control.move(plain_plan(2, control.costs), [1, 2], [3]) == plain_plan(1, control.costs)
    plain = plain_plan(2, control.costs)
    assert control.move(plain, [1, 2], [2, 3]) is plain
    assert control.move(replace(plain, rounds=5), [1, 2], [2, 3]) == plain, "others do not learn from it"


def test_a_batch_of_a_new_size_begins_with_rounds_without_drafts():
    """What they take is known of another size alone, where the host had less to do: five tell it, once a size."""
    table = PassTable({(b, w): 1.0 for b in (1, 4, 16) for w in WIDTHS}, padded=True)
    control = Controller([LOOKUP], RoundCosts(table), WIDTHS)
    assert control.plan([0], [7]).asks  # nothing is known yet: as measured
    control.note_plain(plain_plan(1, control.costs), [0], [1.0])
    assert control.plan([0], [7]).asks
    many = list(range(9))
    first = control.plan(many, [7] * 9)
    assert (first.asks, first.rounds) == (False, 5)
    control.note_plain(first, many, [3.0])
    assert control.costs.seconds(RoundKind(16, 1, 16)) == pytest.approx(2.0)  # the other size's counts as one round
    assert control.costs.seconds(RoundKind(1, 1, 1)) == pytest.approx(1.0)
    assert control.plan(many, [7] * 9).asks
    assert control.plan([0, 1], [7, 7]).rounds == 5
    assert control.plan([0, 1], [7, 7]).asks  # whatever came of it


def test_where_rounds_overlap_a_probe_is_of_a_few_sequences_in_turn():
    table = PassTable({(32, w): 1 + 0.02 * (w - 1) for w in WIDTHS}, padded=True)
    control = Controller([LOOKUP], OverlappedCosts(table), WIDTHS)
    ids = list(range(32))
    control.note_guesses(0, [9] * 400, [7] * 400, [0] * 400)
    probes = list[Plan]()
    for _ in range(4000):
        plan = control.plan(ids, [7] * 32)
        probes += [plan] if plan.probe else []
        for _ in range(max(1, plan.rounds)):
            control.note(ids, ids, plan, plan.lengths, [[0] * 32])
            control.note_seconds(plan, plan.lengths, plan.kind.width if plan.asks else 1.0)
    asked = [[row for row, n in enumerate(plan.lengths) if n] for plan in probes]
    assert asked[:3] == [ids[:16], ids[16:], ids[:16]]
    assert probes[0].rounds == 5  # what it takes is not known yet
    assert all(2 <= plan.rounds <= 4 for plan in probes[1:])
    assert sum(plan.rounds for plan in probes) < 0.01 * 4000


@pytest.mark.parametrize(("batch", "probes"), [(1, 3), (4, 1)])
def test_a_drafter_is_tried_at_start_until_enough_is_known_of_it(batch: int, probes: int):
    """Probes of five rounds in a row, of which nothing stands, before any is due by its cost."""
    table = PassTable({(b, w): 2.0 * w - 1 for b in (1, 4) for w in WIDTHS}, padded=True)
    control, ids = Controller([LOOKUP], RoundCosts(table), WIDTHS), list(range(batch))
    tried = 0
    for _ in range(8):
        plan = control.plan(ids, [7] * batch)
        tried += plan.probe
        for _ in range(max(1, plan.rounds)):
            control.note(ids, ids, plan, plan.lengths, [[0] * batch])
    assert tried == probes


def test_a_draft_shorter_than_asked_for_is_not_accepted_beyond_its_end():
    """Once all seven tokens stood; since then one is drafted of seven asked for, and stands."""
    control, ids = controller(LOOKUP), [0, 1, 2, 3]
    plan = Plan(RoundKind(4, 8, 32, ("lookup",)), [7] * 4, [0] * 4, 8.0, 1.0)
    for drafted, rounds in ((7, 20), (1, 400)):
        for _ in range(rounds):
            control.note(ids, ids, plan, [drafted] * 4, [[drafted] * 4])
    assert control.acceptance[0].survival(ids).sum(1) == pytest.approx([1.15] * 4, abs=0.2)
    other = controller(LOOKUP)
    for _ in range(400):  # the same of guesses
        other.note_guesses(0, ids, [1] * 4, [1] * 4)
    assert other.acceptance[0].survival(ids).sum(1) == pytest.approx([1.15] * 4, abs=0.2)


@pytest.mark.parametrize(("accepted", "pays"), [(0.2, False), (1.0, True)])
def test_what_guesses_are_worth_in_a_batch(accepted: float, pays: bool):
    """A round of two tokens takes half as long again as one without drafts."""
    table = PassTable({(4, 1): 1.0, (4, 2): 1.5}, padded=True)
    control = Controller([LOOKUP], RoundCosts(table), (1, 2))
    assert control.would_pay(0, 4, accepted) is pays


@pytest.mark.parametrize(("seconds", "rounds"), [(1.0, 16), (1.15, 15), (1.5, 6)])
def test_a_probe_that_costs_little_lasts_longer(seconds: float, rounds: int):
    """Of a drafter of which nothing stands, whose rounds take so much longer."""
    table = PassTable({(1, 1): 1.0, (1, 2): seconds}, padded=True)
    control = Controller([LOOKUP], RoundCosts(table), (1, 2))
    control.costs.observe(RoundKind(1, 2, 2, ("lookup",)), seconds)
    plain = plain_plan(1, control.costs)
    for _ in range(600):
        control.note([0], [0], plain, [0], [[0]])
    control.note_guesses(0, [9] * 400, [7] * 400, [0] * 400)
    probe = control.plan([0], [7])
    assert probe.probe
    assert probe.rounds == rounds


def test_drafts_under_way_go_on_through_bad_luck_but_not_for_long():
    """A head that pays by a half, then brings nothing: a round loses half a token. Eight lost tokens end it."""
    costs = OverlappedCosts(PassTable({(1, w): 1.0 if w == 1 else 1.5 for w in WIDTHS}, padded=True))
    control = Controller([Member("head", 7, runs_model=True, pays_budget=True, lengths=(7,))], costs, WIDTHS)
    for accepted, rounds in ((7, 40), (0, 4)):
        for _ in range(rounds):
            plan = control.plan([0], [7])
            assert plan.asks
            control.note([0], [0], plan, plan.lengths, [[accepted]])
    for accepted in (0, 1) * 1000:  # by which it neither gains nor loses
        control.acceptance[0].note([0], [7], [accepted])
    assert 0.97 < choose_plan_rate(control) < 1.05
    assert not control.plan([0], [7]).probe
    control._lost = 8.5
    for _ in range(2):  # to begin again, more is asked than to go on
        plan = control.plan([0], [7])
        assert plan.probe or not plan.asks


def choose_plan_rate(control: Controller) -> float:
    """What the best plan with drafts promises, over plain decoding."""
    outlook = Outlook("head", control.acceptance[0].survival([0]), np.array([7]), runs_model=True, lengths=(7,))
    return best_plan_of([outlook], 0, control.costs, WIDTHS).rate / plain_plan(1, control.costs).rate


def test_what_the_text_judges_for_free_is_not_forgotten():
    table = PassTable({(1, w): 3.0 if w > 1 else 1.0 for w in WIDTHS}, padded=True)
    control = Controller([LOOKUP], OverlappedCosts(table), WIDTHS)
    control.note_guesses(0, [9] * 400, [7] * 400, [0] * 400)
    plain = plain_plan(1, control.costs)
    known = control.acceptance[0].survival([0])[0, 0]
    for i in range(2000):
        control.note([0], [0], plain, [0], [[0]])
        if i % 50 == 0:
            control.note_guesses(0, [9], [7], [0])
    assert control.acceptance[0].survival([0])[0, 0] <= known


def test_a_plan_for_a_batch_of_another_size_has_the_length_that_is_best_there():
    """Rows are free for one sequence, and dear for many: the same drafts pay with fewer tokens, then not at all."""
    rows = {1: 0.0, 4: 0.02, 16: 0.2}
    table = PassTable({(b, w): 1.0 + price * b * (w - 1) for b, price in rows.items() for w in WIDTHS}, padded=True)
    head = Member("head", 7, runs_model=True, pays_budget=True, lengths=(7,))
    control = Controller([head], RoundCosts(table), WIDTHS)
    for _ in range(30):
        plan = control.plan([0], [7])
        control.note([0], [0], plan, plan.lengths, [[min(2, plan.lengths[0])]])
    plan = control.plan([0], [7])
    assert plan.lengths == [7]
    four = control.move(plan, [0], [0, 1, 2, 3])
    assert four.drafters == [0] * 4
    assert len(set(four.lengths)) == 1
    assert 0 < four.lengths[0] < 7
    assert four.kind.batch == 4
    assert not control.move(plan, [0], list(range(16))).asks
    assert control.move(four, [0, 1, 2, 3], [0, 1, 2]).lengths == four.lengths[:3]


def test_a_drafter_in_use_is_not_left_for_one_that_promises_hardly_more():
    """Both are estimates, and to change takes some rounds: 10 %, and no more than that."""
    control = controller(LOOKUP, MODEL)
    budgets = np.full(4, 5)

    def promised(member: int) -> float:
        outlook = control._outlook(member, [0, 1, 2, 3], budgets)
        return best_plan_of([outlook], 0, control.costs, WIDTHS).rate * outlook.weight

    resting = promised(0)
    control._asked = frozenset({0})
    assert promised(0) == resting
    control._asked = frozenset({1})
    assert promised(0) == pytest.approx(resting / 1.1)


def test_what_goes_by_beside_the_rounds_of_a_drafter_counts_against_it():
    """A token of a plain round takes 1/4; a drafter whose tokens take as long again beside its rounds is worth half."""
    control = controller(LOOKUP, MODEL)
    plain = plain_plan(4, control.costs).seconds
    for _ in range(4000):
        control.overheads.note(PLAIN, 4, 4, plain, plain)
        control.overheads.note(1, 4, 4, plain, 2 * plain)
    weights = [control._outlook(i, [0, 1, 2, 3], np.full(4, 5)).weight for i in (0, 1)]
    assert weights == [1.0, pytest.approx(0.5 / control._margin(1), rel=0.01)]
    for _ in range(3000):  # nobody asks it
        control.note_plain(plain_plan(4, control.costs), [0, 1, 2, 3], [plain])
    assert control._outlook(1, [0, 1, 2, 3], np.full(4, 5)).weight > 0.95 / control._margin(1)


def test_to_change_costs_something_but_not_to_one_that_those_in_use_are_part_of():
    """Any other drafter than those in use must promise 10 % more, one that is part of it 3 %."""
    control = controller(LOOKUP, MODEL, replace(MODEL, name="both", includes=frozenset({0})))
    found = {}
    for asked in ((), (0,), (1,), (2,)):
        control._asked = frozenset(asked)
        found[asked] = [control._margin(i) for i in range(3)]
    assert found[()] == [1.0, 1.0, 1.0]
    assert found[0,] == [1.0, 1.1, 1.0]
    assert found[1,] == [1.1, 1.0, 1.1]
    assert found[2,] == [1.03, 1.1, 1.0]
