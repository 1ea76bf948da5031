"""Trees a draft model guesses: several tokens for one place, and what may follow each."""

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
from outrider.verify.propose import draft_top


class Node(NamedTuple):
    """One guess of a tree, which is a list of them: parents come before their children."""

    token: Token
    parent: int
    """Its place in the list; -1: the text's last token."""
    chance: float
    """What the draft model gives the whole path down to it."""
    law: Tensor | None
    """[vocab]: what it was drawn from; None: it is certain."""


@dataclass(frozen=True, slots=True)
class Trees:
    """Grows trees of at most `levels` levels; each level from the best `beams` nodes of the one before."""

    cache: DraftCache
    levels: int
    beams: int
    mode: Mode

    def grow(self, seq: Sequence, most: int) -> list[Node]:
        """A tree of at most `most` nodes behind a text that the cache holds, with room for them.

        The tree so far is scored again each level: that costs rows, not passes, and needs no second kind of cache.
        """
        self.cache.advance([(seq, ())])
        tree: list[Node] = []
        frontier = [-1]
        for _ in range(self.levels):
            first = len(tree)
            tree += self._fitting(self._children(seq, tree, frontier), most - first)
            frontier = sorted(range(first, len(tree)), key=lambda n: -tree[n].chance)[: self.beams]
            if not frontier or len(tree) == most:
                break
        return tree

    def _children(self, seq: Sequence, tree: list[Node], frontier: list[int]) -> list[Node]:
        """The best children of each node of the frontier."""
        draft = Draft(tuple(node.token for node in tree), tuple(node.parent for node in tree))
        logits = self.cache.score([Span(seq.id, len(seq.tokens) - 1, (seq.tokens[-1],), draft)])
        grown: list[Node] = []
        for parent in frontier:
            row, path = logits[parent + 1], tuple(draft.tokens[n] for n in draft.path(parent))
            top, law = draft_top(row, seq, path, self.beams, self.mode)
            chances = chances_of(row.expand(len(top), -1), top)
            so_far = tree[parent].chance if parent >= 0 else 1.0
            grown += [Node(t, parent, so_far * c, law) for t, c in zip(top, chances, strict=True)]
        return grown

    def _fitting(self, level: list[Node], room: int) -> list[Node]:
        """What is kept of a level.

        In mode `distribution` siblings were sampled: whether one is kept may not depend on
        its own chance, so a level that does not fit whole is left out.
        """
        if self.mode == "distribution":
            return level if len(level) <= room else []
        return sorted(level, key=lambda node: -node.chance)[:room]


def chances_of(logits: Tensor, tokens: Seq[Token]) -> list[float]:
    """What a model gave each token: logits [R, vocab], a token for each row."""
    chosen = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
    return (chosen - logits.logsumexp(-1)).exp().tolist()
