"""Drafters whose drafts share the rows of a pass: what that gains over drafts of one length.

Tokens have rows in the order of how likely they are accepted, whoever's they are. Where there are as many rows as
tokens nothing is gained; the fewer there are, the more. So what is expected of drafts of n of K tokens is multiplied by
1 + gain (1 - n / K), one number for each drafter, which is learned: some rounds at a time, what came of them against
what survival rates say of drafts of one length.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

from outrider.control.costs import RoundCosts

_FIRST_GAIN, _MAX_GAIN = 0.15, 0.8
"""What is assumed at first; and at most, since few drafts tell little."""
_PART, _MAX_PART = 0.001, 0.2
"""How much one draft counts, and all that are noted together at most."""


class Sharing:
    """The gain of each drafter whose drafts share rows."""

    def __init__(self, sharing: frozenset[int], costs: RoundCosts, widths: Seq[int]) -> None:
        """sharing: those drafters, by index. widths: those that passes are padded to."""
        self._gains = dict.fromkeys(sharing, _FIRST_GAIN)
        self._costs, self._widths = costs, tuple(widths)

    def factors(self, drafter: int, batch: int, most: int) -> list[float] | None:
        """What is expected of drafts of 1, 2, ... `most` tokens, times what it is where they are of one length.

        None: its drafts share nothing.
        """
        gain = self._gains.get(drafter)
        if gain is None:
            return None
        packed = tuple(self._costs.target.packed_rows(batch))
        return [1 + gain * left for left in _left_out(batch, most, self._widths, packed)]

    def note(self, drafter: int, share: float, accepted: float, expected: float, drafts: int) -> None:
        """Note drafts that shared rows: of their tokens this share had one. accepted: tokens of all of them.

        expected: the same of drafts of one length.
        """
        if drafter in self._gains and share < 1 and expected > 0:
            found = (accepted / expected - 1) / (1 - share)
            part = min(_PART * drafts, _MAX_PART)
            moved = self._gains[drafter] + part * (found - self._gains[drafter])
            self._gains[drafter] = min(max(moved, 0.0), _MAX_GAIN)


@lru_cache
def _left_out(batch: int, most: int, widths: tuple[int, ...], packed: tuple[int, ...]) -> list[float]:
    """Of drafts of 1, 2, ... tokens, the share of `most` that has no row; 0 where none are shared.

    They are where a packed pass takes as many rows, and has no more than one of that width.
    """
    left: list[float] = []
    for n in range(1, most + 1):
        width = next((w for w in widths if w > n), 0)
        shared = any(batch * (1 + n) <= rows <= width << (batch - 1).bit_length() for rows in packed)
        left.append(1 - n / most if shared else 0.0)
    return left
