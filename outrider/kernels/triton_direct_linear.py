"""The product of a few rows and a small matrix, in Gluon: operands go from memory straight to the tensor cores.

In `rows_by_warps` (triton_small_linear.py) the compiler rearranges loaded operands for the tensor cores through shared
memory: 10 to 21 barriers between the input and the result of a product that takes 3 us. Here layouts are explicit.
Every thread loads the weights and inputs that its tensor core instructions read, 16 bytes at a time: the inputs of a
block are permuted, in the same way in both operands, which does not change the product. Weights are the left operand,
16 outputs at least, and rows the right one. Inputs are split between the warps, whose sums are added in shared memory
after the only barrier.

All weights of a program are in registers before the kernel waits for its input, so that only matrices with few inputs
have tiles for this kernel. A row's bits do not depend on the other rows, nor on their number. triton_linear.py launches
this kernel and says what is fused with the product; `plain_linear` there is the reference. Triton's interpreter does
not run it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

SHARED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
SHARED_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.constexpr_function
def _tensor_core_layout(warps):
    """[warps, outputs, rows]: each warp has a part of the inputs."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def _sum_layout(warps):
    """[warps, outputs, rows]: a thread has all warps' parts of two adjacent outputs, which are rotated together."""
    return gl.BlockedLayout([warps, 2, 1], [1, 8, 4], [1, 1, warps], [1, 2, 0])


@gluon.jit
def _load(pointers, inside, EVEN: gl.constexpr):
    return gl.load(pointers) if EVEN else gl.load(pointers, mask=inside, other=0.0)


