"""The texts' page tables on the device: a row each, of which only what changed is sent."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider.kvcache.pages import PagePool


class BlockTables:
    """Seats for the texts of a pass. A text keeps its seat until another needs it."""

    def __init__(self, pool: PagePool, seats: int, context: int, device: torch.device) -> None:
        """context: most tokens of one text; seats: most texts of one pass."""
        self.pool, self.spare, self.device = pool, seats, device
        """`spare` is a seat whose every page is the scratch page, for rows that only fill up."""
        self.width = -(-context // pool.size) + 4  # a pass may be wider than the text it fills up
        self.pages = torch.full((seats + 1, self.width), pool.count, dtype=torch.int32, device=device)
        self._sent: dict[int, tuple[int, list[int]]] = {}  # text -> seat, pages there; least used first
        self._free = list(range(seats))

    def seat(self, seq_ids: Iterable[int]) -> list[int]:
        """A seat for each text, its table up to date once what is launched next runs."""
        seats: list[int] = []
        places: list[int] = []
        pages: list[int] = []
        for seq_id in seq_ids:
            seat, sent = self._sent.pop(seq_id, None) or (self._vacate(), [])
            table = self.pool.table(seq_id)
            if sent[: len(table)] != table:
                changed = [i for i, page in enumerate(table) if i >= len(sent) or sent[i] != page]
                places += [seat * self.width + i for i in changed]
                pages += [table[i] for i in changed]
                sent = [*table, *sent[len(table) :]]
            self._sent[seq_id] = seat, sent  # again at the end: the last used
            seats.append(seat)
        if places:
            change = torch.tensor([places, pages], dtype=torch.int64).pin_memory().to(self.device, non_blocking=True)
            self.pages.view(-1).index_copy_(0, change[0], change[1].to(torch.int32))
        return seats

    def _vacate(self) -> int:
        """A free seat, or that of the text that was longest in no pass."""
        return self._free.pop() if self._free else self._sent.pop(next(iter(self._sent)))[0]
