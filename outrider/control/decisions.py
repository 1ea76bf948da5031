"""What a controller decided for each request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.control.streak import Streak


@dataclass(slots=True)
class Decisions:
    """What was decided for one request, and what it is believed to have saved."""

    rounds: int = 0
    lengths: Counter[tuple[str, int]] = field(default_factory=Counter)
    """How often each (drafter, length) was chosen; ("", 0) is plain decoding."""
    saved: float = 0.0
    """Seconds that its accepted tokens would have taken without drafts, less what the drafts cost. May be negative."""

    def add(self, other: Decisions) -> None:
        self.rounds += other.rounds
        for chosen, rounds in other.lengths.items():
            self.lengths[chosen] += rounds
        self.saved += other.saved

    def as_dict(self) -> dict[str, object]:
        chosen = [{"drafter": d or "none", "length": n, "rounds": c} for (d, n), c in sorted(self.lengths.items())]
        return {"rounds": self.rounds, "chosen": chosen, "saved_seconds": self.saved}


class DecisionLog:
    """What was decided for the live requests."""

    def __init__(self, names: Seq[str]) -> None:
        """names: of the drafters."""
        self._names = names
        self._known: dict[int, Decisions] = {}
        """By sequence id: its decisions, without the rounds of a rest that still goes on."""
        self._resting: list[int] | None = None
        """The sequences of the last rounds, if nobody was asked to draft; None: one has ended, or a drafter was asked.
        """
        self._since: dict[int, int] = {}
        """By id of each sequence that rests: the number of rounds in `_rests` when it began to."""
        self._rests = 0
        """The number of rounds so far in which nobody was asked to draft."""

    def __len__(self) -> int:
        """The number of requests that anything is kept of."""
        return len(self._known.keys() | self._since.keys())

    def note(self, rounds: Streak) -> None:
        """Note rounds in which drafters were asked, as far as they are not noted yet."""
        new = rounds.accepted[rounds.decided :]
        if not new:
            return
        rounds.decided += len(new)
        count, plain, cost = len(new), rounds.price.plain, len(new) * rounds.extra
        accepted, keys = [*map(sum, zip(*new, strict=True))], dict[tuple[int, int], tuple[str, int]]()
        lengths, drafters = [*map(min, rounds.plan.lengths, rounds.drafted)], rounds.plan.drafters
        for row in rounds.rows:
            chosen, made = self._of(rounds.seq_ids[row]), (drafters[row], lengths[row])
            key = keys.get(made)
            if key is None:
                key = keys[made] = (self._names[made[0]], made[1]) if made[1] else ("", 0)
            chosen.rounds += count
            chosen.lengths[key] += count
            chosen.saved += accepted[row] * plain - cost

    def note_rest(self, seq_ids: Seq[int], rounds: int = 1) -> Seq[int]:
        """Note rounds in which nobody was asked to draft; returns those of their sequences that did not rest before.

        Nothing is done for each of the others: a batch may be large, and a round short.
        """
        new: Seq[int] = ()
        if seq_ids != self._resting:
            new = self._begin_rest(seq_ids)
            self._resting = [*seq_ids]
        self._rests += rounds
        return new

    def _begin_rest(self, seq_ids: Seq[int]) -> list[int]:
        """Let these sequences rest from now on, and no others; returns those that did not before."""
        since = self._since
        new = [seq_id for seq_id in seq_ids if seq_id not in since]
        if len(since) + len(new) > len(seq_ids):
            for seq_id in since.keys() - seq_ids:
                self._count_rest(seq_id)
        for seq_id in new:
            since[seq_id] = self._rests
        return new

    def end_rest(self) -> None:
        """A drafter is asked: count the rounds without drafts of each sequence that rested."""
        for seq_id in [*self._since]:
            self._count_rest(seq_id)
        self._resting = None

    def _count_rest(self, seq_id: int) -> None:
        """End the rest of a sequence, and count its rounds."""
        rounds = self._rests - self._since.pop(seq_id)
        if rounds:
            chosen = self._of(seq_id)
            chosen.rounds += rounds
            chosen.lengths["", 0] += rounds

    def forget(self, seq_id: int) -> Decisions:
        """Drop what was decided for a request, and return it."""
        if seq_id in self._since:
            self._count_rest(seq_id)
            self._resting = None
        return self._known.pop(seq_id, None) or Decisions()

    def _of(self, seq_id: int) -> Decisions:
        known = self._known.get(seq_id)
        if known is None:
            known = self._known[seq_id] = Decisions()
        return known
