"""How the drafts of a round share the rows of a pass: the tokens that are likeliest to be accepted get a row.

The plain functions; triton_share.py and triton_inputs.py have the kernels, which are tested equal to them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

NO_ROW = -1
"""Stands in place of a draft token that has no row in the pass: padding of a draft."""


def share_tokens(tokens: Tensor, chances: Tensor, room: Tensor, total: int) -> Tensor:
    """The drafts with NO_ROW in place of all but the `total` tokens that are likeliest to be accepted.

    tokens int64 [B, K]. chances [B, K]: the chance that each token is accepted, given that those before it were, from 0
    to 1; NaN counts as 0. room int64 [B]: max tokens of each draft. Among equally likely tokens those earlier in their
    draft come first, then those of earlier sequences: so the tokens that are kept of a draft are its first ones.
    """
    batch, levels = tokens.shape
    survival = chances.float().nan_to_num(0.0).clamp(0.0, 1.0).cumprod(1)
    is_open = torch.arange(levels, device=room.device) < room[:, None]
    order = survival.masked_fill(~is_open, -1.0).t().flatten().argsort(descending=True, stable=True)
    kept = torch.zeros(levels * batch, dtype=torch.bool, device=tokens.device)
    kept[order[: max(0, total)]] = True
    return tokens.masked_fill(~(kept.view(levels, batch).t() & is_open), NO_ROW)


def pack_rows(texts: Seq[int], drafts: Seq[Seq[int]], shared: int) -> tuple[list[int], list[int]]:
    """The number of rows of each sequence in a packed pass, and the index of its first row.

    texts: the rows of each sequence for tokens of its text. Its draft tokens follow, without those that are NO_ROW. All
    drafts together have at most `shared` rows; those of earlier sequences get theirs first.
    """
    widths: list[int] = []
    for text, draft in zip(texts, drafts, strict=True):
        own = min(sum(token >= 0 for token in draft), shared)
        shared -= own
        widths.append(text + own)
    return widths, [sum(widths[:i]) for i in range(len(widths))]
