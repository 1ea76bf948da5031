"""How much longer rounds with drafts take than others of their kind: by what comes between them."""

from __future__ import annotations

from outrider.control.costs import size_of

_RECENT_ROUNDS = 64
"""A ratio is that of about so many rounds."""
_PRIOR_ROUNDS = 16
"""At first, rounds are assumed to take what they usually do: that counts as so many."""
_MAX_STALL = 4.0
"""A round that took longer than usual by more than this counts as by this."""
_PLAIN_PART = 0.75
"""What a text that begins or ends costs rounds without drafts, of what it costs those with. Measured on an H200 with a
model of 135M: 0.79 in batches of 16, 0.72 with the rounds in which texts are read."""


class Overruns:
    """Seconds of all rounds with drafts over those of a round among others of its kind, by size of batch.

    Where rounds overlap, a text that begins or ends keeps the next few from being launched as the one before. That
    comes once a text, with drafts and without, and so drafts lose by it only what it costs them more.
    """

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}
        """By `size_of` the batch."""
        self._rounds: dict[int, int] = {}

    def note(self, batch: int, seconds: float, usual: float) -> None:
        """Note what a round took, and what one of its kind takes; neither counts where one of them is not known."""
        if seconds <= 0 or usual <= 0:
            return
        size = size_of(batch)
        count = self._rounds.get(size, _PRIOR_ROUNDS) + 1
        self._rounds[size] = min(count, _RECENT_ROUNDS)
        ratio, took = self._ratios.get(size, 1.0), min(seconds / usual, _MAX_STALL)
        self._ratios[size] = ratio + (took - ratio) / count

    def least_gain(self, batch: int, wanted: float) -> float:
        """What rounds with drafts must bring among others of their kind, of plain ones, so that all bring `wanted`.

        With drafts a text takes N seconds in rounds and X between them; without, g N and _PLAIN_PART X: the gain is
        (g N + _PLAIN_PART X) / (N + X).
        """
        between = max(0.0, self._ratios.get(size_of(batch), 1.0) - 1)  # X / N
        return wanted + between * max(0.0, wanted - _PLAIN_PART)
