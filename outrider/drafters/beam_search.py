"""Beam search with a draft model: draft trees with several tokens for one position."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.sampling import Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.draft_cache import DraftCache
from outrider.verify.base import Mode
from outrider.verify.draft_sampling import draft_top


class BeamNode(NamedTuple):
    """One token of a tree, which is a list of them: parents come before their children."""

    token: Token
    parent: int
    """Its parent's index in the list; -1: the text's last token."""
    path_prob: float
    """The draft model's probability of the whole path down to it."""
    probs: Tensor | None
    """[vocab]: the distribution it was sampled from; None: it was not sampled."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Builds trees of at most `levels` levels; each level from the best `beams` nodes of the one before."""

    cache: DraftCache
    levels: int
    beams: int
    mode: Mode

    def build(self, seq: Sequence, max_nodes: int) -> list[BeamNode]:
        """Build a tree of at most `max_nodes` nodes behind the text; the cache must have pages for all of them.

        At each level the whole tree so far is scored again: that costs rows, not passes, and no tree is ever cached.
        """
        self.cache.advance([(seq, ())])
        tree: list[BeamNode] = []
        frontier = [-1]
        for _ in range(self.levels):
            first = len(tree)
            tree += self._fitting(self._children(seq, tree, frontier), max_nodes - first)
            frontier = sorted(range(first, len(tree)), key=lambda n: -tree[n].path_prob)[: self.beams]
            if not frontier or len(tree) == max_nodes:
                break
        return tree

    def _children(self, seq: Sequence, tree: list[BeamNode], frontier: list[int]) -> list[BeamNode]:
        """The best children of each node of the frontier."""
        draft = Draft(tuple(node.token for node in tree), tuple(node.parent for node in tree))
        logits = self.cache.score([Span(seq.id, len(seq.tokens) - 1, (seq.tokens[-1],), draft)])
        children: list[BeamNode] = []
        for parent in frontier:
            row, path = logits[parent + 1], tuple(draft.tokens[n] for n in draft.path(parent))
            top, probs = draft_top(row, seq, path, self._branching(parent), self.mode)
            so_far = tree[parent].path_prob if parent >= 0 else 1.0
            each = token_probs(row.expand(len(top), -1), top)
            children += [BeamNode(token, parent, so_far * p, probs) for token, p in zip(top, each, strict=True)]
        return children

    def _branching(self, parent: int) -> int:
        """Max children of a node.

        In mode `distribution` no child may be left out afterwards, so only the text's last token has several: `beams`
        times `beams` nodes would not fit a level's share.
        """
        return 1 if self.mode == "distribution" and parent >= 0 else self.beams

    def _fitting(self, level: list[BeamNode], room: int) -> list[BeamNode]:
        """The nodes of a level that are kept, at most `room`.

        In mode `distribution` siblings were sampled: whether one is kept may not depend on its own probability, so a
        level that does not fit whole is left out.
        """
        if self.mode == "distribution":
            return level if len(level) <= room else []
        return sorted(level, key=lambda node: -node.path_prob)[:room]


def token_probs(logits: Tensor, tokens: Seq[Token]) -> list[float]:
    """A model's probability of each token: logits [R, vocab], a token for each row."""
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return (chosen - logits.logsumexp(-1)).exp().tolist()
