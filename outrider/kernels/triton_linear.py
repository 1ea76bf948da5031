"""Linear layers for a few rows, in Triton: weights are read once, at the speed of memory.

One row: each program takes a few outputs and walks the inputs on the CUDA cores. Two to 64
rows: weights are the left operand of `tl.dot`, rows padded to 16, 32 or 64 on the right, inputs
split between programs where outputs alone would not fill the chip; the last program of a tile to
arrive adds the parts in a fixed order, so that a result never depends on who was first. A row's
bits do not depend on the rows beside it, as long as they are padded to the same number.

Around the product, without further passes over memory: the root mean square norm of the input
(its scale is applied to the output; its weight is folded into the matrix), SiLU-gated pairs of
outputs, and the residual's sum. A single row's weights are loaded before the input is waited for, so
that with programmatic dependent launch they stream in while the kernel before still runs.

Beyond 64 rows the library's products are as good; `norm_rows` and `gate_rows` are what goes
around them. `plain_linear` is the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 64
"""Rows these kernels take."""
PADDED = (16, 32, 64)
"""What rows are padded to."""
MOST_SPLITS = 4
SPLIT_OUTPUTS = 8192
"""Products of more outputs fill the chip without being split."""


@triton.jit
def _one_row(
    x, w, residual, out, eps,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    PDL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[j] = f(sum over i of w[j, i] x[i]) for BLOCK_N outputs j."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EVEN: tl.constexpr = (K % BLOCK_K == 0) and (N % BLOCK_N == 0)
    UP: tl.constexpr = N * K
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    rows = w + j[:, None].to(tl.int64) * K + i[None, :]
    real = (j < N)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    square = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for step in tl.static_range(0, K, BLOCK_K):
        inside = (step + i < K)[None, :] & real
        weight = tl.load(rows + step) if EVEN else tl.load(rows + step, mask=inside, other=0.0)
        if GATED:
            up = tl.load(rows + UP + step) if EVEN else tl.load(rows + UP + step, mask=inside, other=0.0)
        if PDL and step == 0:
            tl.extra.cuda.gdc_wait()
        xi = tl.load(x + step + i) if EVEN else tl.load(x + step + i, mask=step + i < K, other=0.0)
        xi = xi.to(tl.float32)
        acc += weight.to(tl.float32) * xi[None, :]
        if GATED:
            acc_up += up.to(tl.float32) * xi[None, :]
        if NORMED:
            square += xi * xi
    y = tl.sum(acc, 1)
    scale = 1.0
    if NORMED:
        scale = tl.rsqrt(tl.sum(square, 0) / K + eps)
        y *= scale
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(acc_up, 1) * scale)
    if ADDED:
        y += tl.load(residual + j, mask=j < N, other=0.0).to(tl.float32)
    tl.store(out + j, y.to(out.dtype.element_ty), mask=j < N)


@triton.jit(do_not_specialize=["m"])
def _few_rows(
    x, w, residual, out, parts, counters, m, residual_stride, eps,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    PDL: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """out[r, j] for BLOCK_N outputs j and all m rows r, over one of SPLITS parts of the inputs."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EVEN: tl.constexpr = N % BLOCK_N == 0
    UP: tl.constexpr = N * K
    SPAN: tl.constexpr = K // SPLITS
    tile = tl.program_id(0)
    part = tl.program_id(1)
    j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    square = tl.zeros((ROWS,), dtype=tl.float32)
    rows = w + j[:, None].to(tl.int64) * K + i[None, :] + part * SPAN
    columns = x + r[None, :] * K + i[:, None] + part * SPAN
    live = r[None, :] < m
    real = (j < N)[:, None]
    if PDL:
        tl.extra.cuda.gdc_wait()
    for step in range(0, SPAN, BLOCK_K):
        weight = tl.load(rows + step) if EVEN else tl.load(rows + step, mask=real, other=0.0)
        xt = tl.load(columns + step, mask=live, other=0.0)
        acc = tl.dot(weight, xt, acc)
        if GATED:
            up = tl.load(rows + UP + step) if EVEN else tl.load(rows + UP + step, mask=real, other=0.0)
            acc_up = tl.dot(up, xt, acc_up)
        if NORMED:
            xf = xt.to(tl.float32)
            square += tl.sum(xf * xf, 0)
    place = r[None, :] * N + j[:, None]  # [BLOCK_N, ROWS]
    mask = live & real
    mine = True
    if SPLITS > 1:
        tl.store(parts + part * ROWS * N + place, acc, mask=mask)
        squares = parts + SPLITS * ROWS * N + tile * SPLITS * ROWS
        if NORMED:
            tl.store(squares + part * ROWS + r, square)
        tl.debug_barrier()
        mine = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if mine:
            tl.store(counters + tile, 0)
            acc = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
            square = tl.zeros((ROWS,), dtype=tl.float32)
            for p in tl.static_range(SPLITS):
                acc += tl.load(parts + p * ROWS * N + place, mask=mask, other=0.0, cache_modifier=".cg")
                if NORMED:
                    square += tl.load(squares + p * ROWS + r, cache_modifier=".cg")
    if mine:
        scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
        if NORMED:
            scale = tl.rsqrt(square / K + eps)
            acc *= scale[None, :]
        if GATED:
            acc = acc * tl.sigmoid(acc) * (acc_up * scale[None, :])
        if ADDED:
            acc += tl.load(residual + r[None, :] * residual_stride + j[:, None], mask=mask, other=0.0).to(tl.float32)
        tl.store(out + place, acc.to(out.dtype.element_ty), mask=mask)


