"""Prefill attention over the paged cache, in Triton.

One program computes up to QUERY_TILE rows of one sequence and one query head over the keys they see. Rows are
consecutive tokens: no trees. `attend_block` is the plain reference.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton_attention import KEY_BLOCK, NO_WINDOW, attention_scores, load_keys_values, online_softmax

QUERY_TILE = 128  # rows of one program


@triton.jit(do_not_specialize=["skip", "pages"])
def _attend_prompt(
    q, keys, values, block_tables, tiles, out, scale, softcap, window, skip, pages,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr,
):  # fmt: skip
    """tiles[t] = (row of the block tables, position of the first row, first row, rows)."""
    tile = tiles + tl.program_id(0) * 4
    h = tl.program_id(1)
    g = h // (HEADS // KV)
    table = block_tables + tl.load(tile) * pages
    start = tl.load(tile + 1)
    first = tl.load(tile + 2)
    count = tl.load(tile + 3)
    r = tl.arange(0, TILE)
    d = tl.arange(0, DIM)
    real = (r < count)[:, None]
    at = ((first + r) * HEADS + h)[:, None] * DIM + d[None, :]
    qt = tl.load(q + at, mask=real, other=0.0)
    own = start + r
    end = start + count
    peak = tl.full((TILE,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((TILE,), dtype=tl.float32)
    acc = tl.zeros((TILE, DIM), dtype=tl.float32)
    begin = tl.full((), 0, dtype=tl.int64)
    if WINDOWED:
        begin = tl.maximum(start - window + 1, 0) // BLOCK * BLOCK
    for block in range(begin, end, BLOCK):
        p = block + tl.arange(0, BLOCK)
        kt, vt = load_keys_values(keys, values, table, p, 0, end, g, KV, DIM, PAGE)
        s = attention_scores(qt, kt, scale, softcap, CAPPED)  # [TILE, BLOCK]
        seen = p[None, :] <= own[:, None]
        if WINDOWED:
            seen = seen & (p[None, :] > own[:, None] - window) & ((p >= skip)[None, :] | (p[None, :] == own[:, None]))
        s = tl.where(seen, s, float("-inf"))
        peak, total, acc = online_softmax(s, vt, peak, total, acc)
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)


def prompt_tiles(table_id: int, start: int, first: int, rows: int) -> list[tuple[int, int, int, int]]:
    """One sequence's tiles: `rows` rows of the pass from row `first` on, the first at position `start`."""
    return [(table_id, start + i, first + i, min(QUERY_TILE, rows - i)) for i in range(0, rows, QUERY_TILE)]


def attend_prompt(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    skip: int = 0,
    page: int = 16,
) -> None:
    """q [N, H, D] over cached keys and values [slots, KV, D] -> out [N, H, D], all contiguous.

    block_tables int32 [tables, pages]; tiles int64 [T, 4], see `prompt_tiles`.
    """
    _, heads, dim = q.shape
    window = window or (skip and NO_WINDOW)
    _attend_prompt[(len(tiles), heads)](
        q, keys, values, block_tables, tiles, out, scale, softcap, window, skip, block_tables.shape[1],
        heads, keys.shape[1], dim, page, QUERY_TILE, KEY_BLOCK, softcap > 0, window > 0, num_warps=8, num_stages=3,
    )  # fmt: skip
