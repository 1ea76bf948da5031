"""How many tokens lookups on the device may draft for each text of a round, before the host knows what they find."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

from outrider.drafters.base import RoundView
from outrider.runners.base import Runner
from outrider.runners.cuda_graphs import MIN_PACKED_BATCH, padded_shape

_AT_ONCE, _MOST_AT_ONCE = 0.75, 1.25
"""Texts seldom all call for their recent number of tokens in one round: rows are taken for the first share of the sum
of these numbers, and kept until that sum exceeds the rows times the second."""


class Budgets(NamedTuple):
    """Max tokens of the drafts of a round."""

    room: list[int]
    """Max tokens of each text's draft."""
    shares: list[int] | None = None
    """Where drafts share the rows of a pass: the tokens of each that it is chosen for. None: it has rows for all."""
    total: int = 0
    """Where drafts share rows: max tokens of all texts together."""

    def cover(self, reach: Seq[int]) -> bool:
        """Whether there are rows for drafts of these lengths."""
        if self.shares is not None:
            return sum(map(min, reach, self.room)) <= _MOST_AT_ONCE * self.total
        return all(length <= room for length, room in zip(reach, self.room, strict=True))


def choose_budgets(view: RoundView, most: Seq[int], reach: Seq[int], target: Runner) -> Budgets:
    """The budgets of a round that is launched behind another.

    most: max tokens of each text. reach: how many its matches lately called for. Where rows can be shared, each draft
    is as long as its match calls for, and all get about as many rows as they lately called for. In a small batch every
    text gets the padded width for the longest reach: such a pass costs the same. Else a text gets its reach.
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
    """Divide `tokens` about evenly between the texts, none of which gets more than its room."""
    shares, left = [0] * len(room), tokens
    open_ = [i for i, n in enumerate(room) if n]
    while left > 0 and open_:
        each, rest = divmod(left, len(open_))
        for at, i in enumerate(open_):
            shares[i] += min(room[i] - shares[i], each + (at < rest))
        left, open_ = tokens - sum(shares), [i for i in open_ if shares[i] < room[i]]
    return shares
