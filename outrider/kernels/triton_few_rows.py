"""Linear layers for up to 64 rows, in Triton: weights are read once, at memory bandwidth.

One row: each program computes a few outputs on the CUDA cores. Two to 64 rows: weights are the left operand of
`tl.dot`, rows padded to 16, 32 or 64 on the right, inputs split between programs (split-K) where outputs alone do not
fill the GPU; the last program of a tile to finish adds the parts in a fixed order, so that the result does not depend
on timing. A row's bits do not depend on the other rows, as long as rows are padded to the same number.

The first weights are loaded before the kernel waits for its input, so that with programmatic dependent launch they are
read while the kernel before still runs. triton_linear.py launches these kernels and says what is fused with them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton_rope import load_cos_sin, rope_and_store
from outrider.kernels.triton_small_linear import keep_in_registers


@triton.jit
def _weights(rows, real, EVEN: tl.constexpr):
    return tl.load(rows) if EVEN else tl.load(rows, mask=real, other=0.0)


@triton.jit
def one_row(
    x, w, residual, out, slots, cos_sin, keys, values, eps,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    PDL: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[j] = f(sum over i of w[j, i] x[i]) for BLOCK_N outputs j. DIM > 0: attention heads, rotated and stored.

    The first AHEAD blocks of weights are loaded before the wait.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EVEN: tl.constexpr = (K % BLOCK_K == 0) and (N % BLOCK_N == 0)
    UP: tl.constexpr = N * K
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, BLOCK_K)
    r = tl.arange(0, 1)
    live = (r == 0)[:, None]
    rows = w + j[:, None].to(tl.int64) * K + i[None, :]
    real = (j < N)[:, None]
    ahead = ()
    for step in tl.static_range(0, AHEAD * BLOCK_K, BLOCK_K):
        inside = (step + i < K)[None, :] & real
        ahead += (_weights(rows + step, inside, EVEN),)
        if GATED:
            ahead += (_weights(rows + UP + step, inside, EVEN),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if DIM > 0:  # this and what is added: loaded as soon as possible, needed at the end
        rotation = load_cos_sin(cos_sin, r, j, live, DIM)
        slot = tl.load(slots + r)
    if ADDED:
        added = tl.load(residual + j, mask=j < N, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    square = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for b in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        step = b * BLOCK_K
        if b < AHEAD:
            weight = ahead[2 * b] if GATED else ahead[b]
            up = ahead[2 * b + 1] if GATED else weight
        else:
            inside = (step + i < K)[None, :] & real
            weight = _weights(rows + step, inside, EVEN)
            up = _weights(rows + UP + step, inside, EVEN) if GATED else weight
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
        y += added.to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if DIM > 0:
        rope_and_store(y[None, :], rotation, r, j, slot, live, out, keys, values, HEADS, KV, DIM, 1, BLOCK_N)
    else:
        tl.store(out + j, y, mask=j < N)


@triton.jit
def _accumulate(weight, up, xt, acc, acc_up, squares, NORMED: tl.constexpr, GATED: tl.constexpr):
    """Add one block of inputs: weights [BLOCK_N, BLOCK_K] times xt [BLOCK_K, ROWS], and the inputs' squares."""
    acc = tl.dot(weight, xt, acc)
    if GATED:
        acc_up = tl.dot(up, xt, acc_up)
    if NORMED:
        xf = xt.to(tl.float32)
        squares = tl.fma(xf, xf, squares)
    return acc, acc_up, squares


