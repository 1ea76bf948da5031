"""The sequences' block tables on the device: a row each, of which only what changed is sent."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.core.errors import OutriderError
from outrider.core.pinned_inputs import PinnedInputs
from outrider.kvcache.pages import PagePool


class BlockTables:
    """Table rows for the sequences of a pass. A sequence keeps its row until another needs it."""

    def __init__(self, pool: PagePool, sequences: int, context: int, device: torch.device) -> None:
        """context: max tokens of one sequence; sequences: max sequences of one pass."""
        self.pool, self.spare, self.device = pool, sequences, device
        """`spare` is a row whose every page is the scratch page, for rows that only fill up."""
        self.width = -(-context // pool.size) + 4  # a pass may be wider than the text it fills up
        self.pages = torch.full((sequences + 1, self.width), pool.count, dtype=torch.int32, device=device)
        self._flat = self.pages.view(-1)
        self._changes: dict[int, _Change] = {}
        """By how many entries they change, a power of two."""
        self._sent: dict[int, tuple[int, list[int]]] = {}  # sequence -> row, pages there; least recently used first
        self._free = list(range(sequences))
        self._last: tuple[int, list[int], list[int]] = -1, [], []
        """Of the last call: `PagePool.changes`, the sequences and their rows."""

    def table_ids(self, seq_ids: Seq[int]) -> list[int]:
        """Each sequence's row of `pages`, its table up to date once what is launched next runs.

        OutriderError where there are more sequences than rows: two of them would share one.
        """
        if len(seq_ids) > self.spare:
            raise OutriderError(f"{len(seq_ids)} sequences in one pass; the block tables hold {self.spare}")
        changes, ids, rows = self._last
        if changes == self.pool.changes and ids == seq_ids:  # a draft and its pass, or no text has grown by a page
            return [*rows]
        self._last = -1, [], []  # whatever interrupts the rest
        rows = self._send_changes(seq_ids)
        self._last = self.pool.changes, [*seq_ids], rows
        return [*rows]

    def _send_changes(self, seq_ids: Seq[int]) -> list[int]:
        """Bring the tables of these sequences up to date; returns their rows."""
        rows: list[int] = []
        places: list[int] = []
        pages: list[int] = []
        for seq_id in seq_ids:
            row, sent = self._sent.pop(seq_id, None) or (self._free_row(), [])
            table = self.pool.table(seq_id)
            if sent[: len(table)] != table:
                grown = table[: len(sent)] == sent  # as nearly always
                changed = range(len(sent), len(table)) if grown else _differing(table, sent)
                places += [row * self.width + i for i in changed]
                pages += [table[i] for i in changed]
                sent = [*table, *sent[len(table) :]]
            self._sent[seq_id] = row, sent  # again at the end: the last used
            rows.append(row)
        if places:
            self._send(places, pages)
        return rows

    @torch.inference_mode()
    def _send(self, places: list[int], pages: list[int]) -> None:
        """Write these pages to these places of the tables."""
        size = 1 << (len(places) - 1).bit_length()
        if size not in self._changes:
            self._changes[size] = _Change(size, self.device)
        change = self._changes[size]
        change.send(places, pages)
        self._flat.index_copy_(0, change.places, change.pages)

    def _free_row(self) -> int:
        """A free row, or that of the least recently used sequence."""
        return self._free.pop() if self._free else self._sent.pop(next(iter(self._sent)))[0]


class _Change:
    """Entries of the tables on their way to the device, in memory that is used again."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._inputs = size, PinnedInputs(2 * size, device)
        self.places = self._inputs.ints[:size]
        self.pages = self._inputs.ints[size:].view(torch.int32)[::2]  # the lower half of each
        """int32 [size]: what is written at those places."""

    def send(self, places: list[int], pages: list[int]) -> None:
        """Up to so many, which are not waited for: the last one is written again where there are fewer."""
        array, more = self._inputs.array(), self._size - len(places)
        array[: self._size] = [*places, *places[-1:] * more]
        array[self._size :] = [*pages, *pages[-1:] * more]
        self._inputs.send()


def _differing(table: list[int], sent: list[int]) -> list[int]:
    """The places of a table whose pages are not those that were sent."""
    return [i for i, page in enumerate(table) if i >= len(sent) or sent[i] != page]
