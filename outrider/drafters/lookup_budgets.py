"""How far lookups on the device draft for each text of a round, before the host knows what they find."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

from outrider.drafters.base import RoundView
from outrider.runners.base import Runner
from outrider.runners.cuda_graphs import MIN_PACKED_BATCH, padded_shape

_AT_ONCE, _MOST_AT_ONCE = 0.75, 1.25
"""What texts lately called for, they seldom call for all at once: rows are taken for so much of it, until it is so many
times as much as there are."""


class Budgets(NamedTuple):
    """Max tokens of the drafts of a round."""

    room: list[int]
    """Of each text."""
    shares: list[int] | None = None
    """Where texts share the rows of a pass: for how many tokens of each that is chosen. None: it has all their rows."""
    total: int = 0
    """Of all texts together, where they share."""

    def cover(self, reach: Seq[int]) -> bool:
        """Whether there are rows for drafts of these lengths."""
        if self.shares is not None:
            return sum(map(min, reach, self.room)) <= _MOST_AT_ONCE * self.total
        return all(length <= room for length, room in zip(reach, self.room, strict=True))


def choose_budgets(view: RoundView, most: Seq[int], reach: Seq[int], target: Runner) -> Budgets:
    """The budgets of a round that is launched behind another.

    most: max tokens of each text. reach: how far a match lately called for. Where rows can be shared, each text has as
    many as its match calls for, and all of them about as many as they lately had. In a small batch every text has as
    many as the widest pass of one lately had: such a pass costs the same. Else a text has no more than its reach.
    """
    if view.room is not None and view.takes_choices_alone:
        room = [min(n, limit) if n else 0 for n, limit in zip(most, view.room, strict=True)]
        wanted = max(1, ceil(_AT_ONCE * sum(map(min, reach, room))))
        for tokens in (wanted, max(wanted, 2 * len(room))):  # the smallest packed pass has rows for more than a few
            shares = _spread(tokens, room)
            total = target.shared_tokens(shares, max(room))
            if total:
                return Budgets(room, shares, total)
    if len(view.seqs) < MIN_PACKED_BATCH:
        width = padded_shape(1, 1 + max(1, *reach)).width
        return Budgets([min(n, width - 1) for n in most])
    return Budgets([*map(min, most, reach)])


def _spread(tokens: int, room: Seq[int]) -> list[int]:
    """So many tokens, about as many for each text that has room; no more than that."""
    shares, left = [0] * len(room), tokens
    open_ = [i for i, n in enumerate(room) if n]
    while left > 0 and open_:
        each, rest = divmod(left, len(open_))
        for at, i in enumerate(open_):
            shares[i] += min(room[i] - shares[i], each + (at < rest))
        left, open_ = tokens - sum(shares), [i for i in open_ if shares[i] < room[i]]
    return shares
