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
    lengths: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """How often each (drafter, length) was chosen; ("", 0) is plain decoding."""
    saved: float = 0.0
    """Seconds that its accepted tokens would have taken without drafts, less what the drafts cost. May be negative."""

    def add(self, other: Decisions) -> None:
        self.rounds += other.rounds
        self.lengths.update(other.lengths)
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
        self._resting: list[int] = []
        """The sequences of the last rounds, nobody being asked for them."""
        self._rests = 0
        """How many such rounds are not in `_known` yet."""

    def __len__(self) -> int:
        return len(self._known)

    def note(self, rounds: Streak) -> None:
        """Note rounds that somebody was asked for."""
        count, plain, extra = len(rounds.accepted), rounds.price.plain, rounds.extra
        for row in rounds.rows:
            chosen = self._of(rounds.seq_ids[row])
            length = min(rounds.plan.lengths[row], rounds.drafted[row])
            chosen.rounds += count
            chosen.lengths[(self._names[rounds.plan.drafters[row]] if length else "", length)] += count
            chosen.saved += sum([each[row] for each in rounds.accepted]) * plain - count * extra

    def note_rest(self, seq_ids: list[int], rounds: int = 1) -> bool:
        """Note rounds that nobody was asked for; whether the one before them was another, or of others.

        Else nothing is done for each sequence: a batch may be large, and a round short.
        """
        is_first = seq_ids != self._resting
        if is_first:
            self.end_rest()
            self._resting = seq_ids
        self._rests += rounds
        return is_first

    def end_rest(self) -> None:
        """The rounds without drafts that are not counted yet are."""
        if self._rests:
            for seq_id in self._resting:
                chosen = self._of(seq_id)
                chosen.rounds += self._rests
                chosen.lengths["", 0] += self._rests
        self._resting, self._rests = [], 0

    def forget(self, seq_id: int) -> Decisions:
        """What was decided for a request; it is dropped with that."""
        self.end_rest()
        return self._known.pop(seq_id, None) or Decisions()

    def _of(self, seq_id: int) -> Decisions:
        known = self._known.get(seq_id)
        if known is None:
            known = self._known[seq_id] = Decisions()
        return known
