"""Attention over the paged cache in Triton: decoding, chains and trees, keys split between programs.

One program takes one sequence, one key/value head and every SPLITS-th block of keys, for all rows
and all query heads of that group; a second kernel puts the splits together, in order. Which blocks
a split takes is counted from the text's beginning, so that a row's sum is split the same way
whatever rows stand beside it. The longest text a pass can take is bounded by its page table alone:
one recorded pass serves every length.

`attend_block` in kernels/attention.py is the plain reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # keys a program takes at a time
JOIN = 16  # splits put together at a time
HEADS_AT_ONCE = 8  # heads one program turns


@triton.jit(do_not_specialize=["width", "nowhere"])
def _rotate_and_store(
    qkv, turns, norms, tables, seats, starts, widths, depths, q_out, keys, values, width, pages, nowhere, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, AT_ONCE: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A few heads of one row: turn queries and keys (dimensions in pairs), write keys and values to their slot.

    NORMED: each query and key head is normed first, by its own weight in norms [H + KV, D].
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = row // width
    w = row % width
    start = tl.load(starts + b)
    place = start + w
    real = w < tl.load(widths + b)
    page = tl.load(tables + tl.load(seats + b) * pages + place // PAGE, mask=real, other=0)
    slot = tl.where(real, page.to(tl.int64) * PAGE + place % PAGE, nowhere)
    HALF: tl.constexpr = DIM // 2
    TOTAL: tl.constexpr = HEADS + 2 * KV
    d = tl.arange(0, DIM)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = (head < TOTAL)[:, None]
    x = tl.load(qkv + (row.to(tl.int64) * TOTAL + head[:, None]) * DIM + d[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    still = (head >= HEADS + KV)[:, None]  # values are not turned
    if NORMED:
        weight = tl.load(norms + head[:, None] * DIM + d[None, :], mask=(head < HEADS + KV)[:, None], other=0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
        x = tl.where(still, x, x * scale[:, None] * weight)
    a, b_ = tl.split(tl.reshape(x, (AT_ONCE, HALF, 2)))
    turn = tl.load(turns + (start + tl.load(depths + row)) * DIM + d)
    c, s = tl.split(tl.reshape(turn, (HALF, 2)))
    c = tl.where(still, 1.0, c[None, :])
    s = tl.where(still, 0.0, s[None, :])
    y = tl.reshape(tl.join(a * c - b_ * s, b_ * c + a * s), (AT_ONCE, DIM)).to(q_out.dtype.element_ty)
    to_q = q_out + (row.to(tl.int64) * HEADS + head[:, None]) * DIM + d[None, :]
    to_k = keys + (slot * KV + head[:, None] - HEADS) * DIM + d[None, :]
    to_v = values + (slot * KV + head[:, None] - HEADS - KV) * DIM + d[None, :]
    tl.store(to_q, y, mask=(head < HEADS)[:, None])
    tl.store(to_k, y, mask=((head >= HEADS) & (head < HEADS + KV))[:, None])
    tl.store(to_v, y, mask=still & inside)


@triton.jit
def keys_and_values(
    keys, values, table, p, end, g, KV: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr
):  # fmt: skip
    """Of key/value head g at positions p below `end`: keys [DIM, len(p)] and values [len(p), DIM]; 0 beyond."""
    d = tl.arange(0, DIM)
    inside = p < end
    page = tl.load(table + p // PAGE, mask=inside, other=0)
    slot = page.to(tl.int64) * PAGE + p % PAGE
    kt = tl.load(keys + (slot[None, :] * KV + g) * DIM + d[:, None], mask=inside[None, :], other=0.0)
    vt = tl.load(values + (slot[:, None] * KV + g) * DIM + d[None, :], mask=inside[:, None], other=0.0)
    return kt, vt


@triton.jit
def scores(qt, kt, scale, softcap, CAPPED: tl.constexpr):
    """[rows, keys] of queries [rows, DIM] and keys [DIM, keys]."""
    s = tl.dot(qt, kt) * scale
    if CAPPED:
        s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
    return s


@triton.jit
def take_in(s, vt, peak, total, acc):
    """A softmax goes on over more keys: scores [rows, keys], -inf where unseen, and values [keys, DIM]."""
    top = tl.maximum(peak, tl.max(s, 1))
    safe = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp(peak - safe)
    e = tl.exp(s - safe[:, None])
    vt = tl.where(vt == vt, vt, 0.0)  # nothing times NaN would be NaN; who sees the row has NaN from its key
    acc = acc * keep[:, None] + tl.dot(e.to(vt.dtype), vt)
    return top, total * keep + tl.sum(e, 1), acc


@triton.jit(do_not_specialize=["width"])
def _attend_split(
    q, keys, values, tables, seats, starts, widths, ancestors, depths, parts, peaks, sums,
    scale, softcap, window, width, pages,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows w of sequence b, heads of group g: softmax over every SPLITS-th block of keys, not yet normalised.

    Row w sees the text before `starts[b]`, and of the rows scored now those whose bit is set
    in ancestors[b, w]. What a row does not see counts for nothing, be it NaN.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    g = tl.program_id(1)
    split = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    start = tl.load(starts + b)
    end = start + tl.maximum(tl.load(widths + b), 1)
    if split * BLOCK < end:
        table = tables + tl.load(seats + b) * pages
        r = tl.arange(0, ROWS)  # row w and head h of the group, packed: r = w * GROUP + h
        w = r // GROUP
        real = w < width
        d = tl.arange(0, DIM)
        head = g * GROUP + r % GROUP
        at = ((b * width + w) * HEADS + head).to(tl.int64)
        qt = tl.load(q + at[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0)  # [ROWS, DIM]
        bits = tl.load(ancestors + b * width + w, mask=real, other=0)
        own = start + tl.load(depths + b * width + w, mask=real, other=0)
        peak = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((ROWS,), dtype=tl.float32)
        acc = tl.zeros((ROWS, DIM), dtype=tl.float32)
        first = split * BLOCK
        if WINDOWED:  # blocks that no row sees are passed over
            unseen = tl.maximum(start - window, 0) // BLOCK
            first = (split + tl.maximum(unseen - split + SPLITS - 1, 0) // SPLITS * SPLITS) * BLOCK
        for block in range(first, end, SPLITS * BLOCK):
            p = block + tl.arange(0, BLOCK)
            kt, vt = keys_and_values(keys, values, table, p, end, g, KV, DIM, PAGE)
            s = scores(qt, kt, scale, softcap, CAPPED)  # [ROWS, BLOCK]
            ahead = p[None, :] - start
            seen = (ahead < 0) | (((bits[:, None] >> tl.maximum(ahead, 0)) & 1) == 1)
            if WINDOWED:
                seen = seen & ((ahead >= 0) | (p[None, :] > own[:, None] - window))
            s = tl.where(seen & (p < end)[None, :], s, float("-inf"))
            peak, total, acc = take_in(s, vt, peak, total, acc)
        out = at * SPLITS + split
        tl.store(parts + out[:, None] * DIM + d[None, :], acc, mask=real[:, None])
        tl.store(peaks + out, peak, mask=real)
        tl.store(sums + out, total, mask=real)


@triton.jit(do_not_specialize=["width"])
def _join_splits(
    parts, peaks, sums, starts, widths, out, width,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row and head: the splits' sums under a common peak, in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    end = tl.load(starts + row // width) + tl.maximum(tl.load(widths + row // width), 1)
    used = tl.minimum(tl.cdiv(end, BLOCK), SPLITS)
    base = (row * HEADS + head).to(tl.int64) * SPLITS
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


@dataclass(frozen=True, slots=True)
class Batch:
    """Who attends to what: B sequences of `width` rows each, N = B * width."""

    tables: Tensor  # [all seats, pages] int32: the pages of every text
    seats: Tensor  # [B] int64: each sequence's row of `tables`
    starts: Tensor  # [B] int64: text in the cache
    widths: Tensor  # [B] int64: how many of a sequence's rows are real; the rest fill up
    ancestors: Tensor  # [N] int64: bit j of row w set where it sees row j
    depths: Tensor  # [N] int64: position less start
    width: int
    splits: int
    """Between how many programs a sequence's keys are split; at most MOST_SPLITS."""


