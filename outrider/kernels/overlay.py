"""Replace a head's chain by what a lookup found, where more of the latter is expected to be accepted.

The plain function; triton_overlay.py has the kernel, which is tested equal to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.lookup import MAX_CHANCE, Found
from outrider.kernels.share import NO_ROW


def overlay_chains(tokens: Tensor, chances: Tensor, found: Tensor, k: int) -> None:
    """Replace each chain, in place, by what a lookup found for its text where more tokens of that should be accepted.

    tokens int64 [B, K]: the chains. chances float32 [B, K]: the chance that each token is accepted, given that those
    before it were, from 0 to 1; NaN counts as 0. found int64 [B, 2 * k + 5]: the result of `look_up`; tokens beyond K
    are cut off, and fewer than K are padded with NO_ROW, with a chance of 0.
    """
    columns, levels = Found.of(k), tokens.shape[1]
    drafts = torch.full_like(tokens, NO_ROW)
    drafts[:, : min(k, levels)] = found[:, columns.drafts][:, :levels]
    chance = found[:, columns.chance].float() / MAX_CHANCE
    found_chances = torch.where(drafts >= 0, chance[:, None], 0.0)
    better = _worth(found_chances) > _worth(chances.nan_to_num(0.0).clamp(0.0, 1.0))
    tokens.copy_(torch.where(better[:, None], drafts, tokens))
    chances.copy_(torch.where(better[:, None], found_chances, chances))


def _worth(chances: Tensor) -> Tensor:
    """[B]: the expected number of accepted tokens per chain, by chances [B, K]; rounded to float32 at every step."""
    survival, worth = torch.ones_like(chances[:, 0]), torch.zeros_like(chances[:, 0])
    for chance in chances.unbind(1):
        survival = survival * chance
        worth = worth + survival
    return worth
