"""How far plans are fulfilled: the tokens and the seconds that they promise, against those that came of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from outrider.control.costs import size_of

PLAIN = -1
"""Stands for rounds that nobody is asked for."""
_DECAY = 1 - 1 / 192
"""What counts is about the last so many rounds."""
_PRIOR_ROUNDS = 24
"""At first a drafter's plans are trusted as those of plain decoding: that counts as so many rounds."""
_FIRST_ROUNDS = 32
"""So many rounds of a drafter do not count: what its first plans promise is assumed, not learnt."""
_MAX_STALL = 4.0
"""A round, or one of those that are noted together, counts as no more than so many."""


@dataclass(slots=True)
class _Sums:
    """Of rounds, in seconds. Changed in place: there is one more in every round."""

    passed: float = 1.0
    """What went by from one to the next."""
    usual: float = 1.0
    """What one of their kind takes, among others of its kind."""
    promised: float = 1.0
    """The same, times the tokens that came over those that their plans promise."""
    rounds: float = 1.0
    """How many they are; those count less that are long ago."""

    @classmethod
    def even(cls, usual: float, plain: _Sums) -> _Sums:
        """What is assumed of a drafter whose rounds usually take so long: that it does as plain decoding."""
        seconds = _PRIOR_ROUNDS * usual
        return cls(seconds * plain.passed / plain.usual, seconds, seconds, _PRIOR_ROUNDS)

    def scale(self, kept: float) -> None:
        """Forget all but so great a part."""
        self.passed *= kept
        self.usual *= kept
        self.promised *= kept
        self.rounds *= kept

    def add(self, passed: float, usual: float, promised: float, rounds: float) -> None:
        self.passed += passed
        self.usual += usual
        self.promised += promised
        self.rounds += rounds


class Trust:
    """The part of its promised rate that each drafter brings, over the part that plain decoding does, by size of batch.

    By the clock: texts that begin and end, and the host's work for them, are in it, whoever drafts. So is that the best
    of several estimates is chosen, and is partly luck.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], _Sums] = {}
        """By drafter and `size_of` the batch."""
        self._rounds: Counter[int] = Counter()
        """Of each drafter, up to _FIRST_ROUNDS."""

    def note(self, drafter: int, batch: int, fulfilled: float, usual: float, passed: float, rounds: int = 1) -> None:
        """Note rounds. fulfilled: tokens that came over those promised; usual, passed: seconds of all of them."""
        if usual <= 0 or passed <= 0:
            return
        if drafter != PLAIN and self._rounds[drafter] < _FIRST_ROUNDS:
            self._rounds[drafter] += rounds
            return
        key = drafter, size_of(batch)
        known = self._sums.get(key)
        if known is None:
            known = self._sums[key] = _Sums.even(usual / rounds, self._plain(key[1]))
        known.scale(_DECAY**rounds)
        known.add(min(passed, usual + (_MAX_STALL - 1) * usual / rounds), usual, usual * fulfilled, rounds)

    def rate(self, drafter: int, batch: int) -> float:
        """What to multiply a promised rate by before it is compared with that of plain decoding."""
        known = self._sums.get((drafter, size_of(batch)))
        return 1.0 if known is None else known.promised / known.passed / self._plain_pace(batch)

    def pace(self, drafter: int, batch: int) -> float:
        """The same of rounds alone, whatever tokens they bring: below 1 where they take longer than they should."""
        known = self._sums.get((drafter, size_of(batch)))
        return 1.0 if known is None else known.usual / known.passed / self._plain_pace(batch)

    def fade(self, drafter: int, part: float) -> None:
        """Forget so much of what is known of a drafter: it is not asked, and nothing tells how it would do by now."""
        for (who, size), known in self._sums.items():
            if who == drafter:
                even = _Sums.even(known.usual / known.rounds, self._plain(size))
                known.scale(1 - part)
                known.add(part * even.passed, part * even.usual, part * even.promised, part * even.rounds)

    def _plain(self, size: int) -> _Sums:
        return self._sums.get((PLAIN, size), _Sums())

    def _plain_pace(self, batch: int) -> float:
        plain = self._plain(size_of(batch))
        return plain.usual / plain.passed
