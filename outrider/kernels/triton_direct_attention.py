"""Attention of a few rows over the paged cache, in Gluon: operands go from memory straight to the tensor cores.

With few programs `_attend_split` (triton_attention.py) mostly waits: 13 barriers for one block of keys, loads that
depend on loads, and a second kernel that adds the splits. Here a warp computes 16 rows (every query head of a group,
for some rows of a sequence) over keys of its own, and one barrier comes before the warps' sums are added. Layouts are
explicit: each thread loads the keys, values and queries that its tensor core instructions read, 16 bytes at a time. The
dimensions of a key are permuted, in the same way as those of a query, which does not change their product; those of a
value are permuted differently, which is undone in the result. Scores become the left operand of the second product in
the registers where they are.

All cached keys of the first block are in registers before the kernel waits for its input: the queries, keys and values
of this pass. Long sequences are split between programs; the last one to finish adds the splits, in order. A row's bits
depend only on its own sequence and the number of splits.

`attend_pages` in kernels/attention.py is the plain reference; `attend_pages` in triton_attention.py launches this
kernel. Triton's interpreter does not run it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language import debug_barrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from outrider.kernels.triton_direct_places import ask_for_block, key_places, product_layout, value_places

ROWS = gl.constexpr(16)  # rows times heads of a group in a program: what a tensor core instruction takes
STATS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
PARTS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.constexpr_function
def _sum_layout(warps, dim):
    """[parts, ROWS, dim]: a thread has all parts of a few adjacent numbers of a row."""
    adjacent = max(1, min(4, dim // (2 * warps)))
    across = min(32, dim // adjacent)
    return gl.BlockedLayout([warps, 1, adjacent], [1, 32 // across, across], [1, warps, 1], [2, 1, 0])


@gluon.jit
def _low_bits(n):
    """int64 whose lowest n bits are set."""
    n = gl.minimum(gl.maximum(n, 0), 64)
    return gl.where(n < 64, (1 << (n & 63).to(gl.int64)) - 1, -1)


@gluon.jit
def _seen(p, start, end, bits, own, window, skip, WINDOWED: gl.constexpr, KEYS: gl.constexpr):
    """[W, ROWS]: bit i is set where a row sees the key at p + i; p int32 [W, 1], a row's bits and own place [1, ROWS].

    The rule is that of `_mask_scores`.
    """
    ahead = p - start
    cached = _low_bits(-ahead) + gl.zeros_like(bits)
    if WINDOWED:
        cached &= ~_low_bits(own - window + 1 - p)
    later = (bits >> gl.minimum(gl.maximum(ahead, 0), 63).to(gl.int64)) << gl.minimum(gl.maximum(-ahead, 0), 63).to(
        gl.int64
    )
    seen = cached | gl.where((ahead > -64) & (ahead < 64), later, 0)
    if WINDOWED:
        itself = own - p
        mine = gl.where((itself >= 0) & (itself < 64), 1 << (itself & 63).to(gl.int64), 0)
        seen &= ~_low_bits(skip - p) | mine
    seen &= _low_bits(end - p)
    return seen if KEYS > 32 else seen.to(gl.int32)


@gluon.jit
def _no_nan(values):
    """Replace NaN by the lowest number: 0 times NaN would be NaN; a row that sees the token gets NaN from its key."""
    lowest: gl.constexpr = "{ .reg .b32 low; mov.b32 low, 0xff7fff7f; max.bf16x2 $0, $1, low; }"
    return gl.inline_asm_elementwise(lowest, "=r,r", [values], gl.bfloat16, True, 2)


@gluon.jit
def _continue_softmax(
    qt, kt, vt, seen, peak, total, acc, scale, softcap,
    W: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, CAPPED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Each warp's softmax over KEYS more keys, in powers of 2. FIRST: nothing came before.

    qt [W, ROWS, DIM], kt [W, DIM, KEYS], vt [W, KEYS, DIM // 8, 8]; acc [W, ROWS, DIM] has dimension 8 i + j of a value
    at j * DIM // 8 + i.
    """
    PRODUCT: gl.constexpr = product_layout(W)
    vt = gl.reshape(gl.permute(_no_nan(vt), (0, 1, 3, 2)), (W, KEYS, DIM))
    vt = gl.convert_layout(vt, gl.DotOperandLayout(1, PRODUCT, 2), assert_trivial=True)
    s = mma_v2(qt, kt, gl.zeros((W, ROWS, KEYS), gl.float32, PRODUCT))
    factor = scale * LOG2_E
    if CAPPED:
        s = softcap * (2 / (1 + gl.exp2(-2 * factor / softcap * s)) - 1)
        factor = LOG2_E + 0.0 * scale
    i = gl.arange(0, KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(1, PRODUCT)))[None, None, :]
    s = gl.where(((seen[:, :, None] >> i) & 1) == 1, s, float("-inf"))
    top = gl.max(s, 2) * factor
    if not FIRST:
        top = gl.maximum(peak, top)
    safe = gl.where(top == float("-inf"), 0.0, top)
    e = gl.exp2(gl.fma(s, factor + gl.zeros_like(s), gl.zeros_like(s) - safe[:, :, None]))
    more = gl.sum(e, 2)
    if not FIRST:
        keep = gl.exp2(peak - safe)
        more += total * keep
        acc *= keep[:, :, None]
    et = gl.convert_layout(e.to(kt.dtype), gl.DotOperandLayout(0, PRODUCT, 2), assert_trivial=True)
    return top, more, mma_v2(et, vt, acc)


