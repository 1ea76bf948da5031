"""When to ask the free drafter, whose drafts are seen before they are scored, and which costs only the host's time.

While that pays, it is asked for all requests; else for new ones, and for all requests now and then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.control.costs import size_of

TRIAL_ROUNDS = 3
"""The rounds of a trial of all requests, and those in which the drafter is asked for a new request."""
REST_ROUNDS, _MAX_REST, _SHARE = 16, 64, 0.02
"""Rounds between two trials of all requests: at least, and at most where trials would take more than this share of the
time. On a fast machine a lookup that finds nothing takes a fifth of a round."""
_LOSS_ROUNDS = 16
"""The loss of a round is a mean over about this many rounds that lost."""
_FIRST_CREDIT, _MAX_CREDIT = 3.0, 6.0
"""The credit at first, and at most after gains: what asking may lose before it stops, in rounds without drafts."""


@dataclass(slots=True)
class _Size:
    """What is known of batches of one size: what pays for one request may not for several."""

    credit: float = _FIRST_CREDIT
    """What asking may still lose, in rounds without drafts."""
    next: int = 0
    """The round of the next trial."""
    loss: float = 0.0
    """The mean loss of rounds that lost, in rounds without drafts."""

    @property
    def rest(self) -> int:
        """Rounds until the next trial."""
        return min(max(REST_ROUNDS, int(TRIAL_ROUNDS * self.loss / _SHARE)), _MAX_REST)


class Trials:
    """What asking the drafter gained of late, and which requests it is asked for."""

    def __init__(self) -> None:
        self._sizes: defaultdict[int, _Size] = defaultdict(_Size)
        self._known: set[int] = set()
        """The requests that the drafter was asked for."""

    def pays(self, batch: int) -> bool:
        """Whether asking gains more than it takes, as far as is known."""
        return self._sizes[size_of(batch)].credit > 0

    def note(self, batch: int, gain: float) -> None:
        """Note a round. gain: what it gained, in rounds without drafts; negative where it lost."""
        size = self._sizes[size_of(batch)]
        size.credit = min(max(0.0, size.credit + gain), _MAX_CREDIT)
        if gain < 0:
            size.loss -= (gain + size.loss) / _LOSS_ROUNDS

    def choose(self, seq_ids: Seq[int], now: int) -> list[bool]:
        """The requests to ask the drafter for in round `now`."""
        size = self._sizes[size_of(len(seq_ids))]
        chosen = [seq_id not in self._known for seq_id in seq_ids]
        if size.credit > 0 or now >= size.next:
            chosen = [True] * len(seq_ids)
            size.next = now + size.rest
        self._known.update(seq_ids)
        return chosen

    def forget(self, seq_id: int) -> None:
        self._known.discard(seq_id)
