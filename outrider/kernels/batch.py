"""What the kernels of one pass share: who attends to what, where rows stand, and room for partial sums.

Plain tensors, without Triton: code for any device uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_SEQUENCES = 256
"""Sequences of one pass."""
MAX_WIDTH = 32
"""Rows of one sequence in a pass: its last token and the draft."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Who attends to what: B sequences of `width` rows each, N = B * width."""

    block_tables: Tensor  # [all seats, pages] int32: the pages of every text
    table_ids: Tensor  # [B] int64: each sequence's row of `block_tables`
    starts: Tensor  # [B] int64: text in the cache
    widths: Tensor  # [B] int64: how many of a sequence's rows are real; the rest fill up
    ancestors: Tensor  # [N] int64: bit j of row w set where it sees row j
    depths: Tensor  # [N] int64: position less start
    width: int
    splits: int
    """Between how many programs a sequence's keys are split at most."""
    rows_per_program: int = 0
    """Rows of a sequence one program takes; 0: all. The chip multiplies small and large tiles by different
    instructions, whose sums may differ in the last bit (seen on an H200 in 4 of a million numbers): a row has the
    same bits in any company only where this is the same."""
    chunk: int = 0
    """Keys a program takes before a text is split any further; 0: every text is split as far as it goes, so that
    how a row's sum is split does not depend on the rows beside it."""


@dataclass(frozen=True, slots=True)
class RowPlaces:
    """Where each of N rows stands and goes."""

    slots: Tensor  # [N] int64: the cache's slot that takes its key and value
    cos_sin: Tensor  # [N, D/2, 2] float32: cosine and sine of its position, for each pair of dimensions

    @staticmethod
    def empty(rows: int, dim: int, device: torch.device) -> RowPlaces:
        """Not yet filled in."""
        slots = torch.empty(rows, dtype=torch.int64, device=device)
        return RowPlaces(slots, torch.empty(rows, dim // 2, 2, dtype=torch.float32, device=device))

    def first(self, rows: int) -> RowPlaces:
        """The same room, for so many rows."""
        return RowPlaces(self.slots[:rows], self.cos_sin[:rows])


class AttentionWorkspace:
    """Partial sums of passes whose rows times splits are at most `most`."""

    def __init__(self, most: int, heads: int, dim: int, device: torch.device) -> None:
        self.parts = torch.empty(most * heads * dim, dtype=torch.float32, device=device)
        self.peaks = torch.empty(most * heads, dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.peaks)
