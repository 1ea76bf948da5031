"""Drafts on a device: their length is known without reading them, and each row is copied where it belongs."""

import pytest
import torch

from outrider.core.device_row import DeviceRow
from outrider.runners.cuda_graphs import copy_rows

TOKENS = torch.arange(20).view(4, 5) + 100


class Block:
    """Takes the place of a block on a device; counts how often it is read."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens, self.reads = tokens, 0

    def list(self) -> list[list[int]]:
        self.reads += 1
        return self.tokens.tolist()


def test_counting_and_cutting_reads_nothing():
    block = Block(TOKENS)
    row = DeviceRow(block, 2, 5)
    assert len(row) == 5
    assert len(row[:3]) == 3
    assert len(row[:-1]) == 4
    assert block.reads == 0
    assert list(row[:3]) == [110, 111, 112]
    assert row[4] == 114
    assert tuple(row[1:3]) == (111, 112)


@pytest.mark.parametrize(
    "lengths", [(5, 5, 5, 5), (3, 5, 5, 5), (5, 3, 5, 1), (1, 2, 3, 4)], ids=lambda each: "-".join(map(str, each))
)
@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 2, 3, 4), (0, 2, 3, 4), (3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("columns", [(1, 1, 1, 1), (2, 1, 1, 1)], ids=str)
def test_every_token_is_copied_to_its_place(lengths, rows, columns):
    """Also where a sequence near its end asked for a shorter draft than the others: those keep all of theirs.

    Behind a shorter one may be what follows it in its block, and nothing else is written anywhere.
    """
    block = Block(TOKENS)
    ids = torch.zeros(6, 8, dtype=torch.int64)
    copy_rows(ids, [(rows[i], columns[i], DeviceRow(block, i, lengths[i])) for i in range(4)])
    for i, row in enumerate(rows):
        first, last = columns[i], columns[i] + lengths[i]
        assert ids[row, :last].tolist() == [0] * first + TOKENS[i, : lengths[i]].tolist()
        written = int(ids[row, first:].count_nonzero())
        assert ids[row, first:].tolist() == TOKENS[i, :written].tolist() + [0] * (8 - first - written)
    assert not ids[[row for row in range(6) if row not in rows]].any()


def test_rows_that_lie_side_by_side_are_one_copy_whatever_their_lengths(monkeypatch):
    copies = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, source: copies.append(source.shape))
    block, places = Block(TOKENS), [(0, 3), (1, 5), (4, 2), (5, 2)]
    drafts = [(row, 1, DeviceRow(block, i, length)) for i, (row, length) in enumerate(places)]
    copy_rows(torch.zeros(6, 8, dtype=torch.int64), drafts)
    assert copies == [(2, 5), (2, 2)]


def test_rows_of_different_blocks_are_not_mixed_up():
    one, other = Block(TOKENS), Block(TOKENS + 50)
    ids = torch.zeros(2, 6, dtype=torch.int64)
    copy_rows(ids, [(0, 1, DeviceRow(one, 0, 5)), (1, 1, DeviceRow(other, 1, 5))])
    assert ids[:, 1:].tolist() == [TOKENS[0].tolist(), (TOKENS[1] + 50).tolist()]
