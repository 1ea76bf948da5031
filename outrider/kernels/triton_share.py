"""How the drafts of a round share the rows of a pass, in Triton: the function of share.py, one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_CHUNK = tl.constexpr(32)
"""Sequences that a program compares its own with at a time."""


@triton.jit
def load_chance(chances, at, live):
    """A drafter's chance for a token, clamped to between 0 and 1; NaN counts as 0."""
    x = tl.load(chances + at, mask=live, other=0.0)
    return tl.where(x == x, tl.minimum(tl.maximum(x, 0.0), 1.0), 0.0)


@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["tokens", "chances", "room", "total"])
def _share(
    tokens, chances, room, total, batch, LEVELS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One draft: for each of its tokens, count the tokens of all drafts that precede it. Every program multiplies
    chances in the same order, so that equal products are equal in bits.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    level_of = tl.arange(0, WIDE)
    own = tl.zeros((WIDE,), dtype=tl.float32)
    so_far = tl.full((), 1.0, dtype=tl.float32)
    for level in tl.static_range(LEVELS):
        so_far *= load_chance(chances, b * LEVELS + level, True)
        own = tl.where(level_of == level, so_far, own)
    ahead = tl.zeros((WIDE,), dtype=tl.int32)
    for first in range(0, batch, CHUNK):
        other = first + tl.arange(0, CHUNK)
        live = other < batch
        most = tl.load(room + other, mask=live, other=0)
        path = tl.full((CHUNK,), 1.0, dtype=tl.float32)
        for level in tl.static_range(LEVELS):
            path *= load_chance(chances, other * LEVELS + level, live)
            nearer = (level < level_of[:, None]) | ((level == level_of[:, None]) & (other[None, :] < b))
            before = (path[None, :] > own[:, None]) | ((path[None, :] == own[:, None]) & nearer)
            ahead += tl.sum((before & (level < most)[None, :]).to(tl.int32), 1)
    kept = (level_of < tl.load(room + b)) & (ahead < tl.load(total))
    at = tokens + b * LEVELS + level_of
    token = tl.load(at, mask=level_of < LEVELS, other=0)
    tl.store(at, tl.where(kept, token, -1), mask=level_of < LEVELS)


def share_tokens(tokens: Tensor, chances: Tensor, room: Tensor, total: Tensor, *, pdl: bool = True) -> None:
    """As the plain `share_tokens`, in place. chances float32, total int64 [1] on the device; all contiguous."""
    batch, levels = tokens.shape
    _share[(batch,)](
        tokens, chances, room, total, batch, levels, triton.next_power_of_2(levels), _CHUNK, pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
