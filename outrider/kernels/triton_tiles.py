"""The tiles of the linear kernels for products of a few rows: chosen by shape alone, from measurements."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import triton

MAX_LINEAR_ROWS = 64
"""Max rows of a product."""
PADDED_ROWS = (16, 32, 64)
"""Numbers that rows are padded to."""
SMALL_ROWS = (1, 8, 16)
"""The same for products with small matrices."""
MAX_SMALL_BYTES = 4 << 20
"""Max size of a small matrix."""
MAX_K_SPLITS = 4
"""Max splits of a product with MAX_SPLIT_OUTPUTS outputs; with fewer outputs there may be more, up to the same number
of parts."""
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
    """Blocks of weights loaded before the wait for the input. The bits do not depend on it."""
    by_warps: bool = False
    """Inputs are split between the warps of a program (triton_small_linear.py): `inputs` are those of one warp,
    `splits` is 1 and `ahead` at least 1."""
    rows: int = 0
    """Rows of a program where operands go straight to the tensor cores (triton_direct_linear.py); else 0. `inputs` are
    16, 32 or 64, those of one warp; `splits` and `stages` are 1."""


Product = tuple[int, int, bool, int]
"""Outputs, inputs, gated, and the number that rows are padded to."""
_SMALL_TILES: dict[Product, Tile | None] = {
    (960, 576, False, 1): Tile(8, 1024, 1, 4, 1, 1),
    (960, 576, False, 8): Tile(16, 64, 1, 4, 3, 3, by_warps=True),
    (960, 576, False, 16): Tile(8, 64, 1, 8, 3, 2, by_warps=True),
    (576, 576, False, 1): Tile(2, 1024, 1, 2, 1, 1),
    (576, 576, False, 8): Tile(8, 64, 1, 2, 3, 5, by_warps=True),
    (576, 576, False, 16): Tile(32, 64, 1, 2, 3, 3, by_warps=True),
    (1536, 576, True, 8): Tile(8, 128, 1, 2, 3, 3, by_warps=True),
    (1536, 576, True, 16): Tile(8, 64, 1, 2, 3, 5, by_warps=True),
    (576, 1536, False, 1): Tile(2, 512, 1, 2, 1, 3),
    (576, 1536, False, 8): Tile(16, 64, 1, 8, 3, 3, by_warps=True),
    (576, 1536, False, 16): Tile(16, 64, 1, 4, 3, 4, by_warps=True),
    (49152, 576, False, 1): Tile(8, 1024, 1, 4, 1, 1),
    (1152, 896, False, 1): Tile(4, 512, 1, 2, 1, 2),
    (4864, 896, True, 1): Tile(8, 128, 1, 4, 1, 7),
    (1152, 896, False, 16): Tile(16, 64, 1, 4, 3, 4, by_warps=True),
    (896, 896, False, 8): Tile(16, 64, 1, 4, 3, 4, by_warps=True),
    (896, 896, False, 16): Tile(16, 64, 1, 4, 3, 4, by_warps=True),
    (896, 4864, False, 8): Tile(16, 64, 1, 8, 3, 4, by_warps=True),
    (2048, 1536, False, 1): Tile(8, 512, 1, 4, 1, 3),
    (2048, 1536, False, 8): Tile(8, 64, 1, 8, 3, 3, by_warps=True),
}
"""Rows padded to one of SMALL_ROWS. None: the kernels in triton_linear.py are faster; one row's tile may be of either
kernel. Measured on an H200 by `benchmarks/few_rows.py`, which prints lines for this table: the products of a pass of
SmolLM2-135M take 222 us for one row and 309 for six (279 and 384 by the rules below), of Qwen2.5-0.5B 168 and 205 (170
and 219). Others were measured later, in the whole captured pass with attention: SmolLM2's one row 377 to 353 us (QKV,
output, down), its 8 rows 506 to 490 (gate and up, down), its 16 rows 719 to 594; Qwen2.5-0.5B's one row 490 to 458
(QKV, gate and up); QKV of Qwen2.5-1.5B: see `one_row_tile`."""
_FEW_ROWS_TILES: dict[Product, Tile] = {  # rows padded to one of PADDED_ROWS
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
below. Kernels begin while others end, so that the best tile of one kernel depends on the tiles of the kernels around
it."""


def _direct(outputs: int, warps: int, rows: int = 8) -> Tile:
    return Tile(outputs, 64, 1, warps, 1, rows=rows)


