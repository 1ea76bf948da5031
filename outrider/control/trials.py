"""When to ask a drafter whose drafts are seen before they are scored, and which costs the host's time alone.

While that pays for all; else for requests that are new, and for all now and then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from outrider.control.costs import size_of

TRIAL_ROUNDS = 8
"""A trial lasts so many rounds."""
_MIN_REST, _MAX_REST = 32, 256
"""Rounds between two trials of all requests, doubled while they do not pay."""
_FIRST_CREDIT, _MAX_CREDIT = 1.0, 2.0
"""What asking may lose before it is judged, and at most of what it gained before: times a round without drafts."""
_RECENT_ROUNDS = 64
"""The pace of a request is a running mean of about so many rounds, since drafts may come rarely and be long."""


class AskedRound(NamedTuple):
    """A round that only such a drafter was asked for."""

    accepted: Seq[float]
    """Draft tokens of each request; of drafts that were not scored, those expected."""
    extra: float
    """Seconds beyond a round without drafts, asking included."""
    plain: float
    """Seconds of one without."""
    row: float
    """Seconds of that for each request; the rest it takes for however few."""


@dataclass(slots=True)
class _Size:
    """What is known of batches of one size: what pays for one request may not for several, and the other way round."""

    credit: float = _FIRST_CREDIT
    """What asking may still lose, in rounds without drafts."""
    rest: int = _MIN_REST
    next: int = 0
    """The round of the next trial, and how many rounds after it comes another."""


@dataclass(slots=True)
class _Pace:
    """Draft tokens of a request that are accepted in a round."""

    mean: float = 0.0
    rounds: int = 0

    def add(self, accepted: float) -> None:
        self.rounds += 1
        self.mean += (accepted - self.mean) / min(self.rounds, _RECENT_ROUNDS)


class Trials:
    """What asking a drafter gained of late, and who is asked for."""

    def __init__(self) -> None:
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)
        self._paces: dict[int, _Pace] = {}
        """Of the requests that were asked for."""

    def pays(self, batch: int) -> bool:
        """Whether asking gains more than it takes, as far as is known."""
        return self._sizes[size_of(batch)].credit > 0

    def note(self, seq_ids: Seq[int], asked: AskedRound) -> None:
        """Note a round.

        An accepted token saves its request a round, but the others none: of that round, only what it took for the one
        request. The rest is saved as far as the slowest gets on, too; one that just came does not count as slow.
        """
        for seq_id, accepted in zip(seq_ids, asked.accepted, strict=True):
            self._paces.setdefault(seq_id, _Pace()).add(accepted)
        paces = [self._paces[seq_id] for seq_id in seq_ids]
        known = [pace for pace in paces if pace.rounds >= TRIAL_ROUNDS]
        slowest = min(pace.mean for pace in known or paces)
        shared = asked.plain - len(paces) * asked.row
        gain = asked.row * sum(asked.accepted) + shared * slowest - asked.extra
        size = self._sizes[size_of(len(seq_ids))]
        size.credit = min(max(0.0, size.credit + gain / asked.plain), _MAX_CREDIT)

    def choose(self, seq_ids: Seq[int], now: int) -> list[bool]:
        """For which requests to ask in round `now`."""
        size = self._sizes[size_of(len(seq_ids))]
        chosen = [seq_id not in self._paces for seq_id in seq_ids]
        if size.credit > 0:
            size.rest = _MIN_REST
            chosen = [True] * len(seq_ids)
        elif now >= size.next:
            size.next, size.rest = now + size.rest, min(2 * size.rest, _MAX_REST)
            chosen = [True] * len(seq_ids)
        for seq_id in seq_ids:
            self._paces.setdefault(seq_id, _Pace())
        return chosen

    def forget(self, seq_id: int) -> None:
        self._paces.pop(seq_id, None)
