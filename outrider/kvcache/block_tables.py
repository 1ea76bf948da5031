"""The sequences' block tables on the device: a row each, of which only what changed is sent."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.core.errors import OutriderError
from outrider.kvcache.pages import PagePool


class BlockTables:
    """Table rows for the sequences of a pass. A sequence keeps its row until another needs it."""

    def __init__(self, pool: PagePool, sequences: int, context: int, device: torch.device) -> None:
        """context: max tokens of one sequence; sequences: max sequences of one pass."""
        self.pool, self.spare, self.device = pool, sequences, device
        """`spare` is a row whose every page is the scratch page, for rows that only fill up."""
        self.width = -(-context // pool.size) + 4  # a pass may be wider than the text it fills up
        self.pages = torch.full((sequences + 1, self.width), pool.count, dtype=torch.int32, device=device)
        self._sent: dict[int, tuple[int, list[int]]] = {}  # sequence -> row, pages there; least recently used first
        self._free = list(range(sequences))

    def table_ids(self, seq_ids: Seq[int]) -> list[int]:
        """Each sequence's row of `pages`, its table up to date once what is launched next runs.

        OutriderError where there are more sequences than rows: two of them would share one.
        """
        if len(seq_ids) > self.spare:
            raise OutriderError(f"{len(seq_ids)} sequences in one pass; the block tables hold {self.spare}")
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
        change = torch.tensor([places, pages], dtype=torch.int64)
        if self.device.type == "cuda":
            change = change.pin_memory().to(self.device, non_blocking=True)
        self.pages.view(-1).index_copy_(0, change[0], change[1].to(torch.int32))

    def _free_row(self) -> int:
        """A free row, or that of the least recently used sequence."""
        return self._free.pop() if self._free else self._sent.pop(next(iter(self._sent)))[0]


def _differing(table: list[int], sent: list[int]) -> list[int]:
    """The places of a table whose pages are not those that were sent."""
    return [i for i, page in enumerate(table) if i >= len(sent) or sent[i] != page]
