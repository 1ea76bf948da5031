"""A head's chain or what a lookup found, in Triton: the function of overlay.py, one kernel."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.lookup import MAX_CHANCE
from outrider.kernels.triton_share import load_chance

_MAX_CHANCE = tl.constexpr(float(MAX_CHANCE))


@triton.jit(do_not_specialize_on_alignment=["tokens", "chances", "found", "drafts", "draft_chances"])
def _overlay(
    tokens, chances, found, drafts, draft_chances, K: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One text: compare the expected accepted tokens of its chain and of what was found, added up token by token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    row = found + b * (2 * K + 5)
    level_of = tl.arange(0, WIDE)
    draft = tl.load(row + level_of, mask=level_of < K, other=-1)
    count = tl.sum((draft >= 0).to(tl.int32), 0)
    chance = tl.div_rn(tl.load(row + 2 * K + 4).to(tl.float32), _MAX_CHANCE)
    own, own_worth = tl.full((), 1.0, dtype=tl.float32), tl.zeros((), dtype=tl.float32)
    path, worth = tl.full((), 1.0, dtype=tl.float32), tl.zeros((), dtype=tl.float32)
    for level in tl.static_range(LEVELS):
        own *= load_chance(chances, b * LEVELS + level, True)
        own_worth += own
    for level in tl.static_range(K):
        path *= tl.where(level < count, chance, 0.0)
        worth += path
    at, has_own, better = b * LEVELS + level_of, level_of < LEVELS, worth > own_worth
    own_draft = tl.load(tokens + at, mask=has_own, other=-1)
    own_chance = tl.load(chances + at, mask=has_own, other=0.0)
    at, written = b * WIDTH + level_of, level_of < WIDTH
    tl.store(drafts + at, tl.where(better, tl.where(level_of < count, draft, -1), own_draft), mask=written)
    tl.store(draft_chances + at, tl.where(better, tl.where(level_of < count, chance, 0.0), own_chance), mask=written)


def overlay_chains(
    tokens: Tensor, chances: Tensor, found: Tensor, k: int, out: tuple[Tensor, Tensor], *, pdl: bool = True
) -> None:
    """As the plain `overlay_chains`; all contiguous. out: where drafts and their chances are written."""
    (batch, levels), width = tokens.shape, out[0].shape[1]
    _overlay[(batch,)](
        tokens, chances, found, *out, k, levels, width, triton.next_power_of_2(width), pdl,
        num_warps=1, launch_pdl=pdl, enable_fp_fusion=False,  # rounded as by the plain function
    )  # fmt: skip
