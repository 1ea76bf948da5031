"""RoPE and the slots of a pass's rows in the paged cache, in Triton.

`locate_rows` looks up each row's slot and the cosines and sines of its position, once a pass. The linear layer of the
query, key and value heads then rotates and stores its own outputs (`linear_rope` in triton_linear.py).
`rotate_and_store` does the same to outputs already computed: for heads that are normed first, for many rows, and as
the reference. Dimensions are rotated in adjacent pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import AttentionBatch, RowPlaces

HEADS_PER_PROGRAM = 8  # heads that one program rotates


@triton.jit(
    do_not_specialize=["width", "pages", "scratch_slot"],
    do_not_specialize_on_alignment=["table_ids", "starts", "widths", "depths", "row_index"],
)
def _locate_row(
    block_tables, table_ids, starts, widths, depths, row_index, cos_sin, slots, row_cos_sin,
    width, pages, scratch_slot, DIM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    place = tl.load(row_index + row)
    padding = place < 0
    place = tl.where(padding, 0, place)
    b = place // width
    w = place % width
    start = tl.load(starts + b)
    position = start + w
    real = (w < tl.load(widths + b)) & (padding == 0)
    page = tl.load(block_tables + tl.load(table_ids + b) * pages + position // PAGE, mask=real, other=0)
    tl.store(slots + row, tl.where(real, page.to(tl.int64) * PAGE + position % PAGE, scratch_slot))
    d = tl.arange(0, DIM)
    tl.store(row_cos_sin + row * DIM + d, tl.load(cos_sin + (start + tl.load(depths + place)) * DIM + d))


@triton.jit
def load_cos_sin(cos_sin, r, j, live, DIM: tl.constexpr):
    """Cosines and sines of rows r for outputs j, in adjacent pairs: [rows, outputs]. live [rows, 1]."""
    return tl.load(cos_sin + r[:, None] * DIM + (j % DIM)[None, :], mask=live, other=0.0)


@triton.jit
def rope_and_store(
    x, rotation, r, j, slot, live, q, keys, values,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x [ROWS, WIDE], outputs j of rows r: queries and keys rotated, all stored.

    Queries go to q [N, H, D], keys and values to the row's slot. live [ROWS, 1]: rows that exist.
    """
    QUERIES: tl.constexpr = HEADS * DIM
    SLOT: tl.constexpr = KV * DIM
    a, b = tl.split(tl.reshape(x.to(tl.float32), (ROWS, COLUMNS // 2, 2)))
    c, s = tl.split(tl.reshape(rotation, (ROWS, COLUMNS // 2, 2)))
    # written as fma, so that every kernel rounds alike
    both = tl.join(tl.fma(a, c, -(b * s)), tl.fma(b, c, a * s))
    rotated = tl.reshape(both, (ROWS, COLUMNS))
    y = tl.where((j < QUERIES + SLOT)[None, :], rotated, x.to(tl.float32)).to(q.dtype.element_ty)
    tl.store(q + r[:, None].to(tl.int64) * QUERIES + j[None, :], y, mask=live & (j < QUERIES)[None, :])
    at = slot[:, None] * SLOT + (j - QUERIES)[None, :]
    tl.store(keys + at, y, mask=live & ((j >= QUERIES) & (j < QUERIES + SLOT))[None, :])
    tl.store(values + at - SLOT, y, mask=live & ((j >= QUERIES + SLOT) & (j < QUERIES + 2 * SLOT))[None, :])


@triton.jit
def _rotate_and_store(
    qkv, slots, cos_sin, norms, q, keys, values, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few heads of one row. NORMED: query and key heads are normed first, each by its weight in norms [H + KV, D]."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    COLUMNS: tl.constexpr = HEADS_PER_PROGRAM * DIM
    TOTAL: tl.constexpr = (HEADS + 2 * KV) * DIM
    r = tl.program_id(0) + tl.arange(0, 1)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live = (r >= 0)[:, None]
    x = tl.load(qkv + r[:, None].to(tl.int64) * TOTAL + j[None, :], mask=(j < TOTAL)[None, :], other=0.0)
    if NORMED:
        head = tl.reshape(x.to(tl.float32), (HEADS_PER_PROGRAM, DIM))
        head *= tl.rsqrt(tl.sum(head * head, 1) / DIM + eps)[:, None]
        moved = (j < (HEADS + KV) * DIM)[None, :]
        weight = tl.load(norms + j[None, :], mask=moved, other=0.0)
        x = tl.where(moved, tl.reshape(head, (1, COLUMNS)) * weight, x.to(tl.float32))
    rotation = load_cos_sin(cos_sin, r, j, live, DIM)
    slot = tl.load(slots + r)
    rope_and_store(x, rotation, r, j, slot, live, q, keys, values, HEADS, KV, DIM, 1, COLUMNS)


def locate_rows(
    batch: AttentionBatch, cos_sin: Tensor, places: RowPlaces, *, scratch_slot: int, page: int = 16, pdl: bool = True
) -> None:
    """Fill in the places of a batch's rows: slots, and the cosines and sines of their positions.

    cos_sin [positions, D/2, 2] float32. scratch_slot: the slot of rows that are not real; their rotation is arbitrary.
    """
    _locate_row[(len(places.slots),)](
        batch.block_tables, batch.table_ids, batch.starts, batch.widths, batch.depths, batch.packing.row_index,
        cos_sin, places.slots, places.cos_sin, batch.width, batch.block_tables.shape[1], scratch_slot,
        2 * cos_sin.shape[1], page, pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip


def rotate_and_store(
    qkv: Tensor,
    places: RowPlaces,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    norms: Tensor | None = None,
    eps: float = 0.0,
    pdl: bool = True,
) -> None:
    """qkv [N, (H + 2 KV) * D] -> rotated q [N, H, D]; rotated keys and the values go to the cache, each [slots, KV, D].

    norms float32 [H + KV, D]: norm each query and key head first.
    """
    n, heads, dim = q.shape
    keys, values = cache
    kv = keys.shape[1]
    _rotate_and_store[(n, triton.cdiv(heads + 2 * kv, HEADS_PER_PROGRAM))](
        qkv, places.slots, places.cos_sin, places.cos_sin if norms is None else norms, q, keys, values, eps,
        heads, kv, dim, HEADS_PER_PROGRAM, norms is not None, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
