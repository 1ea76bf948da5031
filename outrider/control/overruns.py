"""How much longer rounds take than others of their kind: by what comes between them."""

from __future__ import annotations

from outrider.control.costs import size_of

_RECENT_ROUNDS = 64
"""A ratio is that of about so many rounds."""
_PRIOR_ROUNDS = 16
"""At first, rounds are assumed to take what they usually do: that counts as so many."""
_MAX_STALL = 4.0
"""A round that took longer than usual by more than this counts as by this."""


class Overruns:
    """Seconds of all rounds over those of a round among others of its kind, with drafts and without, by size of batch.

    Where rounds overlap, a text that begins or ends keeps the next few from being launched ahead. Rounds with drafts
    lose more by that, and texts end more often in a larger batch.
    """

    def __init__(self) -> None:
        self._ratios: dict[tuple[bool, int], float] = {}
        """By whether there were drafts, and `size_of` the batch."""
        self._rounds: dict[tuple[bool, int], int] = {}

    def note(self, batch: int, seconds: float, usual: float, *, drafted: bool) -> None:
        """Note what a round took, and what one of its kind takes; neither counts where one of them is not known."""
        if seconds <= 0 or usual <= 0:
            return
        key = drafted, size_of(batch)
        count = self._rounds.get(key, _PRIOR_ROUNDS) + 1
        self._rounds[key] = min(count, _RECENT_ROUNDS)
        ratio, took = self._ratios.get(key, 1.0), min(seconds / usual, _MAX_STALL)
        self._ratios[key] = ratio + (took - ratio) / count

    def of_drafts(self, batch: int) -> float:
        """By how much more rounds with drafts overrun than those without: at least 1."""
        size = size_of(batch)
        return max(1.0, self._ratios.get((True, size), 1.0) / self._ratios.get((False, size), 1.0))
