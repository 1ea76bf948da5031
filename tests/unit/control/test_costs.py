"""Costs of rounds: measured times, interpolated, and corrected by the rounds that are run."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from outrider.control.costs import PassTable, RoundCosts, RoundKind


def test_rows_between_measured_ones_are_interpolated_and_beyond_extrapolated():
    table = PassTable({(1, 1): 1.0, (1, 4): 1.6, (1, 8): 2.8})
    assert table.rows_seconds(1) == 1.0
    assert table.rows_seconds(2) == pytest.approx(1.2)
    assert table.rows_seconds(6) == pytest.approx(2.2)
    assert table.rows_seconds(16) == pytest.approx(2.8 + 8 * 0.3)
    assert table.pass_seconds(4, 2) == table.rows_seconds(8)


def test_the_price_of_a_row():
    assert PassTable({(1, 1): 1.0, (1, 8): 2.4}).row_price == pytest.approx(0.2)


def test_padded_passes_cost_the_captured_shape_that_takes_them():
    table = PassTable({(1, 1): 1.0, (1, 4): 1.2, (2, 1): 1.1, (4, 1): 1.3, (4, 4): 2.0}, padded=True)
    assert table.pass_seconds(1, 3) == 1.2
    assert table.pass_seconds(3, 1) == 1.3
    assert table.pass_seconds(3, 2) == 2.0
    assert table.pass_seconds(2, 1) == 1.1


def test_a_packed_pass_is_taken_where_it_has_fewer_rows():
    """Of 4 sequences: 6 or 10 rows in all, none of more than 4."""
    uniform = {(4, 1): 1.0, (4, 2): 1.2, (4, 4): 2.0, (8, 1): 1.1}
    table = PassTable(uniform, padded=True, packed={(4, 6): 1.1, (4, 10): 1.5})
    assert table.packed_rows(3) == [6, 10]
    assert table.packed_rows(8) == []
    assert table.pass_seconds(3, 4, 5) == 1.1
    assert table.pass_seconds(3, 4, 7) == 1.5
    assert table.pass_seconds(3, 4, 11) == table.pass_seconds(3, 4) == 2.0
    assert table.pass_seconds(8, 1) == 1.1
    kinds = {(3, 4, 5): (4, 6), (3, 3, 7): (4, 10), (3, 3, 9): (4, 10), (3, 4, 12): (4, 12), (4, 2, 7): (2, 8)}
    for given, expected in kinds.items():
        kind = RoundCosts(table).padded_kind(RoundKind(*given, ("lookup",)), (1, 2, 4))
        assert (kind.width, kind.rows) == expected
    assert RoundCosts(table).padded_kind(RoundKind(3, 3, 7), ()) == RoundKind(3, 3, 7)


def test_nothing_measured_means_that_rows_are_free():
    table = PassTable({})
    assert table.pass_seconds(1, 1) == table.pass_seconds(8, 16)


def test_draft_steps_are_added():
    costs = RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 1.7}), {"model": PassTable({(1, 1): 0.2})})
    plain, drafted = RoundKind(1, 1, 1), RoundKind(1, 4, 4, ("lookup", "model"), 3)
    assert costs.seconds(drafted) == pytest.approx(1.3 + 3 * 0.2)
    assert costs.seconds(plain) == 1.0


PLAIN, DRAFTED = RoundKind(1, 1, 1), RoundKind(1, 8, 8, ("lookup",))


def run(costs: RoundCosts, rounds: int, seconds: Callable[[RoundKind], float], kinds=(PLAIN, DRAFTED)) -> None:
    for _ in range(rounds):
        for kind in kinds:
            costs.observe(kind, seconds(kind))


def test_a_slower_machine_makes_every_kind_slower():
    costs = RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 2.0}))
    run(costs, 150, lambda _: 3.0, kinds=(PLAIN,))
    assert costs.seconds(PLAIN) == pytest.approx(3.0, rel=0.02)
    assert costs.seconds(DRAFTED) == pytest.approx(6.0, rel=0.02)  # never run: only the level is known


def test_a_kind_that_costs_more_than_measured_is_corrected_alone():
    costs = RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 2.0}))
    run(costs, 60, lambda kind: 1.0 if kind.plain else 5.0)
    assert costs.seconds(PLAIN) == pytest.approx(1.0, rel=0.02)
    assert costs.seconds(DRAFTED) == pytest.approx(5.0, rel=0.05)


def test_one_stall_does_not_rule_a_kind_out_and_corrections_fade():
    costs = RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 2.0}))
    costs.observe(DRAFTED, 1000.0)
    stalled = costs.seconds(DRAFTED)
    assert stalled < 10.0
    run(costs, 4000, lambda _: 1.0, kinds=(PLAIN,))
    assert costs.seconds(DRAFTED) == pytest.approx(2.0, rel=0.02)


def test_a_stall_of_a_round_without_drafts_makes_drafts_no_cheaper():
    """Such rounds are what drafts are judged by: one that takes 50 times as long counts as half as long again."""
    costs = RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 2.0}))
    run(costs, 40, lambda _: 1.0, kinds=(PLAIN,))
    costs.observe(PLAIN, 50.0)
    assert 1 < costs.seconds(PLAIN) <= 1 + 0.5 / 32
    run(costs, 200, lambda _: 4.0, kinds=(PLAIN,))  # it is slower for good
    assert costs.seconds(PLAIN) == pytest.approx(4.0, rel=0.05)


def test_a_stall_of_a_round_with_drafts_makes_them_little_dearer():
    costs = RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 2.0}))
    run(costs, 40, lambda kind: 1.0 if kind.plain else 3.0)
    costs.observe(DRAFTED, 150.0)
    assert costs.seconds(DRAFTED) < 3.3


def test_a_busy_machine_makes_drafts_neither_dearer_nor_cheaper():
    """Rounds take up to 1.7 times as long now and then: what drafts add to a round is known all the same."""
    rng, costs = np.random.default_rng(0), RoundCosts(PassTable({(1, 1): 1.0, (1, 8): 2.0}))
    found = list[float]()
    for _ in range(1200):
        for kind, seconds in ((PLAIN, 1.0), (DRAFTED, 2.5)):
            costs.observe(kind, seconds * rng.choice([1.0, 1.0, 1.3, 1.7]))
        found.append(costs.seconds(DRAFTED) / costs.seconds(PLAIN))
    assert np.mean(found[200:]) == pytest.approx(2.5, rel=0.03)
    assert 2.2 < min(found[200:]) < max(found[200:]) < 2.8


def test_rounds_that_say_nothing_are_ignored():
    costs = RoundCosts(PassTable({(1, 1): 1.0}))
    costs.observe(PLAIN, 0.0)
    assert costs.seconds(PLAIN) == 1.0


def test_kinds_never_seen_are_as_slow_as_others_of_their_drafters():
    """What drafters cost the host is in no table: it is learned for all widths at once."""
    costs = RoundCosts(PassTable({(1, 1): 1.0, (1, 4): 1.2, (1, 8): 2.0}))
    run(costs, 60, lambda kind: 1.0 if kind.plain else 5.0)
    other, stranger = RoundKind(1, 4, 4, ("lookup",)), RoundKind(1, 4, 4, ("model",))
    assert costs.seconds(other) == pytest.approx(1.2 + 3.0, rel=0.03)
    assert costs.seconds(stranger) == pytest.approx(1.2, rel=0.02)


def test_what_rounds_took_at_the_start_counts_until_others_tell_more():
    """Asking takes 2 seconds of the host for four sequences, whatever the width; it is never forgotten."""
    costs = RoundCosts(PassTable({(4, 1): 1.0, (4, 4): 1.5, (4, 8): 2.0}, padded=True))
    plain, asked, wider = RoundKind(4, 1, 4), RoundKind(4, 4, 16, ("lookup",)), RoundKind(4, 8, 32, ("lookup",))
    costs.start_with(plain, 2.0)
    costs.start_with(asked, 5.0)
    assert not costs.knows_asking(wider)  # since the start
    for rounds in (0, 4000):
        run(costs, rounds, lambda _: 2.0, kinds=(plain,))
        found = [costs.seconds(kind) for kind in (plain, asked, wider)]
        assert found == pytest.approx([2.0, 5.0, 6.0])
    run(costs, 40, lambda _: 4.0, kinds=(asked,))
    assert costs.knows_asking(wider)
    assert 3.9 < costs.seconds(asked) < 4.1
    least = costs.shared_seconds(asked)
    assert least < 4.6
    run(costs, 4000, lambda _: 2.0, kinds=(plain,))
    assert costs.seconds(asked) == pytest.approx(least, rel=0.01)  # not as slow as at the start again
    run(costs, 40, lambda _: 8.0, kinds=(asked,))
    run(costs, 4000, lambda _: 2.0, kinds=(plain,))
    assert costs.seconds(asked) == pytest.approx(least, rel=0.01)  # nor as it was once


def test_what_was_too_slow_at_the_start_is_so_for_no_width():
    """Only drafts of one width are made since: those of another are not taken to be slower for that."""
    costs = RoundCosts(PassTable({(1, w): 1.0 for w in (1, 6, 8)}, padded=True))
    made, wider = RoundKind(1, 6, 6, ("head",)), RoundKind(1, 8, 8, ("head",))
    costs.start_with(made, 1.6)
    run(costs, 100, lambda _: 1.2, kinds=(made,))
    assert costs.seconds(made) == pytest.approx(1.2, rel=0.01)
    assert costs.seconds(wider) == pytest.approx(1.2, rel=0.01)


def test_asking_for_fewer_sequences_takes_no_longer_at_the_start():
    costs = RoundCosts(PassTable({(b, w): 1.0 for b in (1, 2, 4) for w in (1, 4)}, padded=True))
    for batch, seconds in ((1, 3.0), (2, 1.5), (4, 2.0)):
        costs.start_with(RoundKind(batch, 4, 4 * batch, ("lookup",)), seconds)
    found = [costs.seconds(RoundKind(batch, 4, 4 * batch, ("lookup",))) for batch in (1, 2, 4)]
    assert found == pytest.approx([1.5, 1.5, 2.0])


def test_drafters_that_were_never_asked_together_take_as_long_as_one_after_the_other():
    costs = RoundCosts(PassTable({(1, w): 1.0 for w in (1, 4)}, padded=True))
    for name, seconds in (("lookup", 1.5), ("head", 1.25)):
        costs.start_with(RoundKind(1, 4, 4, (name,)), seconds)
    assert costs.seconds(RoundKind(1, 4, 4, ("lookup", "head"))) == pytest.approx(1.75)


def test_a_pass_timed_in_a_stall_costs_no_more_than_a_larger_one():
    table = PassTable({(1, 1): 1.0, (1, 2): 5.0, (2, 2): 1.5, (1, 8): 2.5})
    assert [table.rows_seconds(n) for n in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 1.5, 1.5, 1.5, 2.5])


def test_what_asking_costs_is_known_by_batch():
    """A host that does much for each sequence: rounds of 16 take twice what was measured, those of one as long."""
    costs = RoundCosts(PassTable({(b, w): 1.0 for b in (1, 4, 16) for w in (1, 4)}, padded=True))
    for _ in range(40):
        costs.observe(RoundKind(1, 4, 4, ("lookup",)), 1.0)
        costs.observe(RoundKind(16, 4, 64, ("lookup",)), 2.0)
    for width in (1, 4):  # of another kind too
        assert costs.seconds(RoundKind(1, width, width, ("lookup",))) == pytest.approx(1.0, rel=0.02)
        assert costs.shared_seconds(RoundKind(16, width, 16 * width, ("lookup",))) > 1.35
    assert costs.shared_seconds(RoundKind(12, 4, 48, ("lookup",))) > 1.3  # as the nearest
    assert costs.seconds(RoundKind(16, 4, 64, ("other",))) == 1.0
    together = costs.seconds(RoundKind(16, 4, 64, ("lookup", "other")))
    assert together == costs.shared_seconds(RoundKind(16, 4, 64, ("lookup",)))
