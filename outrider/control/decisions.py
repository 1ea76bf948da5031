"""What a controller decided for a request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
