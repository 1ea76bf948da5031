"""What was measured of one drafter, and the speed-up that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Seconds of a round, by part."""

    draft: float
    verify: float
    host: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.host

    def scaled(self, by: float) -> RoundTimes:
        return RoundTimes(self.draft * by, self.verify * by, self.host * by)


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


Place = tuple[float, int, int, int]
"""Temperature, batch, context and length. Context 0: as long as the prompts are."""


@dataclass(slots=True)
class Measured:
    """One drafter on the user's prompts."""

    drafter: str
    max_tokens: int
    lengths: tuple[int, ...]
    """Those that are run in every cell, 0 among them: plain decoding in the same run."""
    acceptance: dict[tuple[float, int], Acceptance] = field(default_factory=dict[tuple[float, int], Acceptance])
    """By temperature and length."""
    rounds: dict[Place, RoundTimes] = field(default_factory=dict[Place, RoundTimes])
    fixed_length: bool = False
    """Drafts have the length they have: trees and the like."""
    answer_tokens: float = 0.0
    """Mean length of the answers."""

    @property
    def temperatures(self) -> list[float]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(temperature for temperature, _ in self.acceptance))

    @property
    def batches(self) -> list[int]:
        return sorted({batch for _, batch, context, _ in self.rounds if not context})

    @property
    def contexts(self) -> list[int]:
        return sorted({context for _, _, context, _ in self.rounds})

    def longest(self, temperature: float) -> Acceptance:
        """Of the longest drafts."""
        return self.acceptance[temperature, self.max_tokens]

    def tau(self, temperature: float, length: int) -> float:
        """Tokens a round with drafts of this length: measured, or cut from the next longer that was run.

        A cut draft has as many tokens accepted as the longer one among its first, but its rounds begin elsewhere in the
        text. How much that brings is known of the next shorter that was run, and is less the nearer the longer is.
        """
        short, long = _neighbours([0, *sorted(n for t, n in self.acceptance if t == temperature)], length)
        longer = self.acceptance[temperature, long]
        cut = longer.tau(length)
        if short in (0, long):
            return cut
        excess = self.acceptance[temperature, short].tau(short) / longer.tau(short) - 1
        return cut * (1 + excess * (long - length) / (long - short))

    def round_seconds(self, temperature: float, batch: int, length: int, context: int = 0) -> float:
        """Seconds of a round with drafts of this length: measured, or between the two nearest that were.

        At a temperature at which this batch or context was not timed, as much more than at the first one as it is in
        the first batch.
        """
        first, own = next(iter(self.rounds))[:2]
        if (temperature, batch, context, 0) in self.rounds:
            return self._timed(temperature, batch, context, length)
        warmer = self._timed(temperature, own, 0, length) / self._timed(first, own, 0, length)
        return self._timed(first, batch, context, length) * warmer

    def _timed(self, temperature: float, batch: int, context: int, length: int) -> float:
        place = temperature, batch, context
        short, long = _neighbours(sorted(n for *own, n in self.rounds if tuple(own) == place), length)
        start, end = (self.rounds[temperature, batch, context, n].total for n in (short, long))
        return start if short == long else start + (end - start) * (length - short) / (long - short)

    def time_again(self, temperature: float, batch: int, times: Mapping[int, RoundTimes]) -> None:
        """Take new times of some lengths, 0 among them. The others keep theirs over that of plain decoding."""
        slower = times[0].total / self.rounds[temperature, batch, 0, 0].total
        for place, known in self.rounds.items():
            if place[:3] == (temperature, batch, 0):
                self.rounds[place] = known.scaled(slower)
        self.rounds |= {(temperature, batch, 0, length): each for length, each in times.items()}

    def speedup(self, temperature: float, batch: int, length: int, context: int = 0) -> float:
        """Over plain decoding, predicted: the tokens of a round, and how much longer it takes."""
        plain, drafted = (self.round_seconds(temperature, batch, n, context) for n in (0, length))
        return self.tau(temperature, length) * plain / drafted

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
            "acceptance": [{"temperature": t, "length": n} | asdict(each) for (t, n), each in self.acceptance.items()],
            "rounds": [
                {"temperature": t, "batch": b, "context": c, "length": n} | asdict(each)
                for (t, b, c, n), each in self.rounds.items()
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Measured:
        """What `as_json` wrote. KeyError or TypeError for anything else."""
        acceptance = {
            (float(each["temperature"]), each["length"]): Acceptance(tuple(each["drafted"]), tuple(each["accepted"]))
            for each in data["acceptance"]
        }
        rounds = {
            (float(each["temperature"]), each["batch"], each["context"], each["length"]): RoundTimes(
                each["draft"], each["verify"], each["host"]
            )
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


def _neighbours(known: Seq[int], at: int) -> tuple[int, int]:
    """The nearest of these sorted numbers below and above, or the number itself twice; outside of them, the nearest."""
    below, above = [n for n in known if n <= at], [n for n in known if n >= at]
    return (below or above)[-1 if below else 0], (above or below)[0 if above else -1]
