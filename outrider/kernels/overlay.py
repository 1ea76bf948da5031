"""A head's chain or what a lookup found, whichever should have more tokens accepted.

The plain function; triton_overlay.py has the kernel, which is tested equal to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.kernels.lookup import MAX_CHANCE, Found
from outrider.kernels.share import NO_ROW


def overlay_chains(tokens: Tensor, chances: Tensor, found: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """For each text its chain, or what a lookup found for it where more tokens of that should be accepted.

    tokens int64 [B, K]: the chains. chances float32 [B, K]: the chance that each token is accepted, given that those
    before it were, from 0 to 1; NaN counts as 0. found int64 [B, 2 * k + 5]: the result of `look_up`. Returns drafts
    int64 [B, W] and their chances float32 [B, W], W the larger of K and k: shorter ones are padded with NO_ROW, with a
    chance of 0.
    """
    columns, beyond = Found.of(k), max(0, k - tokens.shape[1])
    own = pad(tokens, (0, beyond), value=NO_ROW)
    drafts = torch.full_like(own, NO_ROW)
    drafts[:, :k] = found[:, columns.drafts]
    chance = found[:, columns.chance].float() / MAX_CHANCE
    found_chances = torch.where(drafts >= 0, chance[:, None], 0.0)
    better = (_worth(found_chances) > _worth(chances.nan_to_num(0.0).clamp(0.0, 1.0)))[:, None]
    return torch.where(better, drafts, own), torch.where(better, found_chances, pad(chances, (0, beyond)))


def _worth(chances: Tensor) -> Tensor:
    """[B]: the expected number of accepted tokens per chain, by chances [B, K]; rounded to float32 at every step."""
    survival, worth = torch.ones_like(chances[:, 0]), torch.zeros_like(chances[:, 0])
    for chance in chances.unbind(1):
        survival = survival * chance
        worth = worth + survival
    return worth