@gluon.jit
def _combine(peaks, sums, parts):
    """Merge parts of a softmax: peaks and sums [P, ROWS], parts [P, ROWS, DIM] -> [ROWS], [ROWS], [ROWS, DIM]."""
    top = gl.max(peaks, 0)
    safe = gl.where(top == float("-inf"), 0.0, top)
    e = gl.exp2(peaks - safe[None, :])
    return top, gl.sum(sums * e, 0), gl.sum(parts * e[:, :, None], 0)


@gluon.jit
def _combine_warps(peak, total, acc, W: gl.constexpr, DIM: gl.constexpr):
    """Merge the warps' parts through shared memory: the only barrier."""
    SUMS: gl.constexpr = _sum_layout(W, DIM)
    acc = gl.reshape(gl.permute(gl.reshape(acc, (W, ROWS, 8, DIM // 8)), (0, 1, 3, 2)), (W, ROWS, DIM))
    parts = gl.allocate_shared_memory(gl.float32, [W, ROWS, DIM], PARTS)
    peaks = gl.allocate_shared_memory(gl.float32, [W, ROWS], STATS)
    sums = gl.allocate_shared_memory(gl.float32, [W, ROWS], STATS)
    parts.store(acc)
    peaks.store(peak)
    sums.store(total)
    return _combine(peaks.load(gl.SliceLayout(2, SUMS)), sums.load(gl.SliceLayout(2, SUMS)), parts.load(SUMS))


@gluon.jit
def _of_row(x, LAYOUT: gl.constexpr):
    """[ROWS] -> [ROWS, 1], to broadcast over numbers [ROWS, DIM] in LAYOUT."""
    return gl.convert_layout(x, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]


@gluon.jit
def _combine_splits(
    top, total, y, live, at, parts, peaks, sums, counter, split, n, splits, W: gl.constexpr, DIM: gl.constexpr
):
    """Store the part of one of n splits. The last program to do so merges all of them, in order."""
    SUMS: gl.constexpr = _sum_layout(W, DIM)
    OUT: gl.constexpr = gl.SliceLayout(0, SUMS)
    part = at * splits
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))[None, :]
    gl.store(parts + _of_row(part + split, OUT) * DIM + d, y, mask=_of_row(live, OUT))
    gl.store(peaks + part + split, top, mask=live)
    gl.store(sums + part + split, total, mask=live)
    debug_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel") == n - 1
    if last:
        gl.store(counter, 0)
        c = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))[:, None]
        d3 = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))[None, None, :]
        top = gl.zeros_like(top) + float("-inf")
        total = gl.zeros_like(total)
        y = gl.zeros_like(y)
        for begin in range(0, n, W):
            inside = live[None, :] & (begin + c < n)
            place = part[None, :] + begin + c
            m = gl.load(peaks + place, mask=inside, other=float("-inf"))
            t = gl.load(sums + place, mask=inside, other=0.0)
            a = gl.load(parts + place[:, :, None] * DIM + d3, mask=inside[:, :, None], other=0.0)
            new_top, new_total, new = _combine(m, t, a)
            both = gl.maximum(top, new_top)
            safe = gl.where(both == float("-inf"), 0.0, both)
            keep = gl.exp2(top - safe)
            gain = gl.exp2(new_top - safe)
            total = total * keep + new_total * gain
            y = y * _of_row(keep, OUT) + new * _of_row(gain, OUT)
            top = both
    return total, y, last