_DIRECT_TILES: dict[Product, Tile | None] = {  # rows padded to 8 or one of PADDED_ROWS
    (960, 576, False, 8): _direct(16, 2),
    (960, 576, False, 16): _direct(32, 2),
    (960, 576, False, 32): _direct(32, 2),
    (960, 576, False, 64): _direct(32, 2),
    (576, 576, False, 8): _direct(32, 4),
    (576, 576, False, 16): _direct(32, 2),
    (576, 576, False, 32): _direct(16, 4),
    (576, 576, False, 64): _direct(32, 2),
    (1536, 576, True, 8): _direct(32, 4),
    (1536, 576, True, 16): _direct(16, 2),
    (1536, 576, True, 32): _direct(16, 2),
    (1536, 576, True, 64): _direct(16, 4, 16),
    (576, 1536, False, 8): _direct(16, 4),
    (576, 1536, False, 16): _direct(16, 4),
    (576, 1536, False, 32): _direct(32, 4),
    (576, 1536, False, 64): _direct(16, 4),
    (1152, 896, False, 8): _direct(32, 4),
    (1152, 896, False, 16): _direct(16, 4, 16),
    (896, 896, False, 8): _direct(32, 2),
    (896, 896, False, 16): _direct(32, 4, 16),
    (4864, 896, True, 8): _direct(32, 4),
    (896, 4864, False, 8): _direct(16, 8),
    (896, 4864, False, 16): _direct(16, 8, 16),
    (2048, 1536, False, 8): _direct(16, 4),
    (2048, 1536, False, 32): _direct(16, 4, 16),
}
"""None: other kernels are faster. Measured on an H200 in the whole captured pass: SmolLM2-135M's 8 rows take 363 us
(513 by the tiles above); Qwen2.5-0.5B's 8 rows 511 (632), 16 596 (690); Qwen2.5-1.5B's 8 rows 1232 (1260), 32 1543
(1607). SmolLM2's 16, 32 and 64 rows were measured again after attention became faster, in passes with attention over
300 tokens: 343, 409 and 523 us, where the tiles before took 367, 516 and 545; one row and 8 rows take 323."""


@lru_cache(maxsize=256)
def direct_tile(n: int, k: int, gated: bool, rows: int) -> Tile | None:
    """The tile whose operands go straight to the tensor cores; None where others are faster or weights do not fit.

    Each thread has all its weights in registers, 150 of them at most, so that more inputs need more warps.
    """
    padded = next((p for p in (8, *PADDED_ROWS) if p >= rows), 0)
    if (n, k, gated, padded) in _DIRECT_TILES:
        return _DIRECT_TILES[n, k, gated, padded]
    warps = next((w for w in (2, 4, 8) if k * (1 + gated) <= 640 * w), 0)
    if not padded or not warps or n % 16 or 2 * n * (1 + gated) * k > MAX_SMALL_BYTES:
        return None
    if (n, k, gated, 16) in _FEW_ROWS_TILES or (n, k, gated, padded) in _FEW_ROWS_TILES:  # measured
        return None
    return _direct(16, warps, 16 if padded == 64 else 8)


@lru_cache(maxsize=256)
def small_tile(n: int, k: int, gated: bool, rows: int) -> Tile | None:
    """The tile of up to 16 rows by the kernel for small matrices; None where others are faster.

    With 8 outputs a program the matrices of a layer of SmolLM2 have 120, 72, 192 and 72 programs; `few_rows_tile` gives
    15, 9, 24 and 36. A single row goes this way only where the table says so.
    """
    padded = next((p for p in SMALL_ROWS if p >= rows), 0)
    if (n, k, gated, padded) in _SMALL_TILES:
        return _SMALL_TILES[n, k, gated, padded]
    measured = (n, k, gated, 16) in _FEW_ROWS_TILES  # takes precedence over a computed tile
    if padded < 8 or measured or 2 * n * (1 + gated) * k > MAX_SMALL_BYTES:
        return None
    warps = 4 if k <= 1024 else 8
    return Tile(8, 64, 1, warps, 3, min(4, triton.cdiv(k, 64 * warps)), by_warps=True)


@lru_cache(maxsize=64)
def one_row_tile(n: int, k: int, gated: bool) -> Tile:
    """Measured on an H200: 0.97 of the read bandwidth over the layers of an 8B model.

    A pass of Qwen2.5-1.5B took 1136 us with one block before the wait and the residual loaded last; 1116 with gate and
    up in blocks of 512, all before the wait, by two warps; 1041 with the residual of down loaded first; 1036 with two
    blocks of down before the wait; 1011 with output and QKV in blocks of 512: 0.69 of the bandwidth. The LM head
    reaches all of it.
    """
    if k % 4096 == 0 and (gated or n <= 4096):
        return Tile(1 if gated else 4, 4096, 1, 8, 1, 1)
    if k >= 2048 and k % 2048 == 0:
        return Tile(1 if gated else 4, 2048, 1, 8, 1, 1)
    if k > 2048:
        return Tile(2, 2048, 1, 8, 1, 2) if k > 4096 and not gated else Tile(1 if gated else 2, 1024, 1, 4, 1, 1)
    block = triton.next_power_of_2(k)
    if n > 65536 and not gated:
        return Tile(2 if block > 1024 else 4, min(1024, block), 1, 4, 1, 1)
    if k == 1536:
        return Tile(1 if gated else 4, 512, 1, 2, 1, 3)
    if gated:  # few outputs per program mean too many programs to start
        return Tile(4, 512 if block > 1024 else block, 1, 4, 1, 1)
    return Tile(2, block, 1, 4, 1, 1)  # all weights are loaded before the wait for the input


@lru_cache(maxsize=256)
def few_rows_tile(n: int, k: int, gated: bool, rows: int) -> Tile | None:
    """None where the inputs do not divide into equal blocks. rows: one of PADDED_ROWS.

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
    """The number that `rows` rows are padded to."""
    return next(p for p in PADDED_ROWS if p >= rows)


def supports_linear(n: int, k: int, rows: int, gated: bool) -> bool:
    """Whether `linear` supports a product of this shape."""
    return rows == 1 or (rows <= MAX_LINEAR_ROWS and few_rows_tile(n, k, gated, padded_rows(rows)) is not None)
