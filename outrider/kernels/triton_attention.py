"""Attention over the paged cache in Triton: decoding, chains and trees, keys split between programs.

One program computes one sequence, one key/value head and every n-th block of keys, for all rows and all query heads of
that group; a second kernel combines the n splits in order (flash decoding). The number of splits follows the length of
the sequence, or is always the same where a row's bits must not depend on the other rows. Only the block tables bound
the length of a sequence: one captured pass serves every length.

Few rows of few sequences take the kernel of triton_direct_attention.py instead, unless the number of splits is fixed.
`attend_pages` in kernels/attention.py is the plain reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import MAX_DIRECT_PROGRAMS, AttentionBatch, AttentionWorkspace
from outrider.kernels.triton_direct_attention import attend_direct

KEY_BLOCK = 64  # keys a program loads at a time
SPLITS_PER_STEP = 16  # splits combined at a time
NO_WINDOW = 1 << 30  # longer than any text
DIRECT = not triton.knobs.runtime.interpret
"""Whether few rows take the kernel whose operands go straight to the tensor cores: the interpreter cannot run it."""
DIRECT_ROWS = 16  # rows times query heads of a group, in one of its programs
DIRECT_WARPS = 8
DIRECT_CHUNK = 256  # keys of a program before a sequence is split further
MULTIPROCESSORS = 132  # of an H200; one program fills one


@triton.jit
def load_keys_values(
    keys, values, table, p, begin, end, g, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Keys [DIM, len(p)] and values [len(p), DIM] of key/value head g at positions begin <= p < end; 0 elsewhere."""
    d = tl.arange(0, DIM)
    inside = (p >= begin) & (p < end)
    page = tl.load(table + p // PAGE, mask=inside, other=0)
    slot = page.to(tl.int64) * PAGE + p % PAGE
    kt = tl.load(keys + (slot[None, :] * KV + g) * DIM + d[:, None], mask=inside[None, :], other=0.0)
    vt = tl.load(values + (slot[:, None] * KV + g) * DIM + d[None, :], mask=inside[:, None], other=0.0)
    return kt, vt


@triton.jit
def attention_scores(qt, kt, scale, softcap, CAPPED: tl.constexpr):
    """Scores [rows, keys] of queries [rows, DIM] and keys [DIM, keys]."""
    s = tl.dot(qt, kt) * scale
    if CAPPED:
        s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
    return s


@triton.jit
def online_softmax(s, vt, peak, total, acc):
    """Continue a softmax over more keys: scores [rows, keys], -inf where masked, and values [keys, DIM]."""
    top = tl.maximum(peak, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp(peak - safe)
    e = tl.exp(s - safe[:, None])
    vt = tl.where(vt == vt, vt, 0.0)  # 0 times NaN would be NaN; a row that sees the token has NaN from its key
    acc = acc * keep[:, None] + tl.dot(e.to(vt.dtype), vt)
    return top, total * keep + tl.sum(e, 1), acc


@triton.jit
def _mask_scores(s, p, start, end, bits, own, window, skip, WINDOWED: tl.constexpr):
    """Scores [ROWS, BLOCK] of keys at p, -inf where a row does not see the key."""
    ahead = p[None, :] - start
    seen = (ahead < 0) | (((bits[:, None] >> tl.maximum(ahead, 0)) & 1) == 1)
    if WINDOWED:
        seen = seen & ((ahead >= 0) | (p[None, :] > own[:, None] - window))
        seen = seen & ((p >= skip)[None, :] | (p[None, :] == own[:, None]))
    return tl.where(seen & (p < end)[None, :], s, float("-inf"))


@triton.jit
def _num_splits(end, splits, chunk):
    """The number of programs that `end` keys are split between."""
    return tl.minimum(tl.cdiv(end, chunk), splits)


# A variant is compiled for each number of packed rows, not for each shape of pass: splits are arguments, and inputs are
# parts of one tensor, whose alignment does not matter.
@triton.jit(
    do_not_specialize=["skip", "width", "pages", "groups", "rows_per_program", "splits", "chunk"],
    do_not_specialize_on_alignment=["table_ids", "starts", "widths", "ancestors", "depths", "offsets"],
)
def _attend_split(
    q, keys, values, block_tables, table_ids, starts, widths, ancestors, depths, offsets, out, parts, peaks, sums,
    scale, softcap, window, skip, width, pages, groups, rows_per_program, splits, chunk,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows w of sequence b, heads of group g: softmax over every n-th block of keys, for one of n splits.

    Row w, at offsets[b] + w among all, sees the text before `starts[b]`, and those rows of the pass whose bits are set
    in ancestors[b, w]. Keys and values that a row does not see do not affect it, even where they are NaN. With
    programmatic dependent launch the first block of cached keys is loaded while the kernel before still runs: that one
    writes the queries, keys and values of this pass.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    b = tl.program_id(0) // groups
    g = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    start = tl.load(starts + b).to(tl.int32)
    own_width = tl.load(widths + b).to(tl.int32)
    first_row = tl.program_id(0) % groups * rows_per_program
    end = start + own_width
    n = _num_splits(end, splits, chunk)
    if (split < n) & (split * BLOCK < end) & (first_row < own_width):
        table = block_tables + tl.load(table_ids + b) * pages
        r = tl.arange(0, ROWS)  # row w and head h of the group, packed
        w = first_row + r // GROUP
        real = (r < rows_per_program * GROUP) & (w < tl.minimum(own_width, width))
        d = tl.arange(0, DIM)
        at = ((tl.load(offsets + b).to(tl.int32) + w) * HEADS + g * GROUP + r % GROUP).to(tl.int64)
        bits = tl.load(ancestors + b * width + w, mask=real, other=0)
        own = start + tl.load(depths + b * width + w, mask=real, other=0).to(tl.int32)
        first = split * BLOCK
        if WINDOWED:  # skip blocks that no row sees
            unseen = tl.maximum(start - window, 0) // BLOCK
            first = (split + tl.maximum(unseen - split + n - 1, 0) // n * n) * BLOCK
        p = first + tl.arange(0, BLOCK)
        kt, vt = load_keys_values(keys, values, table, p, 0, start, g, KV, DIM, PAGE)
        if PDL:
            tl.extra.cuda.gdc_wait()
        qt = tl.load(q + at[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0)  # [ROWS, DIM]
        if first + BLOCK > start:
            k_new, v_new = load_keys_values(keys, values, table, p, start, end, g, KV, DIM, PAGE)
            kt = tl.where((p < start)[None, :], kt, k_new)
            vt = tl.where((p < start)[:, None], vt, v_new)
        s = _mask_scores(
            attention_scores(qt, kt, scale, softcap, CAPPED), p, start, end, bits, own, window, skip, WINDOWED
        )
        peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
        peak, total, acc = online_softmax(s, vt, peak, total, acc)
        for block in range(first + n * BLOCK, end, n * BLOCK):
            p = block + tl.arange(0, BLOCK)
            kt, vt = load_keys_values(keys, values, table, p, 0, end, g, KV, DIM, PAGE)
            s = _mask_scores(
                attention_scores(qt, kt, scale, softcap, CAPPED), p, start, end, bits, own, window, skip, WINDOWED
            )
            peak, total, acc = online_softmax(s, vt, peak, total, acc)
        if tl.minimum(tl.cdiv(end, BLOCK), n) == 1:
            y = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + at[:, None] * DIM + d[None, :], y, mask=real[:, None])
        else:
            part = at * splits + split
            tl.store(parts + part[:, None] * DIM + d[None, :], acc, mask=real[:, None])
            tl.store(peaks + part, peak, mask=real)
            tl.store(sums + part, total, mask=real)


@triton.jit(
    do_not_specialize=["width", "splits", "chunk"],
    do_not_specialize_on_alignment=["starts", "widths", "row_index"],
)
def _combine_splits(
    parts, peaks, sums, starts, widths, row_index, out, width, splits, chunk,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One real row and head: add the splits' sums in order, under a common peak. One split is already the result."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    place = tl.load(row_index + row)
    b = tl.maximum(place, 0) // width
    own_width = tl.load(widths + b)
    end = (tl.load(starts + b) + own_width).to(tl.int32)
    used = tl.minimum(tl.cdiv(end, BLOCK), _num_splits(end, splits, chunk))
    base = (row * HEADS + head).to(tl.int64) * splits
    if PDL:
        tl.extra.cuda.gdc_wait()  # always: a kernel that waits for this one relies on its wait for those before it
    if (used == 1) | (place < b * width) | (place >= b * width + own_width):
        return
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros((DIM,), dtype=tl.float32)
    for first in range(0, used, STEP):
        c = first + tl.arange(0, STEP)
        m = tl.load(peaks + base + c, mask=c < used, other=float("-inf"))
        top = tl.maximum(peak, tl.max(m, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        e = tl.exp(m - safe)
        t = tl.load(sums + base + c, mask=c < used, other=0.0)
        a = tl.load(parts + (base + c)[:, None] * DIM + d[None, :], mask=(c < used)[:, None], other=0.0)
        keep = tl.exp(peak - safe)
        acc = acc * keep + tl.sum(a * e[:, None], 0)
        total = total * keep + tl.sum(t * e, 0)
        peak = top
    tl.store(out + (row * HEADS + head) * DIM + d, (acc / total).to(out.dtype.element_ty))


MAX_KV_SPLITS = 64
MAX_ROW_SPLITS = 2048
"""Max rows times splits of a pass, which a workspace has room for."""


def choose_kv_splits(batch: int, rows: int, kv_heads: int) -> tuple[int, int]:
    """`splits` and `chunk` of an AttentionBatch that fill the GPU once at a few hundred keys a sequence.

    rows: of all sequences. Longer sequences are split further, up to what the workspace holds and 1024 programs, since
    idle ones cost time.
    """
    pairs = batch * kv_heads
    most = min(MAX_KV_SPLITS, max(1, 1024 // pairs), MAX_ROW_SPLITS // rows)
    return 1 << most.bit_length() - 1, max(KEY_BLOCK, triton.next_power_of_2(2 * pairs))


def choose_rows_per_program(batch: int, width: int, heads: int, kv_heads: int) -> int:
    """The number of rows of a sequence that share a program: fewer finish sooner where few programs leave the GPU idle.

    Measured on an H200 after 384 tokens: six rows of a 1.5B model in 1.386 ms instead of 1.488, eight sequences of six
    in 1.979 instead of 2.122. With more programs, loading the same keys in several of them costs more than that saves.
    """
    pairs = batch * kv_heads
    packed = 16 if pairs <= 4 else 32 if pairs <= 16 else width * heads
    return min(width, max(1, packed * kv_heads // heads))


def launch_options(rows: int) -> dict[str, int]:
    """Warps, stages and registers of a program of `rows` packed rows: by rows alone, since last bits depend on them.

    Eight warps finish a block sooner than four. With more than 128 registers each, a multiprocessor holds one program
    and not two, which costs time on long sequences.
    """
    if rows <= 32:
        return {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
    return {"num_warps": 4, "num_stages": 3} if rows < 128 else {"num_warps": 8, "num_stages": 2}


def _direct_groups(q: Tensor, keys: Tensor, batch: AttentionBatch) -> tuple[int, int]:
    """Rows of a sequence in one program of the kernel for few rows, and the number of programs for all of its rows."""
    rows = min(batch.width, DIRECT_ROWS * keys.shape[1] // q.shape[1])
    return rows, triton.cdiv(batch.width, rows)


def direct_splits(q: Tensor, keys: Tensor, batch: AttentionBatch, page: int) -> int:
    """Max programs that a sequence's keys are split between in the kernel for few rows; 0: the other kernel suits.

    The limits were measured on an H200 after 128 to 4000 tokens. Where every sequence is split alike (chunk is 0) a
    row's bits must not depend on the batch, so the choice of kernel must not either.
    """
    heads, kv, dim = q.shape[1], *keys.shape[1:]
    if not DIRECT or not batch.chunk or heads > DIRECT_ROWS * kv or q.dtype != torch.bfloat16:
        return 0
    (rows, groups), sequences = _direct_groups(q, keys, batch), len(batch.starts)
    programs = sequences * groups * kv
    fewest = {64: 1, 128: 8}.get(dim, MAX_DIRECT_PROGRAMS + 1)  # with dim 128, two programs take too long for 1000 keys
    if page != 16 or not fewest <= programs <= MAX_DIRECT_PROGRAMS:
        return 0
    busy = min(programs, (sequences + len(q) // rows) * kv)  # of packed rows: other programs have none and end at once
    return max(1, min(batch.splits, MULTIPROCESSORS // busy))


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: AttentionBatch,
    out: Tensor,
    work: AttentionWorkspace,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    skip: int = 0,
    page: int = 16,
    pdl: bool = True,
) -> None:
    """q [N, H, D] over cached keys and values [slots, KV, D] -> out [N, H, D], of which only real rows are written."""
    window = window or (skip and NO_WINDOW)
    n, heads, dim = q.shape
    kv = keys.shape[1]
    if splits := direct_splits(q, keys, batch, page):
        rows_per_program, groups = _direct_groups(q, keys, batch)
        attend_direct[(len(batch.starts) * groups, kv, splits)](
            q, keys, values, batch.block_tables, batch.table_ids, batch.starts, batch.widths, batch.ancestors,
            batch.depths, batch.packing.offsets, out, work.parts, work.peaks, work.sums, work.counters, scale, softcap,
            window, skip, batch.width, batch.block_tables.shape[1], groups, rows_per_program, splits, DIRECT_CHUNK,
            heads, kv, dim, page, 2048 // dim, DIRECT_WARPS, softcap > 0, window > 0, pdl,
            num_warps=DIRECT_WARPS, launch_pdl=pdl,
        )  # fmt: skip
        return
    rows_per_program = batch.rows_per_program or choose_rows_per_program(len(batch.starts), batch.width, heads, kv)
    rows = max(16, triton.next_power_of_2(rows_per_program * (heads // kv)))
    groups = triton.cdiv(batch.width, rows_per_program)
    chunk = batch.chunk or 1  # 1: one program for each block of keys, up to `splits`
    _attend_split[(len(batch.starts) * groups, kv, batch.splits)](
        q, keys, values, batch.block_tables, batch.table_ids, batch.starts, batch.widths, batch.ancestors, batch.depths,
        batch.packing.offsets, out, work.parts, work.peaks, work.sums, scale, softcap, window, skip, batch.width,
        batch.block_tables.shape[1], groups, rows_per_program, batch.splits, chunk, heads, kv, dim, rows, page,
        KEY_BLOCK, softcap > 0, window > 0, pdl, launch_pdl=pdl, **launch_options(rows),
    )  # fmt: skip
    _combine_splits[(n, heads)](
        work.parts, work.peaks, work.sums, batch.starts, batch.widths, batch.packing.row_index, out, batch.width,
        batch.splits, chunk, heads, dim, KEY_BLOCK, min(SPLITS_PER_STEP, batch.splits), pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