@gluon.jit(
    do_not_specialize=["skip", "width", "pages", "groups", "rows_per_program", "splits", "chunk"],
    do_not_specialize_on_alignment=["table_ids", "starts", "widths", "ancestors", "depths", "offsets"],
)
def attend_direct(
    q, keys, values, block_tables, table_ids, starts, widths, ancestors, depths, offsets, out, parts, peaks, sums,
    counters, scale, softcap, window, skip, width, pages, groups, rows_per_program, splits, chunk,
    HEADS: gl.constexpr, KV: gl.constexpr, DIM: gl.constexpr, PAGE: gl.constexpr, KEYS: gl.constexpr,
    W: gl.constexpr, CAPPED: gl.constexpr, WINDOWED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `_attend_split` and `_combine_splits` (triton_attention.py): every n-th block, of W warps with KEYS keys each.

    A sequence is split where it has more than two blocks, `chunk` keys for each program: a multiple of a block.
    """
    if PDL:
        gdc_launch_dependents()
    b = gl.program_id(0) // groups
    g = gl.program_id(1)
    split = gl.program_id(2)
    GROUP: gl.constexpr = HEADS // KV
    BLOCK: gl.constexpr = W * KEYS
    PRODUCT: gl.constexpr = product_layout(W)
    QUERY: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 8)
    start = gl.load(starts + b).to(gl.int32)
    own_width = gl.load(widths + b).to(gl.int32)
    table = block_tables + gl.load(table_ids + b) * pages
    first_row = gl.program_id(0) % groups * rows_per_program
    first_head = (gl.load(offsets + b).to(gl.int32) + first_row) * HEADS + g * GROUP
    count = gl.minimum(rows_per_program, gl.minimum(own_width, width) - first_row) * GROUP  # real rows times heads
    end = start + own_width
    n = gl.where(end <= 2 * BLOCK, 1, gl.minimum((end + chunk - 1) // chunk, splits))
    if (split >= n) | (count <= 0):
        if PDL and split == 0:
            gdc_wait()  # a kernel that waits for this one relies on its wait for those before it
        return
    first = split * BLOCK
    if WINDOWED:  # skip blocks that no row sees
        unseen = gl.maximum(start - window, 0) // BLOCK
        first = (split + gl.maximum(unseen - split + n - 1, 0) // n * n) * BLOCK
    k_at, kp = key_places(keys, table, first, end, g, W, KEYS, KV, DIM, PAGE)
    v_at, vp = value_places(values, table, first, end, g, W, KEYS, KV, DIM, PAGE)
    kt = gl.load(k_at, mask=kp < start, other=0.0)
    vt = gl.load(v_at, mask=vp < start, other=0.0)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, PRODUCT)))
    row = b * width + first_row + r // GROUP
    bits = gl.load(ancestors + row, mask=r < count, other=0)[None, :]
    own = start + gl.load(depths + row, mask=r < count, other=0).to(gl.int32)[None, :]
    warp_first = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, PRODUCT)))[:, None] * KEYS
    seen = _seen(first + warp_first, start, end, bits, own, window, skip, WINDOWED, KEYS)
    rq = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, QUERY)))[None, :, None]
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, gl.SliceLayout(1, QUERY)))[None, None, :]
    warp = gl.arange(0, W, layout=gl.SliceLayout(1, gl.SliceLayout(2, QUERY)))[:, None, None]
    at = (first_head + rq // GROUP * HEADS + rq % GROUP).to(gl.int64) + 0 * warp
    q_at = q + at * DIM + d
    q_real = rq + 0 * warp < count
    if first + n * BLOCK < start:
        ask_for_block(keys, values, table, first + n * BLOCK, start, g, W, KEYS, KV, DIM, PAGE)
    if PDL:
        gdc_wait()
    qt = gl.load(q_at, mask=q_real, other=0.0)
    kt = gl.load(k_at, mask=(kp >= start) & (kp < end), other=kt)
    vt = gl.load(v_at, mask=(vp >= start) & (vp < end), other=vt)
    peak = gl.full((W, ROWS), float("-inf"), gl.float32, gl.SliceLayout(2, PRODUCT))
    total = gl.zeros((W, ROWS), gl.float32, gl.SliceLayout(2, PRODUCT))
    acc = gl.zeros((W, ROWS, DIM), gl.float32, PRODUCT)
    peak, total, acc = _continue_softmax(qt, kt, vt, seen, peak, total, acc, scale, softcap, W, KEYS, DIM, CAPPED, True)
    for block in range(first + n * BLOCK, end, n * BLOCK):
        k_at, kp = key_places(keys, table, block, end, g, W, KEYS, KV, DIM, PAGE)
        v_at, vp = value_places(values, table, block, end, g, W, KEYS, KV, DIM, PAGE)
        kt = gl.load(k_at, mask=kp < end, other=0.0)
        vt = gl.load(v_at, mask=vp < end, other=0.0)
        if block + n * BLOCK < start:
            ask_for_block(keys, values, table, block + n * BLOCK, start, g, W, KEYS, KV, DIM, PAGE)
        seen = _seen(block + warp_first, start, end, bits, own, window, skip, WINDOWED, KEYS)
        peak, total, acc = _continue_softmax(
            qt, kt, vt, seen, peak, total, acc, scale, softcap, W, KEYS, DIM, CAPPED, False
        )
    SUMS: gl.constexpr = _sum_layout(W, DIM)
    OUT: gl.constexpr = gl.SliceLayout(0, SUMS)
    top, sum_of, y = _combine_warps(peak, total, acc, W, DIM)
    r_out = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    live = r_out < count
    out_at = (first_head + r_out // GROUP * HEADS + r_out % GROUP).to(gl.int64)
    last = n == 1
    if n > 1:
        counter = counters + gl.program_id(0) * KV + g
        sum_of, y, last = _combine_splits(
            top, sum_of, y, live, out_at, parts, peaks, sums, counter, split, n, splits, W, DIM
        )
    if last:
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUT))[None, :]
        result = (y / _of_row(sum_of, OUT)).to(out.dtype.element_ty)
        gl.store(out + _of_row(out_at, OUT) * DIM + column, result, mask=_of_row(live, OUT))