@dataclass(frozen=True, slots=True)
class Tile:
    """How one product is cut up. Chosen by shape alone, so that the same rows give the same bits."""

    outputs: int
    inputs: int
    splits: int
    warps: int
    stages: int


@lru_cache(maxsize=64)
def one_row_tile(n: int, k: int, gated: bool) -> Tile:
    """Measured on an H200: 0.96 of the read bandwidth over the layers of an 8B model."""
    if k >= 4096 and k % 4096 == 0 and gated:
        return Tile(1, 4096, 1, 4, 1)
    if k >= 2048 and k % 2048 == 0:
        return Tile(1 if gated else 4, 2048, 1, 8, 1)
    return Tile(1 if gated else 2, min(1024, triton.next_power_of_2(k)), 1, 4, 1)


@lru_cache(maxsize=256)
def few_rows_tile(n: int, k: int, gated: bool, rows: int) -> Tile | None:
    """None where the inputs cannot be cut into equal blocks. rows: one of PADDED.

    Measured on an H200 over the layers of an 8B model: 0.87 of the read bandwidth for 16 rows, 0.83 for 32.
    """
    block = next((b for b in (128, 64, 32) if k % b == 0), 0)
    if not block:
        return None
    if rows > 16 and n > 65536:  # a vocabulary's head: plenty of outputs
        return Tile(128, block, 1, 4, 3) if rows == 32 else Tile(128, min(block, 64), 1, 4, 4)
    tiles = -(-n // 64)
    most = MOST_SPLITS if rows == 16 else 2
    splits = next((s for s in (1, 2, 4) if gated or s == most or tiles * s >= 90 or n > SPLIT_OUTPUTS), most)
    while k % (block * splits):
        splits //= 2
    return Tile(64, block, splits, 4, 4 if gated else 6 if rows == 16 else 5)


def padded(rows: int) -> int:
    """What so many rows are padded to."""
    return next(p for p in PADDED if p >= rows)


class Scratch:
    """Room for split products: their parts, and how many have arrived. One for each stream of launches."""

    def __init__(self, device: torch.device) -> None:
        outputs = SPLIT_OUTPUTS + SPLIT_OUTPUTS // 64 + 64  # a tile's rows leave their squares behind the parts
        self.parts = torch.empty(MOST_SPLITS * MOST_ROWS * outputs, dtype=torch.float32, device=device)
        self.counters = torch.zeros(SPLIT_OUTPUTS // 16, dtype=torch.int32, device=device)


def plain_linear(
    x: Tensor, w: Tensor, *, residual: Tensor | None = None, eps: float | None = None, gated: bool = False
) -> Tensor:
    """What `linear` computes, spelled out in the precision of x."""
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = x @ w.T
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual


def takes(n: int, k: int, rows: int, gated: bool) -> bool:
    """Whether `linear` can do a product of this shape."""
    return rows == 1 or (rows <= MOST_ROWS and few_rows_tile(n, k, gated, padded(rows)) is not None)


def linear(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    scratch: Scratch,
    *,
    residual: Tensor | None = None,
    eps: float | None = None,
    gated: bool = False,
    pdl: bool = True,
    one_path: bool = False,
) -> None:
    """out [M, n] = f(norm(x [M, k]) @ w.T) + residual, M up to 64.

    eps: norm the rows of x first, by a weight of ones. gated: w [2n, k] holds gate and up, and
    out is silu(gate) * up. residual [M, n] may be out itself, or [n] a bias. one_path: inputs are added up in one
    order however many rows there are, so that a row's bits are the same alone and among others.
    """
    (m, k), n = x.shape, out.shape[1]
    flags = (eps is not None, gated, residual is not None, pdl)
    added, least = x if residual is None else residual, eps or 0.0
    if m == 1 and not one_path:
        tile = one_row_tile(n, k, gated)
        _one_row[(triton.cdiv(n, tile.outputs),)](
            x, w, added, out, least, n, k, *flags, tile.outputs, tile.inputs, num_warps=tile.warps, launch_pdl=pdl
        )  # fmt: skip
        return
    # one way to sum, whatever rows are padded to, gives one result
    tile = few_rows_tile(n, k, gated, PADDED[0] if one_path else padded(m)) if m <= MOST_ROWS else None
    if tile is None:
        raise ValueError(f"no kernel for {m} rows of {k} inputs; ask `takes` first")
    _few_rows[(triton.cdiv(n, tile.outputs), tile.splits)](
        x, w, added, out, scratch.parts, scratch.counters, m, n if added.dim() == 2 else 0, least, n, k, *flags,
        padded(m), tile.outputs, tile.inputs, tile.splits,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
    )  # fmt: skip


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


def norm_rows(x: Tensor, out: Tensor, eps: float, *, weight: Tensor | None = None, pdl: bool = True) -> None:
    """out = x over its root mean square, row by row, times weight float32 [k] where there is one: both [M, k]."""
    m, k = x.shape
    given = (x, x if weight is None else weight, out, eps)
    _norm_row[(m,)](
        *given, k, triton.next_power_of_2(k), weight is not None, pdl, num_warps=8, launch_pdl=pdl
    )  # fmt: skip


def gate_rows(x: Tensor, out: Tensor, *, pdl: bool = True) -> None:
    """out [M, n] = silu(gate) * up, of x [M, 2n] = gate and up."""
    m, n = out.shape
    _gate_row[(m, triton.cdiv(n, 2048))](x, out, n, 2048, pdl, num_warps=8, launch_pdl=pdl)
