"""Complete a pass's inputs by what only the device knows, in Triton: the state after a round in flight, and drafts.

The first kernel of a captured pass reads both where they are, by addresses that came with the other inputs: they need
no other launch and no copy. Where drafts share the rows of a packed pass, that kernel also decides where each row lies:
padding of drafts has no row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import MAX_WIDTH

HEADER, SOURCES = 4, 6
"""int64 fields of a pass's header and of each sequence's source; see `write_state`, `write_draft` and
`write_shared`."""
_ROW, _DRAFT, _COLUMN, _COUNT = (tl.constexpr(i) for i in range(4))
_LENGTHS, _LAST, _READS, _SHARED = (tl.constexpr(i) for i in range(HEADER))
_CHUNK = tl.constexpr(16)
"""Sequences whose draft tokens a program counts at a time."""


@triton.jit
def _count_rows(sources, widths, j, live, FIELDS: tl.constexpr, WIDTH: tl.constexpr):
    """For each sequence j: the rows of its text and its draft tokens that are not padding, two int64 numbers."""
    w = tl.arange(0, WIDTH)
    source = sources + j * FIELDS
    draft = tl.load(source + _DRAFT, mask=live, other=0)
    there = live & (draft != 0)
    count = tl.load(source + _COUNT, mask=there, other=0)
    tokens = draft.to(tl.pointer_type(tl.int64))[:, None] + w[None, :]
    drafted = tl.load(tokens, mask=w[None, :] < count[:, None], other=-1) >= 0
    text = tl.load(source + _COLUMN, mask=there, other=0) + tl.load(widths + j, mask=live & (draft == 0), other=0)
    return text, tl.sum(drafted.to(tl.int64), 1)


@triton.jit
def _pack(
    sources, widths, offsets, row_index, b, shared, batch, width, rows, FIELDS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store sequence b's width, first row and its rows' places; the last sequence's program also marks padding rows.

    All drafts together have at most `shared` rows; earlier sequences get theirs first, so that no row is beyond the
    pass.
    """
    texts = tl.full((), 0, dtype=tl.int64)
    drafted = tl.full((), 0, dtype=tl.int64)
    for first in range(0, b, _CHUNK):
        j = first + tl.arange(0, _CHUNK)
        text, own = _count_rows(sources, widths, j, j < b, FIELDS, WIDTH)
        texts += tl.sum(text, 0)
        drafted += tl.sum(own, 0)
    j = b + tl.arange(0, _CHUNK)
    text, own = _count_rows(sources, widths, j, j == b, FIELDS, WIDTH)
    before = tl.minimum(drafted, shared)
    offset = texts + before
    count = tl.sum(text, 0) + tl.minimum(drafted + tl.sum(own, 0), shared) - before
    w = tl.arange(0, WIDTH)
    tl.store(widths + b, count)
    tl.store(offsets + b, offset)
    tl.store(row_index + offset + w, b * width + w, mask=(w < count) & (offset + w < rows))
    if b == batch - 1:
        for first in range(0, rows, WIDTH):
            row = first + w
            tl.store(
                row_index + row, tl.full((WIDTH,), -1, dtype=tl.int64), mask=(row >= offset + count) & (row < rows)
            )


@triton.jit(
    do_not_specialize=["width", "max_id", "batch", "rows"],
    do_not_specialize_on_alignment=["ids", "starts", "header", "sources", "widths", "offsets", "row_index"],
)
def _fetch(
    ids, starts, header, sources, widths, offsets, row_index, width, max_id, batch, rows,
    FIELDS: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    row, source = ids + b * width, sources + b * FIELDS
    of = tl.load(source + _ROW) - 1
    if of >= 0:
        reads = tl.load(header + _READS)
        length = tl.load(tl.load(header + _LENGTHS).to(tl.pointer_type(tl.int64)) + of)
        last = tl.load(header + _LAST).to(tl.pointer_type(tl.int64)) + 2 * of + 2 - reads
        r = tl.arange(0, 2)
        tl.store(row + r, tl.minimum(tl.load(last + r, mask=r < reads, other=0), max_id), mask=r < reads)
        tl.store(starts + b, length - reads)
    draft = tl.load(source + _DRAFT)
    if draft != 0:
        w = tl.arange(0, WIDTH)
        there = w < tl.load(source + _COUNT)
        token = tl.load(draft.to(tl.pointer_type(tl.int64)) + w, mask=there, other=0)
        tl.store(row + tl.load(source + _COLUMN) + w, token, mask=there)
    if PACKED:
        shared = tl.load(header + _SHARED) - 1
        if shared >= 0:
            _pack(sources, widths, offsets, row_index, b, shared, batch, width, rows, FIELDS, WIDTH)


def write_state(
    header: np.ndarray, sources: np.ndarray, lengths: Tensor, last: Tensor, reads: int, rows: Seq[int]
) -> None:
    """Record that sequence b is in row rows[b] of a device state, and reads the last `reads` (1 or 2) tokens of it.

    header int64 [HEADER], sources int64 [sequences, SOURCES]. lengths int64 [B] and last int64 [B, 2], contiguous, must
    not be freed before the pass is launched; nor must drafts. A negative row: the inputs have the sequence already.
    """
    header[:3] = lengths.data_ptr(), last.data_ptr(), reads
    sources[: len(rows), 0] = rows
    sources[: len(rows), 0] += 1


def write_draft(source: np.ndarray, address: int, column: int, count: int) -> None:
    """Record that a sequence's draft is `count` int64 tokens at `address`, which go to its columns from `column` on.

    source int64 [SOURCES]: that of the sequence.
    """
    source[1:4] = address, column, count


def write_shared(header: np.ndarray, sources: np.ndarray, tokens: int, asked: Seq[int]) -> None:
    """Record that drafts share `tokens` rows of a packed pass; their tokens that are padding have no rows.

    asked: the number of rows of each sequence whose choices are wanted, even if the pass has fewer; see
    `accept_chains`.
    """
    header[3] = 1 + tokens
    places = np.cumsum(asked)
    sources[: len(asked), 4] = places - asked
    sources[: len(asked), 5] = asked


class Packing(NamedTuple):
    """The tensors that say where the rows of a packed pass lie, see `PackedRows`; all int64."""

    widths: Tensor  # [B]
    offsets: Tensor  # [B]
    row_index: Tensor  # [N]


def fetch_inputs(
    ids: Tensor, starts: Tensor, header: Tensor, sources: Tensor, max_id: int, packing: Packing | None = None
) -> None:
    """Complete ids int64 [B, W] and starts int64 [B] by what `write_state` and `write_draft` recorded.

    max_id: larger tokens of a state are read as this one. packing: of a packed pass; it is overwritten where
    `write_shared` recorded that drafts share rows; sequences without a draft keep their widths.
    """
    batch, width = ids.shape
    parts = (ids, ids, ids) if packing is None else packing
    _fetch[(batch,)](
        ids, starts, header, sources, *parts, width, max_id, batch, len(parts[2]),
        FIELDS=SOURCES, WIDTH=MAX_WIDTH, PACKED=packing is not None, num_warps=1,
    )  # fmt: skip
