"""Growing a guess out of earlier occurrences: the likeliest token first, as a chain or a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from outrider.core.sampling import Token
from outrider.drafters.confidence import Confidence, Guess, claim
from outrider.drafters.ngram_index import NgramIndex


class TreeLimits(NamedTuple):
    """How far a guess may grow."""

    nodes: int
    depth: int
    width: int
    """Most children of one node."""
    min_prob: float
    """Least chance of a node, but for the first."""


class _Branch(NamedTuple):
    """A node that may be added. The likeliest sorts first; of equals, the one opened first."""

    minus_chance: float
    order: int
    token: Token
    parent: int
    claimed: float
    path: tuple[Token, ...]
    """The tokens down to this one."""
    places: list[int]
    """Where it occurred: positions behind it."""


@dataclass(slots=True)
class DraftTree:
    """A guess as it grows: parallel lists, a node's parent before the node."""

    match: int
    """How many tokens of the text the occurrences agree with."""
    trust: Confidence
    """What the chances were corrected with."""
    tokens: list[Token] = field(default_factory=list[Token])
    parents: list[int] = field(default_factory=list[int])
    claims: list[float] = field(default_factory=list[float])
    """Chance of each token after its parent, before correction."""
    expected: float = 0.0
    """How many of the tokens should stand: the sum of the chances of all paths."""

    def likeliest(self, start: int) -> Guess:
        """The chain of first, so likeliest, children, as a guess about the text from `start` on."""
        chain: list[int] = []
        for node, parent in enumerate(self.parents):
            if parent == (chain[-1] if chain else -1):
                chain.append(node)
        return Guess(start, self.match, tuple(self.tokens[n] for n in chain), tuple(self.claims[n] for n in chain))


def grow(index: NgramIndex, places: list[int], match: int, trust: Confidence, limits: TreeLimits) -> DraftTree:
    """The likeliest nodes that followed `places` in `index`, in falling order of chance.

    The first is taken however unlikely: a guess too weak to propose still tells, once the
    text goes on, what such guesses are worth.
    """
    growth = DraftTree(match, trust)
    branches: list[_Branch] = []
    opened = 0

    def open_branches(parent: int, chance: float, path: tuple[Token, ...], places: list[int]) -> None:
        nonlocal opened
        groups = index.followers(places, path)
        seen = sum(map(len, groups.values()))
        length = match + len(path)
        for token, group in sorted(groups.items(), key=_by_votes)[: limits.width]:
            claimed = claim(length, len(group), seen)
            opened += 1
            beyond = [place + 1 for place in group]
            minus = -chance * trust.chance(length, claimed)
            heappush(branches, _Branch(minus, opened, token, parent, claimed, (*path, token), beyond))

    open_branches(-1, 1.0, (), places)
    while branches and len(growth.tokens) < limits.nodes:
        branch = heappop(branches)
        chance = -branch.minus_chance
        if chance < limits.min_prob and growth.tokens:
            break
        growth.tokens.append(branch.token)
        growth.parents.append(branch.parent)
        growth.claims.append(branch.claimed)
        growth.expected += chance
        if len(branch.path) < limits.depth:
            open_branches(len(growth.tokens) - 1, chance, branch.path, branch.places)
    return growth


def _by_votes(group: tuple[Token, list[int]]) -> int:
    return -len(group[1])
