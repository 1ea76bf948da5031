"""The measurements of one drafter, and the speed-up that they predict."""

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
    """By position in the draft, the shares of all rounds that drafted a token there, and that accepted it."""

    drafted: tuple[float, ...]
    accepted: tuple[float, ...]

    def tau(self, length: int) -> float:
        """Tokens a round if drafts are cut to this length."""
        return 1 + sum(self.accepted[:length])

    @property
    def conditional(self) -> list[float]:
        """For each position, the chance that its token is accepted, given that it was drafted and all before it were
        accepted."""
        before = (1.0, *self.accepted)
        reached = [min(d, b) for d, b in zip(self.drafted, before, strict=False)]
        return [a / r if r else 0.0 for a, r in zip(self.accepted, reached, strict=True)]


Place = tuple[float, int, int, int]
"""Temperature, batch, context and draft length. Context 0: that of the prompts as they are."""


@dataclass(slots=True)
class Measured:
    """The measurements of one drafter on the user's prompts."""

    drafter: str
    max_tokens: int
    lengths: tuple[int, ...]
    """The draft lengths that are run in every cell. They include 0: plain decoding in the same run."""
    acceptance: dict[tuple[float, int], Acceptance] = field(default_factory=dict[tuple[float, int], Acceptance])
    """By temperature and length."""
    rounds: dict[Place, RoundTimes] = field(default_factory=dict[Place, RoundTimes])
    fixed_length: bool = False
    """Whether `max_tokens` is the only length to choose from, as for trees."""
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
        """The acceptance of the longest drafts."""
        return self.acceptance[temperature, self.max_tokens]

    def tau(self, temperature: float, length: int) -> float:
        """Tokens a round with drafts of this length: measured, or estimated from the next longer length that was run.

        A cut draft keeps the acceptance of the longer draft's first tokens, but its rounds begin elsewhere in the text.
        The effect of that is measured at the next shorter length that was run, and shrinks towards the longer one.
        """
        short, long = _neighbours([0, *sorted(n for t, n in self.acceptance if t == temperature)], length)
        longer = self.acceptance[temperature, long]
        cut = longer.tau(length)
        if short in (0, long):
            return cut
        excess = self.acceptance[temperature, short].tau(short) / longer.tau(short) - 1
        return cut * (1 + excess * (long - length) / (long - short))

    def round_seconds(self, temperature: float, batch: int, length: int, context: int = 0) -> float:
        """Seconds of a round with drafts of this length: measured, or interpolated between the two nearest lengths.

        Where this batch or context was not timed at this temperature, its time at the first temperature is scaled by
        the ratio of the two temperatures' times in the first batch.
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
        """Replace the times of some lengths, 0 included. The others are scaled as plain decoding's time changed."""
        slower = times[0].total / self.rounds[temperature, batch, 0, 0].total
        for place, known in self.rounds.items():
            if place[:3] == (temperature, batch, 0):
                self.rounds[place] = known.scaled(slower)
        self.rounds |= {(temperature, batch, 0, length): each for length, each in times.items()}

    def speedup(self, temperature: float, batch: int, length: int, context: int = 0) -> float:
        """The predicted speed-up over plain decoding: tokens a round, times the time of a plain round over its own."""
        plain, drafted = (self.round_seconds(temperature, batch, n, context) for n in (0, length))
        return self.tau(temperature, length) * plain / drafted

    def choices(self) -> Seq[int]:
        """The draft lengths to choose from, without 0."""
        return (self.max_tokens,) if self.fixed_length else range(1, self.max_tokens + 1)

    def best_length(self, temperature: float, batch: int, context: int = 0) -> int:
        return max(self.choices(), key=lambda length: self.speedup(temperature, batch, length, context))

    def best_speedup(self, temperature: float, batch: int, context: int = 0) -> float:
        return self.speedup(temperature, batch, self.best_length(temperature, batch, context), context)

    def break_even(self, temperature: float) -> int | None:
        """The largest timed batch up to which some length is predicted to gain; None where the smallest batch loses."""
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
    """The nearest of the sorted numbers at most and at least `at`; outside their range, the nearest one twice."""
    below, above = [n for n in known if n <= at], [n for n in known if n >= at]
    return (below or above)[-1 if below else 0], (above or below)[0 if above else -1]
