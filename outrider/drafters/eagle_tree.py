"""EAGLE-2's dynamic trees: grown level by level where the head is surest, on the device.

At each level the nodes with the highest sum of scores along their paths are run through the head, and get children.
Mode `seeded` computes more nodes than it keeps: in the end the best of all form the tree. In this mode a text does not
depend on its drafts, so any choice of nodes is exact.

Mode `distribution` is exact where the number of a node's children does not depend on what is drawn for them
(verify/tree_rule.py). So which nodes get children follows from the probabilities of the tokens on their own paths,
drawn before; each of these gets the same number, and every drawn token is kept. Nothing is ranked afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.runners.draft_batch import HeadDraft
from outrider.runners.heads import HeadBatch
from outrider.verify.head_sampling import Children

ChildrenOf = Callable[[Tensor, int, int], Children]
"""(outputs of nodes [B, R, hidden], their depth, a number) -> that many children of each node"""


class TreePlan(NamedTuple):
    """The sizes of a tree."""

    levels: tuple[tuple[int, int], ...]
    """For each level: the number of nodes of the level above that get children, and the number of children of each.
    Above the first level is the text's last token."""
    nodes: int
    """Max nodes of the finished tree."""
    ranked: bool
    """Whether only the best nodes are kept in the end; else all are."""

    @property
    def rows(self) -> int:
        """The number of rows that the head runs, the text's last token included."""
        return sum(expanded for expanded, _ in self.levels)

    @property
    def row_width(self) -> int:
        """Rows of its widest pass."""
        return max(expanded for expanded, _ in self.levels)


def ranked_plan(nodes: int, depth: int, top_k: int) -> TreePlan:
    """Mode `seeded`: top_k nodes of each level get top_k children, and the best `nodes` of all are kept."""
    levels = ((1, top_k), *[(top_k, top_k)] * (depth - 1))
    return TreePlan(levels, min(nodes, sum(a * b for a, b in levels)), ranked=True)


def drawn_plan(nodes: int, depth: int, top_k: int) -> TreePlan:
    """Mode `distribution`: levels of about equal size, at most top_k; below the first, up to two children per node."""
    depth = min(depth, nodes)
    size = min(top_k, nodes // depth)
    children = min(2, size)
    levels = ((1, size), *[(size // children, children)] * (depth - 1))
    return TreePlan(levels, sum(a * b for a, b in levels), ranked=False)


class _Level(NamedTuple):
    """The nodes of one level, N for each sequence."""

    tokens: Tensor  # int64 [B, N]
    totals: Tensor  # float64 [B, N]: the sum of scores from the first level on
    parents: Tensor  # int64 [B, N]: in the list of all nodes; -1: the text's last token
    above: Tensor  # int64 [B, N]: the parent's row among those of `outputs`
    outputs: Tensor  # [B, R, hidden]: of the rows that these nodes follow
    ancestors: Tensor  # int64 [B, R]: what those rows see
    probs: Tensor | None  # float64 [B, N, vocab]


def grow_trees(batch: HeadBatch, plan: TreePlan, children_of: ChildrenOf) -> HeadDraft:
    """Draft a tree for each sequence of a batch."""
    starts = batch.lengths - 1
    outputs = batch.read()
    ancestors = torch.ones_like(starts)[:, None]
    zero = torch.zeros_like(starts)[:, None]
    made = children_of(outputs, 0, plan.levels[0][1])
    levels = [_level(made, zero.double(), zero - 1, outputs, ancestors)]
    rows, first = 1, 0
    for depth, (expanded, count) in enumerate(plan.levels[1:], 1):
        level = levels[-1]
        totals, chosen = level.totals.topk(min(expanded, level.totals.shape[1]), -1)  # [B, E]
        above = level.above.gather(1, chosen)
        bits = 1 << torch.arange(rows, rows + chosen.shape[1], device=chosen.device)
        ancestors = level.ancestors.gather(1, above) | bits
        hidden = level.outputs.gather(1, above[..., None].expand(-1, -1, level.outputs.shape[-1]))
        depths = torch.full_like(chosen, depth)
        outputs = batch.grow(level.tokens.gather(1, chosen), hidden, ancestors, depths, rows)
        levels.append(_level(children_of(outputs, depth, count), totals, first + chosen, outputs, ancestors))
        rows, first = rows + chosen.shape[1], first + level.tokens.shape[1]
    tokens, parents = (
        torch.cat([level.tokens for level in levels], 1),
        torch.cat([level.parents for level in levels], 1),
    )
    if plan.ranked:
        return _best_nodes(tokens, parents, torch.cat([level.totals for level in levels], 1), plan.nodes)
    probs = [level.probs for level in levels if level.probs is not None]
    return HeadDraft(tokens, parents, torch.cat(probs, 1) if probs else None)


def _level(made: Children, totals: Tensor, nodes: Tensor, outputs: Tensor, ancestors: Tensor) -> _Level:
    """The level that the children of nodes [B, R] form. totals: of the nodes themselves."""
    _, rows, count = made.tokens.shape
    above = torch.arange(rows, device=nodes.device).repeat_interleave(count).expand(len(nodes), -1)
    probs = None if made.probs is None else made.probs.repeat_interleave(count, 1)
    sums = (totals[..., None] + made.scores).flatten(1)
    return _Level(made.tokens.flatten(1), sums, nodes.gather(1, above), above, outputs, ancestors, probs)


def _best_nodes(tokens: Tensor, parents: Tensor, totals: Tensor, count: int) -> HeadDraft:
    """The nodes of the highest totals, the highest first, so that every prefix of the list is a tree of the best nodes.

    No total exceeds its parent's, and of equal ones the earlier node comes first: no node is kept without its parent.
    """
    order = totals.sort(dim=-1, descending=True, stable=True).indices
    kept = order[:, :count]
    places = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    above = parents.gather(1, kept)
    return HeadDraft(tokens.gather(1, kept), torch.where(above < 0, -1, places.gather(1, above.clamp(min=0))))
