"""The product of a few rows and a small matrix, in Triton: inputs are split between the warps of a program.

`few_rows` in triton_few_rows.py gives 64 outputs to a program, so that a matrix of a small model has 9 to 36 programs,
fewer than the multiprocessors of a GPU. Here a program has as few as 8 outputs: rows are the left operand of `tl.dot`,
padded to 8 or 16, and weights the right one. Each warp multiplies its own inputs, and the warps' sums are added in
shared memory, not by the last program to finish. Weights are loaded into registers before the kernel waits for its
input.

A row's bits do not depend on the other rows, as long as rows are padded to the same number. triton_linear.py launches
this kernel and says what is fused with the product; `plain_linear` there is the reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.triton_rope import load_cos_sin, rope_and_store


@triton.jit
def keep_in_registers(x, PDL: tl.constexpr):
    """x unchanged. Without this the compiler moves what was loaded to shared memory at once, and waits for it."""
    if PDL:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _accumulate(x, weight, up, acc, acc_up, squares, NORMED: tl.constexpr, GATED: tl.constexpr):
    """Add one block of inputs: x [WARPS, ROWS, BLOCK_K] times weights [WARPS, BLOCK_N, BLOCK_K], and x's squares."""
    acc = tl.dot(x, tl.permute(weight, (0, 2, 1)), acc)
    if GATED:
        acc_up = tl.dot(x, tl.permute(up, (0, 2, 1)), acc_up)
    if NORMED:
        xf = x.to(tl.float32)
        squares = tl.fma(xf, xf, squares)
    return acc, acc_up, squares


@triton.jit(do_not_specialize=["m"])
def rows_by_warps(
    x, w, residual, out, slots, cos_sin, keys, values, m, residual_stride, eps,
    N: tl.constexpr, K: tl.constexpr, NORMED: tl.constexpr, GATED: tl.constexpr, ADDED: tl.constexpr,
    PDL: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """out[r, j] for BLOCK_N outputs j and all m rows r. A warp has BLOCK_K inputs of each block.

    The last AHEAD blocks of weights, at least one, are loaded into registers before the wait. DIM > 0: the outputs are
    attention heads, which are rotated and stored.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    UP: tl.constexpr = N * K
    BLOCK: tl.constexpr = WARPS * BLOCK_K
    LOOPED: tl.constexpr = ((K + BLOCK - 1) // BLOCK - AHEAD) * BLOCK
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = tl.arange(0, ROWS)
    i = tl.arange(0, WARPS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    live = (r < m)[:, None]
    rows = w + j[None, :, None].to(tl.int64) * K + i  # [WARPS, BLOCK_N, BLOCK_K]
    columns = x + r[None, :, None] * K + i  # [WARPS, ROWS, BLOCK_K]
    real = (j < N)[None, :, None]
    weights = ()
    for step in tl.static_range(LOOPED, K, BLOCK):
        weights += (tl.load(rows + step, mask=real & (step + i < K), other=0.0),)
        if GATED:
            weights += (tl.load(rows + UP + step, mask=real & (step + i < K), other=0.0),)
    if PDL:
        tl.extra.cuda.gdc_wait()
    inputs = ()
    for step in tl.static_range(LOOPED, K, BLOCK):
        inputs += (tl.load(columns + step, mask=live[None] & (step + i < K), other=0.0),)
    if DIM > 0:  # loaded as soon as possible, needed at the end
        rotation = load_cos_sin(cos_sin, r, j, live, DIM)
        slot = tl.load(slots + r, mask=r < m, other=0)
    mask = live & (j < N)[None, :]
    if ADDED:
        added = tl.load(residual + r[:, None] * residual_stride + j[None, :], mask=mask, other=0.0)
    acc = tl.zeros((WARPS, ROWS, BLOCK_N), dtype=tl.float32)
    acc_up = tl.zeros((WARPS, ROWS, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((WARPS, ROWS, BLOCK_K), dtype=tl.float32)
    for step in range(0, LOOPED, BLOCK):
        weight = tl.load(rows + step, mask=real, other=0.0)
        up = tl.load(rows + UP + step, mask=real, other=0.0) if GATED else weight
        xt = tl.load(columns + step, mask=live[None], other=0.0)
        acc, acc_up, squares = _accumulate(xt, weight, up, acc, acc_up, squares, NORMED, GATED)
    for b in tl.static_range(AHEAD):
        weight = keep_in_registers(weights[2 * b] if GATED else weights[b], PDL)
        up = keep_in_registers(weights[2 * b + 1], PDL) if GATED else weight
        xt = keep_in_registers(inputs[b], PDL)
        acc, acc_up, squares = _accumulate(xt, weight, up, acc, acc_up, squares, NORMED, GATED)
    y = tl.sum(acc, 0)
    scale = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if NORMED:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 2), 0) / K + eps)
        y *= scale[:, None]
    if GATED:
        y = y * tl.sigmoid(y) * (tl.sum(acc_up, 0) * scale[:, None])
    if ADDED:
        y += added.to(tl.float32)
    y = y.to(out.dtype.element_ty)
    if DIM > 0:
        rope_and_store(y, rotation, r, j, slot, live, out, keys, values, HEADS, KV, DIM, ROWS, BLOCK_N)
    else:
        tl.store(out + r[:, None] * N + j[None, :], y, mask=mask)
