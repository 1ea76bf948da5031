"""Block tables on the device: each sequence of a pass has a row of its own, and the row says its pages."""

from random import Random

import pytest
import torch

from outrider.core.errors import OutriderError
from outrider.kvcache.block_tables import BlockTables
from outrider.kvcache.pages import PagePool

SIZE = 4


def tables(rows: int = 2) -> BlockTables:
    return BlockTables(PagePool(12, SIZE), rows, 40, torch.device("cpu"))


def grow(made: BlockTables, seq_id: int, tokens: int) -> None:
    if seq_id not in made.pool:
        made.pool.open(seq_id, [seq_id])
    assert made.pool.reserve(seq_id, tokens)


def assert_rows(made: BlockTables, seq_ids: list[int]) -> None:
    rows = made.table_ids(seq_ids)
    assert len(set(rows)) == len(seq_ids)
    assert made.spare not in rows
    for seq_id, row in zip(seq_ids, rows, strict=True):
        table = made.pool.table(seq_id)
        assert made.pages[row, : len(table)].tolist() == table


def test_more_sequences_than_rows_are_refused():
    """Two of them would share a row, and read each other's pages."""
    made = tables(2)
    for seq_id in range(3):
        grow(made, seq_id, SIZE)
    with pytest.raises(OutriderError, match="3 sequences in one pass; the block tables hold 2"):
        made.table_ids([0, 1, 2])
    assert_rows(made, [0, 1])


def test_a_row_goes_from_the_least_recently_used_sequence_to_a_new_one():
    made = tables(2)
    for seq_id in range(3):
        grow(made, seq_id, SIZE * (seq_id + 1))
    assert_rows(made, [0, 1])
    assert_rows(made, [0])
    first = made.table_ids([0])
    assert_rows(made, [0, 2])
    assert made.table_ids([0]) == first
    assert_rows(made, [2, 1])
    assert_rows(made, [1, 0])


def test_rows_follow_their_sequences_pages():
    """As they grow, shrink, and as a sequence of the same id gets other pages."""
    made = tables(3)
    for tokens in (1, SIZE, SIZE + 1, 5 * SIZE):
        grow(made, 0, tokens)
        assert_rows(made, [0])
    grow(made, 1, 3 * SIZE)
    assert_rows(made, [1, 0])
    made.pool.trim(0, SIZE)
    grow(made, 2, 5 * SIZE)
    grow(made, 0, 3 * SIZE)
    assert_rows(made, [2, 0, 1])
    made.pool.close(1)
    made.pool.close(2)
    grow(made, 1, 2 * SIZE)
    assert_rows(made, [0, 1])


def test_rows_hold_whatever_changes_between_calls():
    """Tables are not looked at again while the pool counts no change: every change of one must be counted."""
    made, rng = tables(3), Random(0)
    for seq_id in range(4):
        grow(made, seq_id, 1)
    asked = [0, 1]
    for _ in range(2000):
        seq_id, before = rng.randrange(4), {i: [*made.pool.table(i)] for i in range(4)}
        counted = made.pool.changes
        match rng.choice(("reserve", "trim", "open", "nothing")):
            case "reserve":
                made.pool.reserve(seq_id, rng.randint(1, 5 * SIZE))
            case "trim":
                made.pool.trim(seq_id, rng.randint(1, 5 * SIZE))
            case "open":
                made.pool.close(seq_id)
                made.pool.open(seq_id, [seq_id])
            case _:
                pass
        same = before == {i: made.pool.table(i) for i in range(4)}
        assert same or made.pool.changes > counted
        if rng.random() < 0.3:
            asked = rng.sample(range(4), rng.randint(1, 3))
        assert_rows(made, asked)


def test_tables_that_did_not_change_are_not_looked_at_again():
    made = tables(3)
    for seq_id in range(2):
        grow(made, seq_id, SIZE)
    rows = made.table_ids([0, 1])
    rows.append(9)  # the caller's own
    assert made.pool.reserve(0, SIZE)  # which it has
    made.pool.table = None  # type: ignore[assignment] - raises where it is called
    assert made.table_ids([0, 1]) == rows[:2]
    with pytest.raises(TypeError):
        made.table_ids([1, 0])


def test_the_spare_row_is_the_scratch_page():
    made = tables()
    grow(made, 0, 3 * SIZE)
    made.table_ids([0])
    assert set(made.pages[made.spare].tolist()) == {made.pool.count}
