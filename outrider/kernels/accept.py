"""Which draft tokens a round accepts, in plain PyTorch: the reference for triton_accept.py, on any device.

The token that the target chose after each row is given. A draft token is accepted where its parent is accepted and the
target chose this token after the parent's row (in a chain, the row before); the target's own next token follows the
last accepted one. All integers are int64. A sequence has W rows: its last token, then the draft's K = W - 1 nodes; node
i is row i + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accept_chains(
    ids: Tensor, starts: Tensor, widths: Tensor, choices: Tensor, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each sequence's length [B], last two tokens [B, 2] and number of accepted tokens [B] once the round is committed.

    ids [B, W]: a sequence's last token, then its draft, a chain. A negative id is no token and is never accepted.
    starts [B]: tokens cached before the pass. widths [B]: the number of real rows of each sequence. choices: the
    target's token after each real row, sequence by sequence; negative where none can be chosen. offsets [B]: where each
    sequence's choices begin, if they are not packed. Where no token can be chosen after an accepted draft token, the
    sequence steps back: that draft token becomes its last token and is read again in the next round, as in the
    verifier. Where none can be chosen after the sequence's own last token, the sequence has ended, and 0 stands in
    place of the missing token.
    """
    chosen = _chosen_tokens(ids, widths, choices, offsets)
    matches = (ids[:, 1:] == chosen[:, :-1]) & (chosen[:, :-1] >= 0) & _real_rows(ids, widths)[:, 1:]
    accepted = matches.long().cumprod(1).sum(1, keepdim=True)
    token = chosen.gather(1, accepted)
    step_back = (token < 0) & (accepted > 0)
    token = torch.where(step_back, ids.gather(1, accepted), token)
    accepted = accepted - step_back.long()
    last = torch.cat([ids.gather(1, accepted), token], 1).clamp(min=0)
    return starts + 2 + accepted[:, 0], last, accepted[:, 0]


def tree_rows(parents: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """What each row of a tree sees, and its depth: ancestors [B, W] and depths [B, W].

    parents [B, K]: each node's parent, an earlier node or -1 for the sequence's last token; any other value counts as
    the node before. counts [B]: nodes per sequence. Bit j of a row's ancestors is set where it sees row j: itself and
    its ancestors. Row 0 has depth 0. Padding rows, from 1 + counts on, get the values of a chain.
    """
    nodes = parents.shape[1]
    rows = torch.arange(nodes + 1, device=parents.device)
    ancestors, depths = ((2 << rows) - 1).repeat(len(parents), 1), rows.repeat(len(parents), 1)
    above = _parent_rows(parents)
    for row in range(1, nodes + 1):
        real, parent = row <= counts, above[:, row, None]
        ancestors[:, row] = torch.where(real, ancestors.gather(1, parent)[:, 0] | 1 << row, ancestors[:, row])
        depths[:, row] = torch.where(real, depths.gather(1, parent)[:, 0] + 1, depths[:, row])
    return ancestors, depths


def accept_trees(
    ids: Tensor, parents: Tensor, starts: Tensor, widths: Tensor, choices: Tensor, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `accept_chains` for trees: lengths [B], last [B, 2], path [B, K] and accepted [B].

    parents [B, K] as in `tree_rows`. Starting at row 0, the child whose token the target chose after the current row is
    accepted and becomes the current row; among siblings with the same token it is the last one. path[b, : accepted[b]]
    are the accepted nodes, the rest is -1. A node that the sequence steps back to is not in path: it is read again.
    """
    chosen, above = _chosen_tokens(ids, widths, choices, offsets), _parent_rows(parents)
    real = _real_rows(ids, widths)
    rows = torch.arange(ids.shape[1], device=ids.device)
    path = torch.full_like(parents, -1)
    row = torch.zeros_like(starts)[:, None]  # [B, 1]
    accepted = torch.zeros_like(row)
    for step in range(parents.shape[1]):
        token = chosen.gather(1, row)
        matches = (above == row) & (ids == token) & (token >= 0) & real & (rows > 0)
        child = torch.where(matches, rows, 0).amax(1, keepdim=True)
        path[:, step] = child[:, 0] - 1
        accepted += child > 0
        row = torch.where(child > 0, child, row)
        # a row without a matching child has none in the next step either
    token = chosen.gather(1, row)
    step_back = (token < 0) & (accepted > 0)
    token = torch.where(step_back, ids.gather(1, row), token)
    row = torch.where(step_back, above.gather(1, row), row)
    accepted = accepted - step_back.long()
    path.masked_fill_(rows[:-1] >= accepted, -1)
    last = torch.cat([ids.gather(1, row), token], 1).clamp(min=0)
    return starts + 2 + accepted[:, 0], last, path, accepted[:, 0]


def compact_kept(
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    table_ids: Tensor,
    starts: Tensor,
    path: Tensor,
    accepted: Tensor,
    *,
    page: int = 16,
) -> None:
    """Move the keys and values of accepted nodes, in place, to the slots that a chain would have.

    keys and values [slots, KV, D], or [layers, slots, KV, D]; they may be the same tensor. Node path[b, d] lies at
    position starts[b] + 1 + path[b, d] and goes to starts[b] + 1 + d, for d < accepted[b]. path ascends. Position p of
    sequence b has slot block_tables[table_ids[b], p // page] * page + p % page.
    """
    steps = torch.arange(path.shape[1], device=path.device)
    b, d = torch.where((steps < accepted[:, None]) & (path != steps))

    def slots(nodes: Tensor) -> Tensor:
        positions = starts[b] + 1 + nodes
        return block_tables[table_ids[b], positions // page].long() * page + positions % page

    source, destination = slots(path[b, d]), slots(d)
    moved = [cache[..., source, :, :] for cache in (keys, values)]  # all are read before any is written
    for cache, new in zip((keys, values), moved, strict=True):
        cache[..., destination, :, :] = new


def _real_rows(ids: Tensor, widths: Tensor) -> Tensor:
    """[B, W]: whether a row is real."""
    return torch.arange(ids.shape[1], device=ids.device) < widths[:, None]


def _chosen_tokens(ids: Tensor, widths: Tensor, choices: Tensor, offsets: Tensor | None) -> Tensor:
    """[B, W]: the choice after each row, -1 for rows that are not real."""
    column = torch.arange(ids.shape[1], device=ids.device)
    firsts = widths.cumsum(0) - widths if offsets is None else offsets
    place = firsts[:, None] + column
    return torch.where(_real_rows(ids, widths), choices[place.clamp(max=len(choices) - 1)], -1)


def _parent_rows(parents: Tensor) -> Tensor:
    """[B, W]: the row of each row's parent; row 0 is its own."""
    nodes = torch.arange(parents.shape[1], device=parents.device)
    valid = (parents >= -1) & (parents < nodes)
    return torch.nn.functional.pad(torch.where(valid, parents + 1, nodes), (1, 0))
