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
