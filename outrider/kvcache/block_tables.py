"""The block tables on the device, one row per sequence. Only entries that have changed are sent."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.core.errors import OutriderError
from outrider.core.pinned_inputs import PinnedInputs
from outrider.kvcache.pages import PagePool


class BlockTables:
    """Rows of the block table for the sequences of a pass. A sequence keeps its row until another sequence needs it."""

    def __init__(self, pool: PagePool, sequences: int, context: int, device: torch.device) -> None:
        """context: max tokens of one sequence; sequences: max sequences of one pass."""
        self.pool, self.spare, self.device = pool, sequences, device
        """`spare`: the row whose every page is the scratch page, for the padding of a pass."""
        self.width = -(-context // pool.size) + 4  # a pass may have rows beyond the end of the longest text
        self.pages = torch.full((sequences + 1, self.width), pool.count, dtype=torch.int32, device=device)
        self._flat = self.pages.view(-1)
        self._changes: dict[int, _Change] = {}
        """Reused transfer buffers, by the number of entries they hold: powers of two."""
        self._sent: dict[int, tuple[int, list[int]]] = {}  # sequence -> row, pages there; least recently used first
        self._free = list(range(sequences))
        self._last: tuple[int, list[int], list[int]] = -1, [], []
        """From the last call: `PagePool.changes`, the sequences and their rows."""

    def table_ids(self, seq_ids: Seq[int]) -> list[int]:
        """For each sequence its row of `pages`, whose table is up to date for any work that is launched next.

        Raises OutriderError where there are more sequences than rows, since two of them would share one.
        """
        if len(seq_ids) > self.spare:
            raise OutriderError(f"{len(seq_ids)} sequences in one pass; the block tables hold {self.spare}")
        changes, ids, rows = self._last
        if changes == self.pool.changes and ids == seq_ids:  # the pass behind a draft, or no text got a new page
            return [*rows]
        self._last = -1, [], []  # in case the rest is interrupted
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
                grown = table[: len(sent)] == sent  # nearly always so
                changed = range(len(sent), len(table)) if grown else _differing(table, sent)
                places += [row * self.width + i for i in changed]
                pages += [table[i] for i in changed]
                sent = [*table, *sent[len(table) :]]
            self._sent[seq_id] = row, sent  # moved to the end: used last
            rows.append(row)
        if places:
            self._send(places, pages)
        return rows

    @torch.inference_mode()
    def _send(self, places: list[int], pages: list[int]) -> None:
        """Write pages[i] at places[i] of the flattened tables."""
        size = 1 << (len(places) - 1).bit_length()
        if size not in self._changes:
            self._changes[size] = _Change(size, self.device)
        change = self._changes[size]
        change.send(places, pages)
        self._flat.index_copy_(0, change.places, change.pages)

    def _free_row(self) -> int:
        """A free row, or the row of the least recently used sequence, which loses it."""
        return self._free.pop() if self._free else self._sent.pop(next(iter(self._sent)))[0]


class _Change:
    """A transfer buffer for up to `size` changed entries of the tables, used again and again."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size, self._inputs = size, PinnedInputs(2 * size, device)
        self.places = self._inputs.ints[:size]
        self.pages = self._inputs.ints[size:].view(torch.int32)[::2]  # the lower half of each
        """int32 [size]: the pages that are written at `places`."""

    def send(self, places: list[int], pages: list[int]) -> None:
        """Send at most `size` entries, without waiting. The last entry is repeated to fill the buffer."""
        array, more = self._inputs.array(), self._size - len(places)
        array[: self._size] = [*places, *places[-1:] * more]
        array[self._size :] = [*pages, *pages[-1:] * more]
        self._inputs.send()


def _differing(table: list[int], sent: list[int]) -> list[int]:
    """The indices at which a table's page is not the one that was sent."""
    return [i for i, page in enumerate(table) if i >= len(sent) or sent[i] != page]
