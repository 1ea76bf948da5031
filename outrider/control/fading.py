"""When what is known of a drafter fades: one that no plan asks for is judged anew after a while."""

from __future__ import annotations

FADE_SHARE = 0.08
"""The share of its figures that a drafter which no plan asks loses each time: half of them in 500 rounds."""
_FADE_ROUNDS = 64
"""The number of rounds from one time to the next."""


class Fading:
    """When drafters were last asked or judged, and which figures fade since."""

    def __init__(self, drafters: int) -> None:
        self.asked = [0] * drafters
        """The round in which each drafter was last asked."""
        self._judged = [0] * drafters
        """The round in which each was last asked, probed, or had guesses judged by the text: its rates are not old."""
        self._next = 0
        """Nothing is due before this round."""

    def note_asked(self, drafter: int, now: int) -> None:
        """now: the round."""
        self.asked[drafter] = self._judged[drafter] = now

    def note_judged(self, drafter: int, now: int) -> None:
        self._judged[drafter] = now

    def due(self, now: int, rounds: int) -> tuple[list[int], list[int]]:
        """The drafters whose acceptance rates fade, and those whose other figures do, in the last rounds up to `now`.

        rounds: the number of those, at most _FADE_ROUNDS; earlier rounds were passed in earlier calls.
        """
        if now < self._next:
            return [], []
        judged = [(now - each) % _FADE_ROUNDS for each in self._judged]
        asked = [(now + 1 - each) % _FADE_ROUNDS for each in self.asked]
        # a drafter that is noted after this call, in the same round, is due a round earlier than is seen here
        self._next = now + _FADE_ROUNDS - 1 - max(judged + asked, default=0)
        return [i for i, n in enumerate(judged) if n < rounds], [i for i, n in enumerate(asked) if n < rounds]
