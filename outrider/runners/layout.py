"""From the spans of a round to one flat pass: ids, positions, slots, and what each row may see."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool


@dataclass(slots=True)
class KeyRange:
    """One span's rows in the flat pass, and where their keys lie.

    Keys come in text order for every row, whole pages at a time: `keys` is a slice of
    slots where the pages lie side by side, else slots to gather, [T] for a chain and
    [R, T] for a tree, where each row sees its own ancestors. Row r sees the
    first `limits[r]` of them; T is a multiple of the page size whatever the row, which
    is what makes a row's attention the same bits in any batch (see kernels/attention.py).
    """

    rows: slice
    keys: slice | Tensor
    limits: Tensor  # [R]
    length: int  # T
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])

    def mask(self, window: int, dtype: torch.dtype, skip: int = 0) -> Tensor:
        """[R, T]: 0 where a row may look, -inf elsewhere; window 0 looks all the way back.

        The first `skip` positions are seen by their own rows alone.
        """
        if (window, skip) not in self.masks:
            place = torch.arange(self.length, device=self.limits.device)
            seen = place < self.limits[:, None]
            if window:
                seen &= place >= self.limits[:, None] - window
            if skip:
                seen &= (place >= skip) | (place == self.limits[:, None] - 1)
            self.masks[window, skip] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
                ~seen, float("-inf")
            )
        return self.masks[window, skip]


@dataclass(slots=True)
class Layout:
    """A whole pass of N rows; logits are wanted after M of them."""

    ids: Tensor  # [N]
    positions: Tensor  # [N]
    slots: Tensor  # [N] where each row's key and value are written
    wanted: Tensor  # [M] rows
    rows: list[slice]
    """Each span's own rows."""


def lay_out(spans: Seq[Span], pool: PagePool, device: torch.device) -> Layout:
    """Lay the spans one after another. Draft node i is written to the i-th slot behind the text."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    wanted: list[int] = []
    rows: list[slice] = []
    size = pool.size
    for span in spans:
        first, table = len(ids), pool.table(span.seq_id)
        end = span.start + len(span.tokens)
        ids += span.tokens
        positions += range(span.start, end)
        if len(span.draft):
            ids += span.draft.tokens
            positions += [end - 1 + depth for depth in span.draft.depths()]
        slots += [table[p // size] * size + p % size for p in range(span.start, end + len(span.draft))]
        wanted += range(len(ids) - span.rows, len(ids))
        rows.append(slice(first, len(ids)))

    count = len(ids)
    flat = to_device([*ids, *positions, *slots, *wanted], device).split((count, count, count, len(wanted)))
    return Layout(flat[0], flat[1], flat[2], flat[3], rows)


def text_rows(spans: Seq[Span], pool: PagePool) -> NDArray[np.int64]:
    """Slots and positions of the spans' text, int64 [2, N], as `lay_out` has them: for passes that need no more."""
    size, column, at = pool.size, np.arange(pool.size), 0
    rows = np.empty((2, sum(len(span.tokens) for span in spans)), dtype=np.int64)
    for span in spans:
        count, (page, begin) = len(span.tokens), divmod(span.start, size)
        pages = np.array(pool.table(span.seq_id)[page : page + -(-(begin + count) // size)])
        rows[0, at : at + count] = (pages[:, None] * size + column).ravel()[begin : begin + count]
        rows[1, at : at + count] = np.arange(span.start, span.start + count)
        at += count
    return rows


def to_device(values: list[int], device: torch.device) -> Tensor:
    """int64 [len(values)] on a device; the copy is not waited for."""
    made = torch.tensor(values, dtype=torch.long)
    if device.type == "cpu":
        return made
    if device.type == "cuda":  # a copy of unpinned memory may wait for all launched work
        made = made.pin_memory()
    return made.to(device, non_blocking=True)


def key_ranges(spans: Seq[Span], layout: Layout, pool: PagePool, device: torch.device) -> list[KeyRange]:
    """What each span's rows may see, for the reference attention."""
    return [_key_range(span, rows, pool, device) for span, rows in zip(spans, layout.rows, strict=True)]


def _key_range(span: Span, rows: slice, pool: PagePool, device: torch.device) -> KeyRange:
    table, size, end = pool.table(span.seq_id), pool.size, span.start + len(span.tokens)
    positions = [*range(span.start, end), *(end - 1 + depth for depth in span.draft.depths())]
    pages = -(-(max(positions) + 1) // size)
    limits = torch.tensor(positions, dtype=torch.long, device=device) + 1
    if not span.draft.is_chain:
        return KeyRange(rows, torch.tensor(_ancestor_slots(span, pages, pool), device=device), limits, pages * size)
    table = table[:pages]
    if all(b - a == 1 for a, b in pairwise(table)):
        return KeyRange(rows, slice(table[0] * size, (table[-1] + 1) * size), limits, pages * size)
    starts = torch.tensor(table, dtype=torch.long, device=device) * size
    keys = (starts[:, None] + torch.arange(size, device=device)).flatten()
    return KeyRange(rows, keys, limits, pages * size)


def _ancestor_slots(span: Span, pages: int, pool: PagePool) -> list[list[int]]:
    """For each row of a tree, the slots of its text and ancestors in text order, then padding."""
    table, size = pool.table(span.seq_id), pool.size
    end = span.start + len(span.tokens)
    slots = [page * size + i for page in table for i in range(size)]
    text = slots[: pages * size]
    ways = [text for _ in span.tokens]
    for node in range(len(span.draft)):
        way = slots[:end] + [slots[end + n] for n in span.draft.path(node)]
        ways.append(way + slots[len(way) : pages * size])
    return ways
