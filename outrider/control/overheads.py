"""Seconds that pass beside rounds: the host's work where texts begin and end, which takes longer with some drafters."""

from __future__ import annotations

from outrider.control.costs import size_of
from outrider.control.running_ratio import RunningRatio

PLAIN = -1
"""In place of a drafter's index: plain decoding."""
_DECAY = 1 - 1 / 256
"""Decay for each round: about the last 256 count."""
_PRIOR_ROUNDS = 64
"""The prior of a drafter's overhead is that of plain decoding, and counts as this many rounds."""
_MAX_STALL = 4.0
"""A round, or one of those that are noted together, counts as at most this many times its usual seconds."""


class Overheads:
    """Seconds beside rounds for each token, by drafter and size of batch.

    For each token, since texts end after a number of tokens, whoever drafts. Their begin and end take the host as long
    with any drafter, except for what that drafter adds: only this part counts against it.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], RunningRatio] = {}
        """By `size_of` the batch and drafter: seconds beyond what rounds take by themselves, over tokens."""

    def note(self, drafter: int, batch: int, tokens: float, usual: float, passed: float, rounds: int = 1) -> None:
        """Note rounds. usual: seconds that they take by themselves; passed: those by the clock."""
        if usual <= 0 or passed <= 0:
            return
        size = size_of(batch)
        known = self._known.get((size, drafter))
        if known is None:
            prior = _PRIOR_ROUNDS * tokens / rounds
            known = self._known[size, drafter] = RunningRatio(prior * self._least(size), prior)
        known.add(min(passed - usual, (_MAX_STALL - 1) * usual / rounds), tokens, _DECAY**rounds)

    def fade(self, drafter: int, part: float) -> None:
        """Forget this part of what is known of a drafter that is not asked: nothing tells what it would take by now."""
        for (size, who), known in self._known.items():
            if who == drafter:
                known.above += part * (known.below * self._least(size) - known.above)

    def seconds(self, drafter: int, batch: int) -> float:
        """Seconds beside rounds for each token, beyond those of plain decoding."""
        size = size_of(batch)
        known = self._known.get((size, drafter))
        return 0.0 if known is None else max(0.0, known.value - self._least(size))

    def _least(self, size: int) -> float:
        """Seconds for each token of plain decoding; where that was not seen, of the drafter that has the fewest."""
        plain = self._known.get((size, PLAIN))
        if plain is not None:
            return plain.value
        return min((each.value for (of, _), each in self._known.items() if of == size), default=0.0)