@triton.jit
def _combine_parts(
    acc, square, parts, counters, place, mask, r,
    N: tl.constexpr, NORMED: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store this program's part; the last program of a tile to finish adds all parts in order."""
    tile = tl.program_id(0)
    part = tl.program_id(1)
    part_squares = parts + SPLITS * ROWS * N + tile * SPLITS * ROWS
    tl.store(parts + part * ROWS * N + place, acc, mask=mask)
    if NORMED:
        tl.store(part_squares + part * ROWS + r, square)
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(counters + tile, 0)
        acc = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
        square = tl.zeros((ROWS,), dtype=tl.float32)
        for p in tl.static_range(SPLITS):
            acc += tl.load(parts + p * ROWS * N + place, mask=mask, other=0.0, cache_modifier=".cg")
            if NORMED:
                square += tl.load(part_squares + p * ROWS + r, cache_modifier=".cg")
    return last, acc, square


@triton.jit(do_not_specialize=["m"])
def few_rows(
    x, w, residual, out, parts, counters, slots, cos_sin, keys, values, m, residual_stride, eps,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    PDL: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[r, j] for BLOCK_N outputs j and all m rows r, over one of SPLITS parts of the inputs.

    The last AHEAD blocks of weights are loaded into registers before the wait. DIM > 0: the outputs are attention
    heads, which are rotated and stored.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    EVEN: tl.constexpr = N % BLOCK_N == 0
    UP: tl.constexpr = N * K
    SPAN: tl.constexpr = K // SPLITS
    LOOPED: tl.constexpr = SPAN - AHEAD * BLOCK_K
    tile = tl.program_id(0)
    part = tl.program_id(1)
    j = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    acc_up = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K, ROWS), dtype=tl.float32)
    rows = w + j[:, None].to(tl.int64) * K + i[None, :] + part * SPAN
    columns = x + r[None, :] * K + i[:, None] + part * SPAN
    live = r[None, :] < m
    real = (j < N)[:, None]
    ahead_weights = ()
    for b in tl.static_range(AHEAD):
        ahead_weights += (_weights(rows + LOOPED + b * BLOCK_K, real, EVEN),)
        if GATED:
            ahead_weights += (_weights(rows + UP + LOOPED + b * BLOCK_K, real, EVEN),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    ahead_inputs = ()
    for b in tl.static_range(AHEAD):
        ahead_inputs += (tl.load(columns + LOOPED + b * BLOCK_K, mask=live, other=0.0),)
    if DIM > 0:  # loaded as soon as possible, needed at the end
        rotation = load_cos_sin(cos_sin, r, j, (r < m)[:, None], DIM)
        slot = tl.load(slots + r, mask=r < m, other=0)
    for step in range(0, LOOPED, BLOCK_K):
        weight = _weights(rows + step, real, EVEN)
        up = _weights(rows + UP + step, real, EVEN) if GATED else weight
        xt = tl.load(columns + step, mask=live, other=0.0)
        acc, acc_up, squares = _accumulate(weight, up, xt, acc, acc_up, squares, NORMED, GATED)
    for b in tl.static_range(AHEAD):  # in the same order as if none were loaded ahead
        weight = keep_in_registers(ahead_weights[2 * b] if GATED else ahead_weights[b], PDL)
        up = keep_in_registers(ahead_weights[2 * b + 1], PDL) if GATED else weight
        xt = keep_in_registers(ahead_inputs[b], PDL)
        acc, acc_up, squares = _accumulate(weight, up, xt, acc, acc_up, squares, NORMED, GATED)
    square = tl.sum(squares, 0)
    place = r[None, :] * N + j[:, None]  # [BLOCK_N, ROWS]
    mask = live & real
    mine = True
    if SPLITS > 1:
        mine, acc, square = _combine_parts(
            acc, square, parts, counters, place, mask, r, N, NORMED, ROWS, BLOCK_N, SPLITS
        )
    if mine:
        scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
        if NORMED:
            scale = tl.rsqrt(square / K + eps)
            acc *= scale[None, :]
        if GATED:
            acc = acc * tl.sigmoid(acc) * (acc_up * scale[None, :])
        if ADDED:
            acc += tl.load(residual + r[None, :] * residual_stride + j[:, None], mask=mask, other=0.0).to(tl.float32)
        y = acc.to(out.dtype.element_ty)
        if DIM > 0:
            rope_and_store(
                tl.trans(y), rotation, r, j, slot, (r < m)[:, None], out, keys, values, HEADS, KV, DIM, ROWS, BLOCK_N
            )  # fmt: skip
        else:
            tl.store(out + place, y, mask=mask)
