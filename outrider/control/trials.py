"""When to ask a drafter whose drafts are seen before they are scored, and which costs the host's time alone.

While that pays for all; else for requests that are new, and for all now and then.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

TRIAL_ROUNDS = 8
"""A trial lasts so many rounds."""
_MIN_REST, _MAX_REST = 32, 256
"""Rounds between two trials of all requests, doubled while they do not pay."""
_RECENT_ROUNDS = 64
"""The gain is a running mean of about so many rounds: drafts may come rarely, and be long."""


class Trials:
    """What asking a drafter gained of late, and who is asked for."""

    def __init__(self) -> None:
        self._gain = 0.0
        self._rounds = 0
        """How many tell the gain."""
        self._rest, self._next = _MIN_REST, 0
        self._tried: set[int] = set()
        """Requests that were asked for."""

    @property
    def pays(self) -> bool:
        """Whether asking gains more than it takes, as far as is known."""
        return self._rounds < _RECENT_ROUNDS or self._gain > 0

    def note(self, gain: float) -> None:
        """Note a round: the seconds that its drafts saved, less what they and asking took."""
        self._rounds += 1
        self._gain += (gain - self._gain) / min(self._rounds, _RECENT_ROUNDS)

    def choose(self, seq_ids: Seq[int], now: int) -> list[bool]:
        """For which requests to ask in round `now`."""
        if self.pays:
            self._rest = _MIN_REST
            chosen = [True] * len(seq_ids)
        elif now >= self._next:
            self._next, self._rest = now + self._rest, min(2 * self._rest, _MAX_REST)
            chosen = [True] * len(seq_ids)
        else:
            chosen = [seq_id not in self._tried for seq_id in seq_ids]
        self._tried.update(seq_ids)
        return chosen

    def forget(self, seq_id: int) -> None:
        self._tried.discard(seq_id)
