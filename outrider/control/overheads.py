"""Seconds that pass beside rounds: the host's work where texts begin and end, which takes longer with some drafters."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.control.costs import size_of

PLAIN = -1
"""In place of a drafter's index: plain decoding."""
_DECAY = 1 - 1 / 256
"""Decay for each round: about the last 256 count."""
_PRIOR_ROUNDS = 64
"""The prior of a drafter's overhead is that of plain decoding, and counts as this many rounds."""
_MAX_STALL = 4.0
"""A round, or one of those that are noted together, counts as at most this many times its usual seconds."""


@dataclass(slots=True)
class _Sums:
    """Decayed sums over rounds. Changed in place, since every round adds to them."""

    beside: float = 0.0
    """Seconds that passed beyond what such rounds take by themselves."""
    tokens: float = 0.0

    def add(self, beside: float, tokens: float, kept: float) -> None:
        """kept: the part of what was there before that is not forgotten."""
        self.beside, self.tokens = kept * self.beside + beside, kept * self.tokens + tokens

    @property
    def per_token(self) -> float:
        """Seconds beside rounds for each token."""
        return self.beside / self.tokens if self.tokens > 0 else 0.0


class Overheads:
    """Seconds beside rounds for each token, by drafter and size of batch.

    For each token, since texts end after a number of tokens, whoever drafts. Their begin and end take the host as long
    with any drafter, except for what that drafter adds: only this part counts against it.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], _Sums] = {}
        """By `size_of` the batch and drafter."""

    def note(self, drafter: int, batch: int, tokens: float, usual: float, passed: float, rounds: int = 1) -> None:
        """Note rounds. usual: seconds that they take by themselves; passed: those by the clock."""
        if usual <= 0 or passed <= 0:
            return
        size = size_of(batch)
        known = self._sums.get((size, drafter))
        if known is None:
            prior = _PRIOR_ROUNDS * tokens / rounds
            known = self._sums[size, drafter] = _Sums(prior * self._least(size), prior)
        known.add(min(passed - usual, (_MAX_STALL - 1) * usual / rounds), tokens, _DECAY**rounds)

    def fade(self, drafter: int, part: float) -> None:
        """Forget this part of what is known of a drafter that is not asked: nothing tells what it would take by now."""
        for (size, who), known in self._sums.items():
            if who == drafter:
                known.beside += part * (known.tokens * self._least(size) - known.beside)

    def seconds(self, drafter: int, batch: int) -> float:
        """Seconds beside rounds for each token, beyond those of plain decoding."""
        size = size_of(batch)
        known = self._sums.get((size, drafter))
        return 0.0 if known is None else max(0.0, known.per_token - self._least(size))

    def _least(self, size: int) -> float:
        """Seconds for each token of plain decoding; where that was not seen, of the drafter that has the fewest."""
        plain = self._sums.get((size, PLAIN))
        if plain is not None:
            return plain.per_token
        return min((each.per_token for (of, _), each in self._sums.items() if of == size), default=0.0)
