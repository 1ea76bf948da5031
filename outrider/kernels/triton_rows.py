"""Operations on single rows, in Triton: embedding, the RMS norm and SiLU gate beside cuBLAS products, taps.

`plain_linear` in triton_linear.py is the reference of norm and gate.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize_on_alignment=["ids", "row_index"])
def _embed_row(embedding, ids, row_index, out, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    token = tl.maximum(tl.load(ids + tl.maximum(tl.load(row_index + row), 0)), 0)
    tl.store(out + row * K + i, tl.load(embedding + token * K + i, mask=i < K), mask=i < K)


@triton.jit
def _norm_row(x, weight, out, eps, K: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    value = tl.load(x + row * K + i, mask=i < K, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / K + eps)
    if WEIGHTED:
        value *= tl.load(weight + i, mask=i < K, other=0.0)
    tl.store(out + row * K + i, value.to(out.dtype.element_ty), mask=i < K)


@triton.jit
def _gate_row(x, out, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(x + row * 2 * N + j, mask=j < N, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * N + N + j, mask=j < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + j, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=j < N)


@triton.jit(do_not_specialize=["stride"], do_not_specialize_on_alignment=["ids", "row_index", "slots"])
def _store_tapped(
    tapped, ids, row_index, slots, tokens, features, stride,
    K: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tap = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    x = tl.load(tapped + tap * stride + row * K + i, mask=i < K)
    tl.store(features + slot * K * TAPS + tap * K + i, x, mask=i < K)
    if tap == 0:
        tl.store(tokens + slot, tl.maximum(tl.load(ids + tl.maximum(tl.load(row_index + row), 0)), 0))


def embed_rows(embedding: Tensor, ids: Tensor, row_index: Tensor, out: Tensor, *, pdl: bool = True) -> None:
    """out [N, k] = embedding[ids[row_index]]; a negative index or id gives an arbitrary row. Both are int64."""
    n, k = out.shape
    _embed_row[(n,)](
        embedding, ids, row_index, out, k, triton.next_power_of_2(k), pdl, num_warps=4, launch_pdl=pdl
    )  # fmt: skip


def norm_rows(x: Tensor, out: Tensor, eps: float, *, weight: Tensor | None = None, pdl: bool = True) -> None:
    """out [M, k] = x [M, k] over its root mean square, row by row, times weight float32 [k] where one is given."""
    m, k = x.shape
    given = (x, x if weight is None else weight, out, eps)
    _norm_row[(m,)](
        *given, k, triton.next_power_of_2(k), weight is not None, pdl, num_warps=8, launch_pdl=pdl
    )  # fmt: skip


def gate_rows(x: Tensor, out: Tensor, *, pdl: bool = True) -> None:
    """out [M, n] = silu(gate) * up, where x [M, 2n] holds gate and up."""
    m, n = out.shape
    _gate_row[(m, triton.cdiv(n, 2048))](x, out, n, 2048, pdl, num_warps=8, launch_pdl=pdl)


def store_tapped(
    tapped: Tensor, ids: Tensor, row_index: Tensor, slots: Tensor, tokens: Tensor, features: Tensor, *, pdl: bool = True
) -> None:
    """As `TappedPages.store`, for a pass's rows: their tokens, ids[row_index], and outputs, tapped [taps, max rows, k].

    slots int64 [N]: where both go, in tokens int64 [slots] and features [slots, taps * k].
    """
    taps, _, k = tapped.shape
    _store_tapped[(len(slots), taps)](
        tapped, ids, row_index, slots, tokens, features, tapped.stride(0), k, taps, triton.next_power_of_2(k), pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
