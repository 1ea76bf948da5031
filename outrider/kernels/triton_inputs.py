"""What only the device knows of a pass's inputs, in Triton: where a round in flight leaves its texts, and drafts.

The first launch of a captured pass reads both where they are, by addresses that came with the other inputs: nothing is
launched or copied for them besides.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import MAX_WIDTH

HEADER, SOURCES = 3, 4
"""int64 numbers of a pass, and of each sequence; see `write_state` and `write_draft`."""
_ROW, _DRAFT, _COLUMN, _COUNT = (tl.constexpr(i) for i in range(SOURCES))
_LENGTHS, _LAST, _READS = (tl.constexpr(i) for i in range(HEADER))


@triton.jit(
    do_not_specialize=["width", "max_id"], do_not_specialize_on_alignment=["ids", "starts", "header", "sources"]
)
def _fetch(ids, starts, header, sources, width, max_id, FIELDS: tl.constexpr, WIDTH: tl.constexpr):
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


def write_state(
    header: np.ndarray, sources: np.ndarray, lengths: Tensor, last: Tensor, reads: int, rows: Seq[int]
) -> None:
    """Say that sequence b begins where a state has the one of row rows[b]; it reads the last 1 or 2 tokens of its text.

    header int64 [HEADER], sources int64 [sequences, SOURCES]. lengths int64 [B] and last int64 [B, 2], contiguous, are
    not freed before the pass is launched; nor are drafts. A negative row: the inputs have the sequence already.
    """
    header[:] = lengths.data_ptr(), last.data_ptr(), reads
    sources[: len(rows), 0] = rows
    sources[: len(rows), 0] += 1


def write_draft(source: np.ndarray, address: int, column: int, count: int) -> None:
    """Say that a sequence, source int64 [SOURCES], has `count` tokens int64 at its places from `column` on."""
    source[1:] = address, column, count


def fetch_inputs(ids: Tensor, starts: Tensor, header: Tensor, sources: Tensor, max_id: int) -> None:
    """Complete ids int64 [B, W] and starts int64 [B] by what `write_state` and `write_draft` said.

    max_id: larger tokens of a state are read as this one.
    """
    batch, width = ids.shape
    _fetch[(batch,)](ids, starts, header, sources, width, max_id, FIELDS=SOURCES, WIDTH=MAX_WIDTH, num_warps=1)
