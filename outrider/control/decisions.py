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
        count, plain, cost = len(rounds.accepted), rounds.price.plain, len(rounds.accepted) * rounds.extra
        accepted, keys = [*map(sum, zip(*rounds.accepted, strict=True))], dict[tuple[int, int], tuple[str, int]]()
        lengths, drafters = [*map(min, rounds.plan.lengths, rounds.drafted)], rounds.plan.drafters
        for row in rounds.rows:
            chosen, made = self._of(rounds.seq_ids[row]), (drafters[row], lengths[row])
            key = keys.get(made)
            if key is None:
                key = keys[made] = (self._names[made[0]], made[1]) if made[1] else ("", 0)
            chosen.rounds += count
            chosen.lengths[key] += count
            chosen.saved += accepted[row] * plain - cost

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
