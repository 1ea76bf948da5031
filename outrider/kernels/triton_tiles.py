"""How the linear kernels tile a product of a few rows: by shape alone, from measurements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton

MAX_LINEAR_ROWS = 64
"""Max rows of a product."""
PADDED_ROWS = (16, 32, 64)
"""Numbers that rows are padded to."""
MAX_K_SPLITS = 4
"""Max splits of a product of MAX_SPLIT_OUTPUTS; of fewer outputs, as many more as give no more parts."""
MAX_SPLIT_OUTPUTS = 8192
"""Max outputs of a split product; more fill the GPU without splits."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program. Chosen by shape alone, so that the same rows give the same bits."""

    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int
    ahead: int = 0
    """Blocks of weights loaded before the wait for the input: 0 to 4. The bits do not depend on it."""


_FEW_ROWS_TILES = {  # by outputs, inputs, gated and padded rows
    (896, 896, False, 16): Tile(64, 128, 7, 4, 3, 1),
    (8960, 1536, True, 16): Tile(64, 64, 1, 4, 5),
    (1536, 8960, False, 16): Tile(64, 128, 7, 4, 4, 1),
    (1152, 896, False, 32): Tile(64, 32, 4, 4, 5, 1),
    (2048, 1536, False, 32): Tile(64, 128, 4, 4, 3, 1),
    (8960, 1536, True, 32): Tile(64, 64, 1, 4, 4),
    (1536, 8960, False, 32): Tile(64, 128, 7, 4, 4, 1),
    (4864, 896, True, 64): Tile(64, 128, 1, 8, 4),
    (8960, 1536, True, 64): Tile(64, 64, 1, 4, 4),
}
"""Found on an H200 for products of Qwen2.5's 0.5B and 1.5B, where they make a whole pass 4 to 13 % faster than the rule
below. Kernels begin while others end, so that the best tile of one depends on its neighbours'."""


@lru_cache(maxsize=64)
def one_row_tile(n: int, k: int, gated: bool) -> Tile:
    """Measured on an H200: 0.97 of the read bandwidth over the layers of an 8B model."""
    if k % 4096 == 0 and (gated or n <= 4096):
        return Tile(1 if gated else 4, 4096, 1, 8, 1)
    if k >= 2048 and k % 2048 == 0:
        return Tile(1 if gated else 4, 2048, 1, 8, 1)
    if k > 2048:
        return Tile(2, 2048, 1, 8, 1) if k > 4096 and not gated else Tile(1 if gated else 2, 1024, 1, 4, 1)
    block = triton.next_power_of_2(k)
    if gated:  # few outputs a program leave too many programs to start
        return Tile(4, 512 if block > 1024 else block, 1, 4, 1)
    if n > 65536:
        return Tile(2 if block > 1024 else 4, min(1024, block), 1, 4, 1)
    return Tile(2, block, 1, 4, 1)  # all weights are loaded before the wait for the input


@lru_cache(maxsize=256)
def few_rows_tile(n: int, k: int, gated: bool, rows: int) -> Tile | None:
    """None where the inputs do not divide into equal blocks. rows: one of PADDED.

    Measured on an H200 over the layers of an 8B model: 0.91 of the read bandwidth for 6 rows, 0.84 for 32.
    """
    known = _FEW_ROWS_TILES.get((n, k, gated, rows))
    if known is not None:
        return known
    block = next((b for b in (128, 64, 32) if k % b == 0), 0)
    if not block:
        return None
    if n > 65536:  # an LM head: enough outputs without splits
        return Tile(64, block, 1, 4, 4, 1) if rows <= 32 else Tile(128, min(block, 64), 1, 4, 4)
    tiles = -(-n // 64)
    max_splits = MAX_K_SPLITS if rows == 16 else 2
    splits = next(
        (s for s in (1, 2, 4) if gated or s == max_splits or tiles * s >= 90 or n > MAX_SPLIT_OUTPUTS), max_splits
    )
    while k % (block * splits):
        splits //= 2
    ahead = min(k // (block * splits) - 1, 0 if gated or rows == 64 else 1 if rows == 32 or splits > 1 else 4)
    return Tile(64, block, splits, 4, 4 if gated else 6 if rows == 16 else 5, ahead)


def padded_rows(rows: int) -> int:
    """The number that so many rows are padded to."""
    return next(p for p in PADDED_ROWS if p >= rows)


def supports_linear(n: int, k: int, rows: int, gated: bool) -> bool:
    """Whether `linear` supports a product of this shape."""
    return rows == 1 or (rows <= MAX_LINEAR_ROWS and few_rows_tile(n, k, gated, padded_rows(rows)) is not None)