MOST_SPLITS = 64
ROWS_TIMES_SPLITS = 2048
"""What a workspace has room for."""


class Workspace:
    """Partial sums of passes whose rows times splits are at most `most`."""

    def __init__(self, most: int, heads: int, dim: int, device: torch.device) -> None:
        self.parts = torch.empty(most * heads * dim, dtype=torch.float32, device=device)
        self.peaks = torch.empty(most * heads, dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.peaks)


def splits_for(batch: int, width: int, kv_heads: int) -> int:
    """So many splits that a pass fills the chip about four times over, and that the workspace has room for."""
    wanted = min(MOST_SPLITS, triton.next_power_of_2(max(1, 528 // (batch * kv_heads))))
    return min(wanted, 1 << (ROWS_TIMES_SPLITS // (batch * width)).bit_length() - 1)


def rotate_and_store(
    qkv: Tensor,
    turns: Tensor,
    batch: Batch,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    *,
    nowhere: int,
    norms: Tensor | None = None,
    eps: float = 0.0,
    page: int = 16,
    pdl: bool = True,
) -> None:
    """qkv [N, (H + 2 KV) * D] -> rotated q [N, H, D]; the cache, keys and values [slots, KV, D], takes the rest.

    turns [positions, D/2, 2]: cosine and sine of each position and pair. nowhere: the slot of rows that only fill up.
    norms float32 [H + KV, D]: norm each query and key head first.
    """
    n, heads, dim = q.shape
    keys, values = cache
    kv = keys.shape[1]
    _rotate_and_store[(n, triton.cdiv(heads + 2 * kv, HEADS_AT_ONCE))](
        qkv, turns, turns if norms is None else norms, batch.tables, batch.seats, batch.starts, batch.widths,
        batch.depths, q, keys, values, batch.width, batch.tables.shape[1], nowhere, eps,
        heads, kv, dim, page, HEADS_AT_ONCE, norms is not None, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: Batch,
    out: Tensor,
    work: Workspace,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
    page: int = 16,
    pdl: bool = True,
) -> None:
    """q [N, H, D] over cached keys and values [slots, KV, D] -> out [N, H, D]."""
    n, heads, dim = q.shape
    kv = keys.shape[1]
    rows = max(16, triton.next_power_of_2(batch.width * (heads // kv)))
    _attend_split[(n // batch.width, kv, batch.splits)](
        q, keys, values, batch.tables, batch.seats, batch.starts, batch.widths, batch.ancestors, batch.depths,
        work.parts, work.peaks, work.sums, scale, softcap, window, batch.width, batch.tables.shape[1],
        heads, kv, dim, rows, page, BLOCK, batch.splits, softcap > 0, window > 0, pdl,
        num_warps=8 if rows >= 128 else 4, num_stages=3 if rows < 128 else 2, launch_pdl=pdl,
    )  # fmt: skip
    _join_splits[(n, heads)](
        work.parts, work.peaks, work.sums, batch.starts, batch.widths, out, batch.width,
        heads, dim, BLOCK, batch.splits, min(JOIN, batch.splits), pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
