"""When what is known of a drafter fades: one that no plan asks for is judged anew after a while."""

from __future__ import annotations

FADE_SHARE = 0.08
"""The share of its figures that a drafter which no plan asks for loses at a time: half of them in 500 rounds."""
_FADE_ROUNDS = 64
"""Rounds between two times."""


class Fading:
    """When drafters were last asked or judged, and which figures fade since."""

    def __init__(self, drafters: int) -> None:
        self.asked = [0] * drafters
        """The round in which each drafter was last asked."""
        self._judged = [0] * drafters
        """The same, or in which the text judged guesses of it: what is known of it is not old."""
        self._next = 0
        """Nothing is due before this round."""

    def note_asked(self, drafter: int, now: int) -> None:
        """now: the round."""
        self.asked[drafter] = self._judged[drafter] = now

    def note_judged(self, drafter: int, now: int) -> None:
        self._judged[drafter] = now

    def due(self, now: int, rounds: int) -> tuple[list[int], list[int]]:
        """The drafters whose rates fade, and those whose own figures do, in the last rounds up to `now`.

        rounds: how many those are, at most _FADE_ROUNDS; all before them were asked for.
        """
        if now < self._next:
            return [], []
        judged = [(now - each) % _FADE_ROUNDS for each in self._judged]
        asked = [(now + 1 - each) % _FADE_ROUNDS for each in self.asked]
        # one that is noted in this very round is due a round earlier than is seen here
        self._next = now + _FADE_ROUNDS - 1 - max(judged + asked, default=0)
        return [i for i, n in enumerate(judged) if n < rounds], [i for i, n in enumerate(asked) if n < rounds]
