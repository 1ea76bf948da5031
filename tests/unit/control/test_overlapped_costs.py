"""What rounds cost where the host prepares one while the device works on another."""

from __future__ import annotations

import random

import pytest

from outrider.control.costs import PassTable, RoundKind
from outrider.control.overlapped_costs import OverlappedCosts

PLAIN = RoundKind(4, 1, 4)
NARROW, WIDE = RoundKind(4, 4, 16, ("head",), 7), RoundKind(4, 8, 32, ("head",), 7)


def costs() -> OverlappedCosts:
    """Passes of 1, 1.5 and 3 seconds, and drafts of 0.7."""
    table = PassTable({(4, 1): 1.0, (4, 4): 1.5, (4, 8): 3.0}, padded=True)
    return OverlappedCosts(table, {"head": PassTable({(4, 1): 0.1}, padded=True)})


def test_a_round_takes_as_long_as_its_passes_or_the_host_whichever_is_longer():
    """The host takes 2.5 seconds: a narrow pass waits for it, a wide one does not."""
    made = costs()
    assert [made.seconds(kind) for kind in (PLAIN, NARROW, WIDE)] == pytest.approx([1.0, 2.2, 3.7])
    made.start_with(PLAIN, 1.2)
    made.start_with(NARROW, 2.5)
    assert [made.seconds(kind) for kind in (PLAIN, NARROW, WIDE)] == pytest.approx([1.2, 2.5, 3.7])
    for _ in range(200):
        made.observe(WIDE, 3.7)  # which says nothing of the host
    assert [made.seconds(kind) for kind in (PLAIN, NARROW, WIDE)] == pytest.approx([1.2, 2.5, 3.7])


def test_rounds_at_the_start_that_were_too_slow_are_soon_forgotten():
    made = costs()
    made.start_with(NARROW, 5.0)
    assert made.seconds(WIDE) == pytest.approx(5.0)
    for _ in range(100):
        made.observe(WIDE, 3.7)
    assert made.seconds(WIDE) == pytest.approx(3.7, rel=0.05)
    assert made.seconds(NARROW) < 4.0


def test_a_stall_hardly_counts():
    made = costs()
    made.start_with(PLAIN, 1.0)
    made.start_with(NARROW, 2.5)
    for _ in range(40):
        made.observe(PLAIN, 1.0)
        made.observe(NARROW, 2.5)
    made.observe(PLAIN, 50.0)
    made.observe(NARROW, 50.0)
    assert made.seconds(PLAIN) < 1.03
    assert made.seconds(NARROW) < 1.04 * 2.5


def test_a_longer_context_is_learned_of_rounds_of_its_kind():
    made = costs()
    for _ in range(200):
        made.observe(WIDE, 4.0)
    assert made.seconds(WIDE) == pytest.approx(4.0, rel=0.02)


def test_what_is_seen_of_one_width_goes_for_all():
    """Where tokens are sampled, all passes take longer: a width that was not used of late as well."""
    made = costs()
    made.start_with(NARROW, 2.2)
    for _ in range(100):
        made.observe(NARROW, 2.2 * 1.15)
    assert made.seconds(NARROW) == pytest.approx(2.2 * 1.15, rel=0.01)
    assert made.seconds(WIDE) == pytest.approx(3.7 * 1.15, rel=0.03)
    for _ in range(100):
        made.observe(WIDE, 3.7)
    assert made.seconds(WIDE) == pytest.approx(3.7, rel=0.01)
    assert made.seconds(NARROW) == pytest.approx(2.2, rel=0.1)
    assert made.seconds(RoundKind(4, 8, 32, ("lookup",))) == pytest.approx(3.0)  # others' passes are others


def test_drafters_never_asked_together_take_what_each_takes_beyond_none():
    made = costs()
    made.start_with(PLAIN, 1.5)
    made.start_with(NARROW, 2.5)
    made.start_with(RoundKind(4, 4, 16, ("lookup",)), 3.0)
    assert made.host_seconds(("lookup", "head"), 4) == pytest.approx(1.5 + 1.0 + 1.5)
    assert made.host_seconds(("other",), 4) == pytest.approx(1.5)


def test_a_batch_of_another_size_borrows_until_it_is_timed():
    made = costs()
    assert not made.borrows_level(4)
    made.observe(PLAIN, 1.0)
    assert made.borrows_level(32)
    assert not made.borrows_level(3)
    assert not made.knows_asking(NARROW)
    made.observe(NARROW, 2.5)
    assert made.knows_asking(NARROW)
    assert not made.knows_asking(RoundKind(32, 4, 128, ("head",), 7))


def test_a_round_that_tells_nothing_is_left_out():
    made = costs()
    made.observe(PLAIN, 0.0)
    assert made.seconds(PLAIN) == pytest.approx(1.0)


def test_rounds_of_one_kind_in_a_row_count_as_any_others():
    """`same` knows the last kind again by the kind itself; `other` gets a copy each time, and looks it up."""
    rng, same, other = random.Random(5), costs(), costs()
    kind = NARROW
    for _ in range(600):
        kind = rng.choice((PLAIN, NARROW, WIDE)) if rng.random() < 0.2 else kind
        seconds = rng.choice((0.0, rng.uniform(0.5, 5)))
        same.observe(kind, seconds)
        other.observe(RoundKind(*kind), seconds)
        if rng.random() < 0.02:
            for each in (same, other):
                each.start_with(kind, 2.0)
        assert [same.seconds(each) for each in (PLAIN, NARROW, WIDE)] == [
            other.seconds(each) for each in (PLAIN, NARROW, WIDE)
        ]
