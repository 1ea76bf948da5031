"""Kernels that run before a drafting head's layers, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import AttentionBatch, RowPlaces

BLOCK = 256


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["state", "rows", "lengths", "last", "starts"])
def _fetch_texts(state, rows, lengths, last, starts, batch, BLOCK: tl.constexpr):
    b = tl.arange(0, BLOCK)
    row = tl.load(rows + b, mask=b < batch, other=-1)
    there = row >= 0
    own = tl.load(lengths + b, mask=b < batch, other=1)
    given = tl.load(state).to(tl.pointer_type(tl.int64))
    length = tl.load(given + row, mask=there, other=0)
    tl.store(lengths + b, length, mask=there)
    tl.store(starts + b, tl.where(there, length, own) - 1, mask=b < batch)
    given = tl.load(state + 1).to(tl.pointer_type(tl.int64))
    tl.store(last + b, tl.load(given + 2 * row + 1, mask=there, other=0), mask=there)


def fetch_texts(state: Tensor, rows: Tensor, lengths: Tensor, last: Tensor, starts: Tensor) -> None:
    """Fill in the lengths and last tokens of texts, int64 [B] each, from a `DeviceState`; B is at most BLOCK.

    state int64 [2]: the addresses of its lengths int64 [N] and last tokens int64 [N, 2]. rows int64 [B]: each text's
    row of the state; negative: none, and its length and last token are given already. starts int64 [B] becomes the
    lengths less 1.
    """
    _fetch_texts[(1,)](state, rows, lengths, last, starts, len(lengths), BLOCK, num_warps=1)


@triton.jit
def _norm(x, weight, i, eps, K: tl.constexpr):
    x *= tl.rsqrt(tl.sum(x * x, 0) / K + eps)
    return x * tl.load(weight + i, mask=i < K, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["ids"])
def _join_row(
    embedding, ids, hidden, norms, out, residual, eps,
    K: tl.constexpr, BLOCK: tl.constexpr, NORMED: tl.constexpr, HIDDEN_FIRST: tl.constexpr, KEPT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    token = tl.maximum(tl.load(ids + row), 0)
    x = tl.load(embedding + token * K + i, mask=i < K, other=0.0).to(tl.float32)
    h = tl.load(hidden + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    if NORMED:
        x = _norm(x, norms, i, eps, K)
        h = _norm(h, norms + K, i, eps, K)
    at = out + row * 2 * K + i
    tl.store(at + (K if HIDDEN_FIRST else 0), x.to(out.dtype.element_ty), mask=i < K)
    tl.store(at + (0 if HIDDEN_FIRST else K), h.to(out.dtype.element_ty), mask=i < K)
    if KEPT:
        tl.store(residual + row * K + i, h.to(out.dtype.element_ty), mask=i < K)


def join_rows(
    embedding: Tensor,
    ids: Tensor,
    hidden: Tensor,
    norms: Tensor | None,
    out: Tensor,
    residual: Tensor | None = None,
    *,
    eps: float = 0.0,
    hidden_first: bool = False,
    pdl: bool = True,
) -> None:
    """out [N, 2k]: the embeddings of ids int64 [N] followed by hidden [N, k], or preceded by it (hidden_first).

    embedding [vocab, k]. norms float32 [2, k]: RMS norm weights for the embeddings and the hidden rows, which are
    normed first; None: they are not. residual [N, k] takes the hidden rows as they are in out. All contiguous.
    """
    n, k = hidden.shape
    _join_row[(n,)](
        embedding, ids, hidden, hidden if norms is None else norms, out, out if residual is None else residual, eps,
        k, triton.next_power_of_2(k), norms is not None, hidden_first, residual is not None, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["pages", "width", "scratch_slot"],
    do_not_specialize_on_alignment=["table_ids", "lengths", "last", "firsts", "counts", "ends"],
)
def _gather_unread(
    block_tables, table_ids, lengths, last, firsts, tokens, features, ids, rows, starts, counts, ends,
    cos_sin, slots, row_cos_sin, pages, width, scratch_slot,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, BEFORE: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    w = tl.program_id(1)
    end = tl.load(lengths + b) - 1
    first = tl.minimum(tl.maximum(tl.load(firsts + b), end - width + BEFORE), end)
    place = tl.minimum(first + w, end)
    table = block_tables + tl.load(table_ids + b) * pages
    slot = tl.load(table + place // PAGE).to(tl.int64) * PAGE + place % PAGE
    row = (b * width + w).to(tl.int64)
    tl.store(ids + row, tl.where(place < end, tl.load(tokens + slot), tl.load(last + b)))
    if DIM > 0:
        d = tl.arange(0, DIM)
        tl.store(slots + row, tl.where(first + w < end + BEFORE, slot, scratch_slot))
        tl.store(row_cos_sin + row * DIM + d, tl.load(cos_sin + (first + w) * DIM + d))
    of = tl.maximum(place - BEFORE, 0)
    slot = tl.load(table + of // PAGE).to(tl.int64) * PAGE + of % PAGE
    for begin in tl.static_range(0, WIDE, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(features + slot * WIDE + i, mask=i < WIDE, other=0.0)
        x = tl.where(place >= BEFORE, x, 0.0)
        tl.store(rows + row * WIDE + i, x, mask=i < WIDE)
    if w == 0:
        tl.store(starts + b, first)
        tl.store(counts + b, end - first + BEFORE)
        tl.store(ends + b, row + end - first)


def gather_unread(
    block_tables: Tensor,
    texts: tuple[Tensor, Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    out: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    before: bool,
    page: int = 16,
    places: RowPlaces | None = None,
    cos_sin: Tensor | None = None,
    scratch_slot: int = 0,
) -> None:
    """As the plain `DraftBatch.unread`, in one launch.

    texts: table ids, lengths, last tokens and first positions, int64 [B] each. kept: tokens int64 [slots] and features
    [slots, wide]. out: the fields of `UnreadRows`, in their order. places: the places of the rows, filled in as by
    `locate_rows` from cos_sin [positions, D/2, 2]; scratch_slot: the slot of rows that are not real.
    """
    (batch, width), wide = out[0].shape, kept[1].shape[1]
    located = (out[1],) * 3 if places is None or cos_sin is None else (cos_sin, places.slots, places.cos_sin)
    _gather_unread[(batch, width)](
        block_tables, *texts, *kept, *out, *located, block_tables.shape[1], width, scratch_slot,
        wide, min(1024, triton.next_power_of_2(wide)), page, int(before),
        0 if cos_sin is None else 2 * cos_sin.shape[1], num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pages", "size"], do_not_specialize_on_alignment=["anchors", "table_ids", "starts"])
def _embed_block(
    embedding, mask, anchors, block_tables, table_ids, starts, cos_sin, out, slots, row_cos_sin, pages, size,
    K: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    b = row // size
    w = row % size
    i = tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    source = embedding + tl.load(anchors + b) * K if w == 0 else mask
    tl.store(out + row * K + i, tl.load(source + i, mask=i < K), mask=i < K)
    position = tl.load(starts + b) + w
    page = tl.load(block_tables + tl.load(table_ids + b) * pages + position // PAGE).to(tl.int64)
    tl.store(slots + row, page * PAGE + position % PAGE)
    tl.store(row_cos_sin + row * DIM + d, tl.load(cos_sin + position * DIM + d))


def embed_blocks(
    embedding: Tensor,
    mask: Tensor,
    anchors: Tensor,
    batch: AttentionBatch,
    cos_sin: Tensor,
    out: Tensor,
    places: RowPlaces,
    *,
    page: int = 16,
    pdl: bool = True,
) -> None:
    """The input rows of blocks, and where their keys and values go: as `BlockHead.embed` and `locate_rows`.

    out [B * block, k]: the first row of each block is the embedding of its anchor, int64 [B], the others are mask [k].
    All rows of the batch are real, and their depths are those of a chain.

    The kernel begins only when all kernels launched before it have ended: the attention after it loads cached keys of a
    text without waiting for this kernel, and the last of those keys have just been written.
    """
    n, k = out.shape
    _embed_block[(n,)](
        embedding, mask, anchors, batch.block_tables, batch.table_ids, batch.starts, cos_sin, out, places.slots,
        places.cos_sin, batch.block_tables.shape[1], batch.width, k, triton.next_power_of_2(k), 2 * cos_sin.shape[1],
        page, pdl, num_warps=4,
    )  # fmt: skip
