"""Replace a head's chain by what a lookup found, in Triton: the function of overlay.py, one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.lookup import MAX_CHANCE
from outrider.kernels.triton_share import load_chance

_MAX_CHANCE = tl.constexpr(float(MAX_CHANCE))


@triton.jit(do_not_specialize=["k"], do_not_specialize_on_alignment=["tokens", "chances", "found"])
def _overlay(tokens, chances, found, k, LEVELS: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr):
    """One text: compare the expected accepted tokens of its chain and of what was found, added up token by token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    row = found + b * (2 * k + 5)
    level_of = tl.arange(0, WIDE)
    draft = tl.load(row + level_of, mask=(level_of < k) & (level_of < LEVELS), other=-1)
    count = tl.sum((draft >= 0).to(tl.int32), 0)
    chance = tl.div_rn(tl.load(row + 2 * k + 4).to(tl.float32), _MAX_CHANCE)
    own, own_worth = tl.full((), 1.0, dtype=tl.float32), tl.zeros((), dtype=tl.float32)
    path, worth = tl.full((), 1.0, dtype=tl.float32), tl.zeros((), dtype=tl.float32)
    for level in tl.static_range(LEVELS):
        own *= load_chance(chances, b * LEVELS + level, True)
        own_worth += own
        path *= tl.where(level < count, chance, 0.0)
        worth += path
    at, written = b * LEVELS + level_of, level_of < tl.where(worth > own_worth, LEVELS, 0)
    tl.store(tokens + at, tl.where(level_of < count, draft, -1), mask=written)
    tl.store(chances + at, tl.where(level_of < count, chance, 0.0), mask=written)


def overlay_chains(tokens: Tensor, chances: Tensor, found: Tensor, k: int, *, pdl: bool = True) -> None:
    """As the plain `overlay_chains`; all contiguous."""
    batch, levels = tokens.shape
    _overlay[(batch,)](
        tokens, chances, found, k, levels, triton.next_power_of_2(levels), pdl,
        num_warps=1, launch_pdl=pdl, enable_fp_fusion=False,  # rounded as by the plain function
    )  # fmt: skip
