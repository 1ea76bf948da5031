"""Where texts stand after a round, plainly: as many guesses as the target chose itself, and its own next token."""

from __future__ import annotations

import torch
from torch import Tensor


def accept_chains(ids: Tensor, starts: Tensor, widths: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Each text's length, [B], and its last two tokens, [B, 2], once the round is committed; all int64.

    ids [B, W]: a text's last token, then its guesses, a chain. starts [B]: tokens cached before it.
    widths [B]: how many of a text's ids are real. choices [sum of widths]: the target's token after
    each real one, text by text. Where that is negative, nothing can be chosen: behind a guess that stands the text
    goes back to that guess, as the verifier does; behind the text itself it is over, and 0 stands in.
    """
    column = torch.arange(ids.shape[1], device=ids.device)
    real = column < widths[:, None]
    place = (widths.cumsum(0) - widths)[:, None] + column
    chosen = torch.where(real, choices[place.clamp(max=len(choices) - 1)], -1)
    matches = (ids[:, 1:] == chosen[:, :-1]) & (chosen[:, :-1] >= 0) & real[:, 1:]
    accepted = matches.long().cumprod(1).sum(1, keepdim=True)
    token = chosen.gather(1, accepted)
    step_back = (token < 0) & (accepted > 0)
    token = torch.where(step_back, ids.gather(1, accepted), token)
    accepted = accepted - step_back.long()
    return starts + 2 + accepted[:, 0], torch.cat([ids.gather(1, accepted), token], 1).clamp(min=0)
