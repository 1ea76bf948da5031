"""Builds a draft out of earlier occurrences: the likeliest token first, as a chain or a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from outrider.core.sampling import Token
from outrider.drafters.confidence import Confidence, Continuation
from outrider.drafters.ngram_index import END, NgramIndex


class TreeLimits(NamedTuple):
    """How large a draft may become."""

    nodes: int
    depth: int
    width: int
    """Most children of one node."""
    min_prob: float
    """Least probability of a node, but for the first."""


class _Branch(NamedTuple):
    """A node that may be added. The likeliest sorts first; of equals, the one opened first."""

    minus_prob: float
    order: int
    token: Token
    parent: int
    prior: float
    path: tuple[Token, ...]
    """The tokens down to this one."""
    places: list[int]
    """The positions behind its occurrences."""


@dataclass(slots=True)
class DraftTree:
    """A draft being built: parallel lists, a node's parent before the node."""

    match: int
    """How many tokens of the text the occurrences agree with."""
    confidence: Confidence
    """What the probabilities were corrected with."""
    tokens: list[Token] = field(default_factory=list[Token])
    parents: list[int] = field(default_factory=list[int])
    """Empty: each node follows the one before it."""
    priors: list[float] = field(default_factory=list[float])
    """Probability of each token after its parent, before correction."""
    expected: float = 0.0
    """How many tokens should be accepted: the sum of the probabilities of all paths."""

    def likeliest(self, start: int) -> Continuation:
        """The chain of first, so likeliest, children, as a continuation of the text from `start` on."""
        if not self.parents:
            return Continuation(start, self.match, tuple(self.tokens), tuple(self.priors))
        chain: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (chain[-1] if chain else -1):
                chain.append(node)
        tokens, priors = tuple(self.tokens[n] for n in chain), tuple(self.priors[n] for n in chain)
        return Continuation(start, self.match, tokens, priors)


def build_tree(
    index: NgramIndex, places: list[int], match: int, confidence: Confidence, limits: TreeLimits
) -> DraftTree:
    """The likeliest nodes that followed `places` in `index`, in falling order of probability.

    The first is taken however unlikely it is: even if it is not proposed, the text later shows whether it was right.
    """
    tree = DraftTree(match, confidence)
    branches: list[_Branch] = []
    opened = 0

    def open_branches(parent: int, prob: float, path: tuple[Token, ...], places: list[int]) -> None:
        nonlocal opened
        groups = index.followers(places, path)
        seen = sum(map(len, groups.values()))
        length = match + len(path)
        for token, group in sorted(groups.items(), key=_by_votes)[: limits.width]:
            prior, own = confidence.probs(length, len(group), seen)
            opened += 1
            beyond = [place + 1 for place in group]
            heappush(branches, _Branch(-prob * own, opened, token, parent, prior, (*path, token), beyond))

    open_branches(-1, 1.0, (), places)
    while branches and len(tree.tokens) < limits.nodes:
        branch = heappop(branches)
        prob = -branch.minus_prob
        if prob < limits.min_prob and tree.tokens:
            break
        tree.tokens.append(branch.token)
        tree.parents.append(branch.parent)
        tree.priors.append(branch.prior)
        tree.expected += prob
        if len(branch.path) < limits.depth:
            open_branches(len(tree.tokens) - 1, prob, branch.path, branch.places)
    return tree


def build_chain(
    index: NgramIndex, places: list[int], match: int, confidence: Confidence, limits: TreeLimits
) -> DraftTree:
    """The tree of width 1, as `build_tree` builds it: at each place the token that followed most often."""
    tree = DraftTree(match, confidence)
    tokens, priors, path, expected = tree.tokens, tree.priors, 1.0, 0.0
    text, first, size = index.text, index.first, len(index.text)
    at = [place - first for place in places]
    newest, seen = max(at), len(at)
    for step in range(min(limits.nodes, limits.depth)):
        if newest + step < size:
            came = [text[i + step] for i in at]
        else:
            came = [text[i + step] if i + step < size else tokens[i + step - size] for i in at]
        token = came[0]
        votes = came.count(token)
        if votes < seen or token == END:
            known = [each for each in came if each != END]
            if not known:
                break
            token, seen = max(dict.fromkeys(known), key=known.count), len(known)  # of equals, the first
            votes = known.count(token)
            at = [i for i, each in zip(at, came, strict=True) if each == token]
        prior, prob = confidence.probs(match + step, votes, seen)
        path *= prob
        if path < limits.min_prob and tokens:
            break
        seen = votes
        tokens.append(token)
        priors.append(prior)
        expected += path
    tree.expected = expected
    return tree


def _by_votes(group: tuple[Token, list[int]]) -> int:
    return -len(group[1])
