"""Launches around a drafting head's layers, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit(do_not_specialize_on_alignment=["state", "lengths", "last"])
def _fetch_texts(state, lengths, last, BLOCK: tl.constexpr):
    b = tl.arange(0, BLOCK)
    there = b < tl.load(state + 2)
    given = tl.load(state).to(tl.pointer_type(tl.int64))
    tl.store(lengths + b, tl.load(given + b, mask=there, other=0), mask=there)
    given = tl.load(state + 1).to(tl.pointer_type(tl.int64))
    tl.store(last + b, tl.load(given + 2 * b + 1, mask=there, other=0), mask=there)


def fetch_texts(state: Tensor, lengths: Tensor, last: Tensor) -> None:
    """Complete the first texts of a draft, lengths and last tokens int64 [B], by those of a `DeviceState`.

    state int64 [3]: the addresses of its lengths int64 [N] and last tokens int64 [N, 2], and N, at most BLOCK; 0: none.
    """
    _fetch_texts[(1,)](state, lengths, last, BLOCK, num_warps=1)


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
    """out [N, 2k]: the embedding [vocab, k] of ids int64 [N] beside hidden [N, k], or behind it.

    norms float32 [2, k]: both are normed first, by the weights for the embedding and for the hidden rows. residual
    [N, k] takes the hidden rows as they are in out. All contiguous.
    """
    n, k = hidden.shape
    _join_row[(n,)](
        embedding, ids, hidden, hidden if norms is None else norms, out, out if residual is None else residual, eps,
        k, triton.next_power_of_2(k), norms is not None, hidden_first, residual is not None, pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["pages", "width"],
    do_not_specialize_on_alignment=["table_ids", "lengths", "last", "firsts", "counts", "ends"],
)
def _gather_unread(
    block_tables, table_ids, lengths, last, firsts, tokens, features, ids, rows, starts, counts, ends, pages, width,
    WIDE: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, BEFORE: tl.constexpr,
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
) -> None:
    """As the plain `DraftBatch.unread`, in one launch.

    texts: table ids, lengths, last tokens and first positions, int64 [B] each. kept: tokens int64 [slots] and features
    [slots, wide]. out: the fields of `UnreadRows`, in their order.
    """
    (batch, width), wide = out[0].shape, kept[1].shape[1]
    _gather_unread[(batch, width)](
        block_tables, *texts, *kept, *out, block_tables.shape[1], width,
        wide, min(1024, triton.next_power_of_2(wide)), page, int(before), num_warps=4,
    )  # fmt: skip