@gluon.jit
def _share(part, WARPS: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """Store the warps' parts of a product in shared memory; loading them waits for all warps."""
    shared = gl.allocate_shared_memory(gl.float32, [WARPS, BLOCK_N, ROWS], SHARED)
    shared.store(part)
    return shared


@gluon.jit
def _rotate_pairs(y, rotation, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr):
    """Outputs [BLOCK_N, ROWS] in adjacent pairs, rotated; as `rope_and_store` does it."""
    a, b = gl.split(gl.permute(gl.reshape(y, (BLOCK_N // 2, 2, ROWS)), (0, 2, 1)))
    c, s = gl.split(gl.permute(gl.reshape(rotation, (BLOCK_N // 2, 2, ROWS)), (0, 2, 1)))
    both = gl.join(gl.fma(a, c, -(b * s)), gl.fma(b, c, a * s))
    rotated = gl.reshape(gl.permute(both, (0, 2, 1)), (BLOCK_N, ROWS))
    return gl.convert_layout(rotated, LAYOUT, assert_trivial=True)


@gluon.jit(do_not_specialize=["m"])
def direct_rows(
    x, w, residual, out, slots, cos_sin, keys, values, m, residual_stride, eps,
    N: gl.constexpr, K: gl.constexpr, NORMED: gl.constexpr, GATED: gl.constexpr, ADDED: gl.constexpr,
    PDL: gl.constexpr, HEADS: gl.constexpr, KV: gl.constexpr, DIM: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """out[r, j] for BLOCK_N outputs j, of N in all, and ROWS of m rows r. A warp has BLOCK_K inputs of each block.

    N is a multiple of BLOCK_N. DIM > 0: the outputs are attention heads, which are rotated and stored.
    """
    if PDL:
        gdc_launch_dependents()
    PRODUCT: gl.constexpr = _tensor_core_layout(WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, BLOCK_K // 8)  # as many inputs of a thread are adjacent
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, BLOCK_K // 8)
    SUMS: gl.constexpr = _sum_layout(WARPS)
    OUT: gl.constexpr = gl.SliceLayout(0, SUMS)  # [BLOCK_N, ROWS]
    UP: gl.constexpr = N * K
    BLOCK: gl.constexpr = WARPS * BLOCK_K
    STEPS: gl.constexpr = (K + BLOCK - 1) // BLOCK
    EVEN: gl.constexpr = K % BLOCK == 0
    first = gl.program_id(0) * BLOCK_N
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))[:, None, None]
    n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))[None, :, None]
    i = warp * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))[None, None, :]
    matrix = w + (first + n).to(gl.int64) * K + i  # [WARPS, BLOCK_N, BLOCK_K]
    weights = ()
    ups = ()
    for s in gl.static_range(STEPS):
        weights += (_load(matrix + s * BLOCK, s * BLOCK + i < K, EVEN),)
        if GATED:
            ups += (_load(matrix + UP + s * BLOCK, s * BLOCK + i < K, EVEN),)
    if PDL:
        gdc_wait()
    row = gl.program_id(1) * ROWS
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))[:, None, None]
    i = warp * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))[None, :, None]
    r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))[None, None, :]
    inputs = ()  # each [WARPS, BLOCK_K, ROWS]
    for s in gl.static_range(STEPS):
        inputs += (gl.load(x + r * K + i + s * BLOCK, mask=(r < m) & (s * BLOCK + i < K), other=0.0),)
    j = first + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, OUT))
    r = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, OUT))
    live = (r < m)[None, :]
    if ADDED:  # this and the rotation: loaded as soon as possible, needed at the end
        added = gl.load(residual + r[None, :] * residual_stride + j[:, None], mask=live, other=0.0)
    if DIM > 0:
        rotation = gl.load(cos_sin + r[None, :] * DIM + (j % DIM)[:, None], mask=live, other=0.0)
        slot = gl.load(slots + r, mask=r < m, other=0)
    zero = gl.zeros((WARPS, BLOCK_N, ROWS), gl.float32, PRODUCT)
    sums = (zero, zero)  # each of every other block, so that a product does not wait for the one before
    up_sums = (zero, zero)
    squares = gl.zeros((WARPS, BLOCK_K, ROWS), gl.float32, RIGHT)
    for s in gl.static_range(STEPS):
        sums = (sums[1], mma_v2(weights[s], inputs[s], sums[0]))
        if GATED:
            up_sums = (up_sums[1], mma_v2(ups[s], inputs[s], up_sums[0]))
        if NORMED:
            xf = inputs[s].to(gl.float32)
            squares = gl.fma(xf, xf, squares)
    parts = _share(sums[0] + sums[1], WARPS, BLOCK_N, ROWS)
    if GATED:
        up_parts = _share(up_sums[0] + up_sums[1], WARPS, BLOCK_N, ROWS)
    if NORMED:
        square_parts = gl.allocate_shared_memory(gl.float32, [WARPS, ROWS], SHARED_ROWS)
        square_parts.store(gl.sum(squares, 1))
    y = gl.sum(parts.load(SUMS), 0)
    if NORMED:
        square = gl.sum(square_parts.load(gl.SliceLayout(1, SUMS)), 0)
        scale = gl.convert_layout(gl.rsqrt(square / K + eps), gl.SliceLayout(0, OUT), assert_trivial=True)[None, :]
        y *= scale
    if GATED:
        up = gl.sum(up_parts.load(SUMS), 0)
        if NORMED:
            up *= scale
        y = y / (1 + gl.exp(-y)) * up
    if ADDED:
        y += added.to(gl.float32)
    y = y.to(out.dtype.element_ty)
    if DIM > 0:
        QUERIES: gl.constexpr = HEADS * DIM
        SLOT: gl.constexpr = KV * DIM
        rotated = _rotate_pairs(y.to(gl.float32), rotation, OUT, BLOCK_N, ROWS)
        y = gl.where((j < QUERIES + SLOT)[:, None], rotated, y.to(gl.float32)).to(out.dtype.element_ty)
        gl.store(out + r[None, :].to(gl.int64) * QUERIES + j[:, None], y, mask=live & (j < QUERIES)[:, None])
        at = slot[None, :] * SLOT + (j - QUERIES)[:, None]
        gl.store(keys + at, y, mask=live & ((j >= QUERIES) & (j < QUERIES + SLOT))[:, None])
        gl.store(values + at - SLOT, y, mask=live & (j >= QUERIES + SLOT)[:, None])
    else:
        gl.store(out + r[None, :] * N + j[:, None], y, mask=live)
