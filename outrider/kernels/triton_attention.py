"""Attention over the paged cache in Triton: decoding, chains and trees, keys split between programs.

One program takes one sequence, one key/value head and CHUNK keys, for all rows and all query
heads of that group; a second kernel puts the chunks together, in order. A chunk is a fixed
number of keys counted from the text's beginning, so that a row's sum is split the same way
whatever rows stand beside it.

`attend_block` in kernels/attention.py is the plain reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 128  # keys a program takes
BLOCK = 64  # keys it takes at a time
JOIN = 16  # chunks put together at a time


@triton.jit
def _rotate_and_store(
    qkv, turns, positions, slots, q_out, keys, values,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and head: turn a query or a key (dimensions in pairs), write keys and values to their slot."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = DIM // 2
    i = tl.arange(0, HALF)
    base = qkv + (row * (HEADS + 2 * KV) + head) * DIM
    a = tl.load(base + 2 * i).to(tl.float32)
    b = tl.load(base + 2 * i + 1).to(tl.float32)
    slot = tl.load(slots + row)
    if head >= HEADS + KV:
        out = values + (slot * KV + head - HEADS - KV) * DIM
        tl.store(out + 2 * i, a.to(values.dtype.element_ty))
        tl.store(out + 2 * i + 1, b.to(values.dtype.element_ty))
    else:
        turn = turns + tl.load(positions + row) * DIM
        c = tl.load(turn + 2 * i)
        s = tl.load(turn + 2 * i + 1)
        out = q_out + (row * HEADS + head) * DIM
        if head >= HEADS:
            out = keys + (slot * KV + head - HEADS) * DIM
        tl.store(out + 2 * i, (a * c - b * s).to(q_out.dtype.element_ty))
        tl.store(out + 2 * i + 1, (b * c + a * s).to(q_out.dtype.element_ty))


@triton.jit
def _attend_chunk(
    q, keys, values, tables, starts, ancestors, depths, parts, peaks, sums,
    scale, softcap, window, width, pages, chunks,
    HEADS: tl.constexpr, KV: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr, WINDOWED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows w of sequence b, heads of group g: softmax over CHUNK keys, not yet normalised.

    Row w sees the text before `starts[b]`, and of the rows scored now those whose bit is set
    in ancestors[b, w]. What a row does not see counts for nothing, be it NaN.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    g = tl.program_id(1)
    c = tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV
    start = tl.load(starts + b)
    end = start + width
    first = c * CHUNK
    if first < end:
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
        for block in range(first, min(first + CHUNK, end), BLOCK):
            p = block + tl.arange(0, BLOCK)
            inside = p < end
            page = tl.load(tables + b * pages + p // PAGE, mask=inside, other=0)
            slot = page.to(tl.int64) * PAGE + p % PAGE
            kt = tl.load(keys + (slot[None, :] * KV + g) * DIM + d[:, None], mask=inside[None, :], other=0.0)
            s = tl.dot(qt, kt) * scale  # [ROWS, BLOCK]
            if CAPPED:
                s = softcap * (2 * tl.sigmoid(2 * s / softcap) - 1)
            ahead = p[None, :] - start
            seen = (ahead < 0) | (((bits[:, None] >> tl.maximum(ahead, 0)) & 1) == 1)
            if WINDOWED:
                seen = seen & ((ahead >= 0) | (p[None, :] > own[:, None] - window))
            s = tl.where(seen & inside[None, :], s, float("-inf"))
            top = tl.maximum(peak, tl.max(s, 1))
            safe = tl.where(top == float("-inf"), 0.0, top)
            keep = tl.exp(peak - safe)
            e = tl.exp(s - safe[:, None])
            vt = tl.load(values + (slot[:, None] * KV + g) * DIM + d[None, :], mask=inside[:, None], other=0.0)
            vt = tl.where(vt == vt, vt, 0.0)  # nothing times NaN would be NaN; who sees the row has NaN from its key
            acc = acc * keep[:, None] + tl.dot(e.to(vt.dtype), vt)
            total = total * keep + tl.sum(e, 1)
            peak = top
        out = at * chunks + c
        tl.store(parts + out[:, None] * DIM + d[None, :], acc, mask=real[:, None])
        tl.store(peaks + out, peak, mask=real)
        tl.store(sums + out, total, mask=real)


@triton.jit
def _join_chunks(
    parts, peaks, sums, starts, out, width, chunks,
    HEADS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row and head: the chunks' sums under a common peak, in order."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, DIM)
    used = tl.cdiv(tl.load(starts + row // width) + width, CHUNK)
    base = (row * HEADS + head).to(tl.int64) * chunks
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

    tables: Tensor  # [B, pages] int32
    starts: Tensor  # [B] int32: text in the cache
    ancestors: Tensor  # [N] int64: bit j of row w set where it sees row j
    depths: Tensor  # [N] int32: position less start
    width: int
    chunks: int
    """Chunks that the longest text may need."""


class Workspace:
    """Partial sums of at most `rows` rows and `chunks` chunks."""

    def __init__(self, rows: int, heads: int, dim: int, chunks: int, device: torch.device) -> None:
        self.parts = torch.empty(rows * heads * chunks * dim, dtype=torch.float32, device=device)
        self.peaks = torch.empty(rows * heads * chunks, dtype=torch.float32, device=device)
        self.sums = torch.empty_like(self.peaks)


def rotate_and_store(
    qkv: Tensor,
    turns: Tensor,
    positions: Tensor,
    slots: Tensor,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    pdl: bool = True,
) -> None:
    """qkv [N, (H + 2 KV) * D] -> rotated q [N, H, D]; the cache, keys and values [slots, KV, D], takes the rest.

    turns [positions, D/2, 2]: cosine and sine of each position and pair.
    """
    n, heads, dim = q.shape
    keys, values = cache
    kv = keys.shape[1]
    _rotate_and_store[(n, heads + 2 * kv)](
        qkv, turns, positions, slots, q, keys, values, heads, kv, dim, pdl, num_warps=1, launch_pdl=pdl
    )


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
    _attend_chunk[(n // batch.width, kv, batch.chunks)](
        q, keys, values, batch.tables, batch.starts, batch.ancestors, batch.depths, work.parts, work.peaks, work.sums,
        scale, softcap, window, batch.width, batch.tables.shape[1], batch.chunks,
        heads, kv, dim, rows, page, CHUNK, BLOCK, softcap > 0, window > 0, pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    _join_chunks[(n, heads)](
        work.parts, work.peaks, work.sums, batch.starts, out, batch.width, batch.chunks,
        heads, dim, CHUNK, JOIN, pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
