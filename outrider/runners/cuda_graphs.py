"""What captured work shares: the shapes it is captured for, its inputs, and the capture itself."""

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
"""Rows that passes have room for unless `capture` asks for more."""
MAX_ROWS = 1024
"""Max rows that they get room for; more rows are scored in several passes."""
PACKED_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, MAX_ROWS)
"""Rows of packed passes: fewer cost as much, since products are padded to 16, 32 or 64 rows."""
PROMPT_SIZES = (64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Rows of passes that read prompts; longer ones are not captured."""
MIN_PACKED_BATCH, MIN_PACKED_WIDTH = 4, 4
"""Smaller passes are hardly dearer padded."""
BLOCK_WIDTH, MAX_NARROW_BATCH = 8, 64
"""Packed passes are also captured for so narrow sequences, up to so many."""


class BatchShape(NamedTuple):
    """One size of pass: sequences, and max rows of each."""

    batch: int
    width: int
    outputs: int = 0
    """Columns of logits by a reduced head; 0: by the whole one."""
    packed: int = 0
    """Rows of all sequences together, one sequence after another; 0: `width` of each."""

    @property
    def rows(self) -> int:
        return self.packed or self.batch * self.width

    @property
    def places(self) -> int:
        """Of tokens: their number where every sequence has `width`."""
        return self.batch * self.width


def padded_batch(batch: int) -> int:
    """The captured batch size that takes so many sequences."""
    return 1 << (batch - 1).bit_length()


def padded_shape(batch: int, width: int) -> BatchShape:
    """The captured shape that takes so many sequences of so many rows."""
    return BatchShape(padded_batch(batch), next(w for w in WIDTHS if w >= width))


def capture_batches(batch: int) -> list[int]:
    """Every batch size that up to so many sequences need."""
    return [1 << i for i in range((min(batch, MAX_SEQUENCES) - 1).bit_length() + 1)]


def capture_shapes(batch: int, width: int, max_rows: int = MAX_ROWS) -> list[BatchShape]:
    """Every shape that passes of up to so many sequences and rows need, less those of more than `max_rows` in all.

    A span wider than any of them is a prompt being read, see graphed_prompt.py.
    """
    widest = padded_shape(1, min(width, WIDTHS[-1])).width
    return [BatchShape(b, w) for b in capture_batches(batch) for w in WIDTHS if w <= widest and b * w <= max_rows]


def packed_shapes(batch: int, width: int) -> list[BatchShape]:
    """Shapes for sequences of different widths, none wider than `width`: those of fewer rows than a uniform pass.

    In small batches also for none wider than a head's blocks: attention pays for the widest.
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
    """Every shape that a single short prompt needs beyond those of decoding sequences of up to `width` rows."""
    return [BatchShape(1, w) for w in WIDTHS if w > padded_shape(1, min(width, WIDTHS[-1])).width]


def split_round(widths: Seq[int], max_decode: int, *, pinned: bool) -> list[tuple[list[int], bool]]:
    """How spans of so many rows are divided between passes: the spans of each, and whether it is of a captured shape.

    Spans of up to `max_decode` rows share a captured pass, the last one. A single short prompt has one of its own;
    other prompts share one that is not of these shapes. pinned: every span must be captured, so each short prompt has a
    pass of its own.
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
    """A graph of `work`, which is run twice before: kernels are compiled and libraries warmed up then.

    name: says what is captured, where that is counted after start-up.
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
    """Copy rows that are on the device into out [sequences, columns]: each (row, first column, numbers).

    One copy for each run that lies side by side in a block and in out; shorter rows of it get what follows them there.
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
