"""What all captured work shares: its shapes, the capture itself, and copies of rows on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.core.device_row import DeviceRow
from outrider.kernels.batch import MAX_SEQUENCES, MAX_WIDTH
from outrider.runners.compile_counter import COUNTER

WIDTHS = (1, 2, 4, 6, 8, 12, 16, MAX_WIDTH)
MIN_ROWS = 256
"""Max rows of a pass unless `capture` asks for more: buffers are allocated for so many."""
MAX_ROWS = 1024
"""Max rows that buffers are allocated for; more rows are scored in several passes."""
PACKED_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, MAX_ROWS)
"""Rows of packed passes. Finer steps would save nothing, since products are padded to 16, 32 or 64 rows."""
PROMPT_SIZES = (64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Rows of captured passes that read prompts; longer prompts are read by passes that are not captured."""
MIN_PACKED_BATCH, MIN_PACKED_WIDTH = 4, 4
"""Passes of fewer sequences or rows of each are not packed: padding adds little to their cost."""
BLOCK_WIDTH, MAX_NARROW_BATCH = 8, 64
"""Packed passes are also captured for at most MAX_NARROW_BATCH sequences of at most BLOCK_WIDTH rows."""


class BatchShape(NamedTuple):
    """One shape of pass: sequences, and max rows of each."""

    batch: int
    width: int
    outputs: int = 0
    """Columns of the logits, by a reduced head; 0: by the whole head."""
    packed: int = 0
    """Rows of all sequences together, each sequence's behind those of the one before; 0: `width` rows of each."""

    @property
    def rows(self) -> int:
        return self.packed or self.batch * self.width

    @property
    def places(self) -> int:
        """The number of token places in the inputs: `width` for every sequence."""
        return self.batch * self.width


def padded_batch(batch: int) -> int:
    """The smallest captured batch size for `batch` sequences: a power of two."""
    return 1 << (batch - 1).bit_length()


def padded_shape(batch: int, width: int) -> BatchShape:
    """The smallest captured uniform shape for `batch` sequences of `width` rows."""
    return BatchShape(padded_batch(batch), next(w for w in WIDTHS if w >= width))


def capture_batches(batch: int) -> list[int]:
    """Every batch size to capture for up to `batch` sequences."""
    return [1 << i for i in range((min(batch, MAX_SEQUENCES) - 1).bit_length() + 1)]


def capture_shapes(batch: int, width: int, max_rows: int = MAX_ROWS) -> list[BatchShape]:
    """Every uniform shape to capture for up to `batch` sequences of up to `width` rows, at most `max_rows` rows in all.

    A span wider than any of them is a prompt being read, see graphed_prompt.py.
    """
    widest = padded_shape(1, min(width, WIDTHS[-1])).width
    return [BatchShape(b, w) for b in capture_batches(batch) for w in WIDTHS if w <= widest and b * w <= max_rows]


def packed_shapes(batch: int, width: int) -> list[BatchShape]:
    """Packed shapes to capture, for sequences of different widths up to `width`: of fewer rows than a uniform pass.

    Smaller batches also get shapes as narrow as a head's blocks, since attention costs as much as the widest sequence.
    """
    widest = padded_shape(1, min(width, WIDTHS[-1])).width
    return [
        BatchShape(b, w, packed=rows)
        for w in sorted({min(BLOCK_WIDTH, widest), widest})
        for b in capture_batches(batch if w == widest else min(batch, MAX_NARROW_BATCH))
        for rows in PACKED_ROWS
        if b >= MIN_PACKED_BATCH and w >= MIN_PACKED_WIDTH and b < rows < b * w
    ]


def prompt_shapes(width: int) -> list[BatchShape]:
    """Every shape to capture for a single short prompt, beyond those for decoding sequences of up to `width` rows."""
    return [BatchShape(1, w) for w in WIDTHS if w > padded_shape(1, min(width, WIDTHS[-1])).width]


def split_round(widths: Seq[int], max_decode: int, *, pinned: bool) -> list[tuple[list[int], bool]]:
    """Divide spans of these widths between passes: the spans of each pass, and whether its shape is a captured one.

    Spans of up to `max_decode` rows share the last pass, a captured one. A single short prompt has a captured pass of
    its own; other prompts share a pass that has none of these shapes. pinned: every span must be in a captured pass, so
    each short prompt has one of its own.
    """
    decoding = [i for i, width in enumerate(widths) if width <= max_decode]
    prompts = [i for i, width in enumerate(widths) if width > max_decode]
    alone = pinned or (len(prompts) == 1 and widths[prompts[0]] <= WIDTHS[-1])
    groups = [([i], True) for i in prompts] if alone else [(prompts, False)]
    return [group for group in (*groups, (decoding, True)) if group[0]]


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The one stream of warm-ups: libraries keep a workspace of tens of megabytes for every stream they have seen."""
    return torch.cuda.Stream(device)


def capture(work: Callable[[], None], pool: Any, name: str = "a pass") -> torch.cuda.CUDAGraph:
    """Capture `work` as a CUDA graph. It is run twice before, so that kernels are compiled and libraries warmed up.

    name: what is captured, for the count of captures after start-up.
    """
    COUNTER.note(f"capture of {name}")
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # an old graph freed while another is captured would spoil it
    try:
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            work()
    finally:
        gc.enable()
    return graph


def copy_rows(out: Tensor, rows: list[tuple[int, int, DeviceRow]]) -> None:
    """Copy rows that are on the device into out [sequences, columns]. rows: each (row, first column, numbers).

    One copy for each run of rows that are adjacent in a block and in `out`. Rows shorter than the longest of a run are
    followed by the numbers behind them in the block.
    """
    begin = 0
    for end in range(1, len(rows) + 1):
        if end < len(rows) and _side_by_side(rows[end - 1], rows[end]):
            continue
        (row, column, first), count = rows[begin], end - begin
        length = max(len(numbers) for _, _, numbers in rows[begin:end])
        source = first.block.tokens[first.row : first.row + count, :length]
        out[row : row + count, column : column + length].copy_(source)
        begin = end


def _side_by_side(one: tuple[int, int, DeviceRow], other: tuple[int, int, DeviceRow]) -> bool:
    (row, column, numbers), (next_row, next_column, following) = one, other
    near = (next_row, next_column) == (row + 1, column)
    return near and following.block is numbers.block and following.row == numbers.row + 1
