"""Drafters whose drafts share the rows of a pass: what that gains over drafts of one length.

Rows go to the tokens likeliest to be accepted, of whichever sequence. Where there are as many rows as tokens nothing is
gained; the fewer rows, the more. So the tokens expected of drafts of n of K tokens are multiplied by
1 + gain (1 - n / K), with one gain for each drafter. It is learned some rounds at a time: the tokens accepted in them,
compared with those that survival promises for drafts of one length.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

from outrider.control.costs import RoundCosts

_FIRST_GAIN, _MAX_GAIN = 0.15, 0.8
"""The gain that is assumed at first; and the max gain, since few drafts tell little."""
_PART, _MAX_PART = 0.001, 0.2
"""The weight of one draft in a gain, and the max weight of all drafts that are noted together."""


class Sharing:
    """The gain of each drafter whose drafts share rows."""

    def __init__(self, sharing: frozenset[int], costs: RoundCosts, widths: Seq[int]) -> None:
        """sharing: those drafters, by index. widths: those that passes are padded to."""
        self._gains = dict.fromkeys(sharing, _FIRST_GAIN)
        self._costs, self._widths = costs, tuple(widths)

    def factors(self, drafter: int, batch: int, most: int) -> list[float] | None:
        """Factors on the tokens expected of drafts of 1, 2, ... `most` tokens, compared with drafts of one length.

        None: its drafts share nothing.
        """
        gain = self._gains.get(drafter)
        if gain is None:
            return None
        packed = tuple(self._costs.target.packed_rows(batch))
        return [1 + gain * left for left in _left_out(batch, most, self._widths, packed)]

    def note(self, drafter: int, share: float, accepted: float, expected: float, drafts: int) -> None:
        """Note drafts that shared rows. share: the part of their tokens that had one. accepted: tokens of all drafts.

        expected: the tokens that drafts of one length should have had accepted.
        """
        if drafter in self._gains and share < 1 and expected > 0:
            found = (accepted / expected - 1) / (1 - share)
            part = min(_PART * drafts, _MAX_PART)
            moved = self._gains[drafter] + part * (found - self._gains[drafter])
            self._gains[drafter] = min(max(moved, 0.0), _MAX_GAIN)


@lru_cache
def _left_out(batch: int, most: int, widths: tuple[int, ...], packed: tuple[int, ...]) -> list[float]:
    """For drafts of 1, 2, ... tokens, the share of `most` tokens that has no row; 0 where rows are not shared.

    They are shared where a packed pass takes as many rows, and has no more than the pass of that width.
    """
    left: list[float] = []
    for n in range(1, most + 1):
        width = next((w for w in widths if w > n), 0)
        shared = any(batch * (1 + n) <= rows <= width << (batch - 1).bit_length() for rows in packed)
        left.append(1 - n / most if shared else 0.0)
    return left
