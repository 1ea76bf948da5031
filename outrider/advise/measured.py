"""What was measured of one drafter, and the speed-up that follows from it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round, by part, and rows of its target pass."""

    draft: float
    verify: float
    host: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.host


@dataclass(frozen=True, slots=True)
class Acceptance:
    """At one temperature, over all rounds: the share in which a draft reached each position, and was accepted there."""

    drafted: tuple[float, ...]
    accepted: tuple[float, ...]

    def tau(self, length: int) -> float:
        """Tokens a round, where drafts are cut to this length."""
        return 1 + sum(self.accepted[:length])

    @property
    def conditional(self) -> list[float]:
        """The chance that each position is accepted, given that it was drafted and those before it were accepted."""
        before = (1.0, *self.accepted)
        reached = [min(d, b) for d, b in zip(self.drafted, before, strict=False)]
        return [a / r if r else 0.0 for a, r in zip(self.accepted, reached, strict=True)]


@dataclass(slots=True)
class Measured:
    """One drafter on the user's prompts."""

    drafter: str
    max_tokens: int
    lengths: tuple[int, ...]
    """Those whose rounds are timed, 0 among them: plain decoding in the same run."""
    acceptance: dict[float, Acceptance] = field(default_factory=dict[float, Acceptance])
    """By temperature."""
    rounds: dict[tuple[int, int, int], RoundTimes] = field(default_factory=dict[tuple[int, int, int], RoundTimes])
    """By (batch, context, length). Context 0: as long as the prompts are."""
    fixed_length: bool = False
    """Drafts have the length they have: trees and the like."""
    answer_tokens: float = 0.0
    """Mean length of the answers."""

    @property
    def batches(self) -> list[int]:
        return sorted({batch for batch, context, _ in self.rounds if not context})

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, context, _ in self.rounds})

    def round_seconds(self, batch: int, length: int, context: int = 0) -> float:
        """Seconds of a round with drafts of this length: measured, or between the two nearest that were."""
        known = sorted((n, t.total) for (b, c, n), t in self.rounds.items() if (b, c) == (batch, context))
        return _between(known, length)

    def speedup(self, temperature: float, batch: int, length: int, context: int = 0) -> float:
        """Over plain decoding, predicted: the tokens of a round, and how much longer it takes."""
        seconds = self.round_seconds(batch, length, context)
        return self.acceptance[temperature].tau(length) * self.round_seconds(batch, 0, context) / seconds

    def choices(self) -> Seq[int]:
        """Lengths to choose from, none excluded."""
        return (self.max_tokens,) if self.fixed_length else range(1, self.max_tokens + 1)

    def best_length(self, temperature: float, batch: int, context: int = 0) -> int:
        return max(self.choices(), key=lambda length: self.speedup(temperature, batch, length, context))

    def best_speedup(self, temperature: float, batch: int, context: int = 0) -> float:
        return self.speedup(temperature, batch, self.best_length(temperature, batch, context), context)

    def break_even(self, temperature: float) -> int | None:
        """The largest timed batch up to which some length gains; None where not even the smallest does."""
        found = None
        for batch in self.batches:
            if self.best_speedup(temperature, batch) < 1:
                break
            found = batch
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "drafter": self.drafter,
            "max_tokens": self.max_tokens,
            "lengths": list(self.lengths),
            "fixed_length": self.fixed_length,
            "answer_tokens": self.answer_tokens,
            "acceptance": [{"temperature": t} | asdict(each) for t, each in self.acceptance.items()],
            "rounds": [
                {"batch": b, "context": c, "length": n} | asdict(each) for (b, c, n), each in self.rounds.items()
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        """What `as_json` wrote. KeyError or TypeError for anything else."""
        acceptance = {
            float(each["temperature"]): Acceptance(tuple(each["drafted"]), tuple(each["accepted"]))
            for each in data["acceptance"]
        }
        rounds = {
            (each["batch"], each["context"], each["length"]): RoundTimes(each["draft"], each["verify"], each["host"])
            for each in data["rounds"]
        }
        return cls(
            data["drafter"],
            data["max_tokens"],
            tuple(data["lengths"]),
            acceptance,
            rounds,
            data["fixed_length"],
            data["answer_tokens"],
        )


def _between(known: Seq[tuple[int, float]], at: int) -> float:
    """A value at a point, on the line between the nearest known ones; the nearest where it is outside of them."""
    below = [each for each in known if each[0] <= at]
    above = [each for each in known if each[0] >= at]
    if not below or not above:
        return (below or above)[-1 if below else 0][1]
    (low, first), (high, last) = below[-1], above[0]
    return first if high == low else first + (last - first) * (at - low) / (high - low)
