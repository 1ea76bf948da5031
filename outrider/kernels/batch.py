"""The data that the kernels of one pass share, as plain tensors: no Triton, so that code for any device may use it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

MAX_SEQUENCES = 256
"""Max sequences of one pass."""
MAX_WIDTH = 32
"""Max rows of one sequence in a pass: its last token and its draft."""

MAX_DIRECT_PROGRAMS = 192
"""Max programs of the attention kernel for few rows, splits not counted."""


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the rows of B sequences lie among the N rows of a pass: sequence after sequence."""

    width: int
    """Max rows of one sequence. Tensors with a value per row are padded to this number: row w of sequence b is at place
    b * width + w."""
    offsets: Tensor  # [B] int64: the first row of each sequence
    row_index: Tensor  # [N] int64: the place of each row; -1: padding, whose values nobody reads


@cache
def uniform_rows(batch: int, width: int, device: torch.device) -> PackedRows:
    """`width` rows for each sequence, including those that are not real: row i is at place i."""
    rows = torch.arange(batch * width, device=device)
    return PackedRows(width, rows[::width].contiguous(), rows)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """What each row of a pass attends to: B sequences of at most `width` rows each, at P = B * width places."""

    block_tables: Tensor  # [tables, pages] int32: the pages of every sequence, in text order
    table_ids: Tensor  # [B] int64: each sequence's row of `block_tables`
    starts: Tensor  # [B] int64: tokens cached before the pass
    # [B] int64: the number of real rows of each sequence; the rest are padding. More than `width` where an earlier pass
    # wrote the first rows of a tree: the rows of this pass are then the last ones of the tree, and the bits of
    # ancestors count from its first row
    widths: Tensor
    ancestors: Tensor  # [P] int64: bit j of row w is set where it sees row j of its sequence
    depths: Tensor  # [P] int64: a row's position less `starts`
    packing: PackedRows
    splits: int
    """Max programs that a sequence's keys are split between."""
    rows_per_program: int = 0
    """Rows of a sequence in one program; 0: chosen by the number of programs. The GPU multiplies small and large tiles
    by different instructions, whose sums may differ in the last bit (seen on an H200 in 4 of a million numbers): only
    where this number is fixed do a row's bits not depend on the other rows of the batch."""
    chunk: int = 0
    """Keys of one program before a sequence is split further; 0: every sequence is split into `splits` parts, so that
    the split of a row's sum does not depend on the other rows."""

    @property
    def width(self) -> int:
        return self.packing.width


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where the key and value of each of N rows go, and its rotation."""

    slots: Tensor  # [N] int64: the slot of its key and value in the cache
    cos_sin: Tensor  # [N, D/2, 2] float32: cosine and sine of its position for each pair of dimensions

    @staticmethod
    def empty(rows: int, dim: int, device: torch.device) -> RowPlaces:
        """Uninitialized; `locate_rows` fills it in."""
        slots = torch.empty(rows, dtype=torch.int64, device=device)
        return RowPlaces(slots, torch.empty(rows, dim // 2, 2, dtype=torch.float32, device=device))

    def first(self, rows: int) -> RowPlaces:
        """A view of the first rows."""
        return RowPlaces(self.slots[:rows], self.cos_sin[:rows])


class AttentionWorkspace:
    """Room for the partial sums of a pass whose rows times splits are at most `row_splits`."""

    def __init__(self, row_splits: int, heads: int, dim: int, device: torch.device) -> None:
        self.parts = torch.empty(row_splits * heads * dim, dtype=torch.float32, device=device)
        self.peaks = torch.empty(row_splits * heads, dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.peaks)
        self.counters = torch.zeros(MAX_DIRECT_PROGRAMS, dtype=torch.int32, device=device)
        """The splits stored so far by the programs of the kernel for few rows; 0 between its launches."""
