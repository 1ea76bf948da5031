"""What a round costs: measured times of passes by shape, corrected by the rounds that are run.

A round of plan (batch B, width W, rows N, drafter d, steps γ) takes the time of a target pass of B sequences of at most
W rows, N in all, and of γ draft steps. Those are measured once, at start; while the engine runs, the time of each kind
of round corrects them, so that longer contexts, a busy machine and costs that nobody measured are in the figures after
a few rounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from outrider.control.limits import PassLimits
from outrider.runners.pass_work import Experts

_ROUNDS = 48
"""Corrections are running means of about this many rounds: on a busy machine the same round takes half as long again
now and then, and a mean of few rounds would say more of that than of its kind."""
_PRIOR_ROUNDS = 2
"""The expected time is a prior that counts as this many rounds: a single stall must not rule a kind out."""
_BORROWED_ROUNDS = 1
"""The same where the expected time comes from another size of batch."""
_KIND_ROUNDS = 64
"""One kind of round gets a correction of its own once its drafters were asked in this many rounds, against a prior that
counts as many: until then, what they add to a round is taken to be the same at all widths."""
_START_ROUNDS = 8
"""A time of rounds without drafts at start-up counts as this many rounds."""
_HALF_LIFE = 512
"""Rounds after which half of a correction is forgotten that no round has told of, so that drafters are tried again."""
_PRICED_ROWS = 8
"""The price of a row is the mean over this many rows."""
_MAX_KINDS = 4096
"""Max kinds whose corrections are kept; beyond it, the one not seen for the longest time is dropped."""
MAX_RATIO = 8.0
"""The first time noted for some drafters and size of batch is limited to within this factor of the expected time."""
NEVER = -1
"""Stands for the round of a `RunningMean` to which no round has been added since start-up."""
_MAX_STEP = 1.5
"""Later times are limited to within this factor of the expected time, so that a stall says little."""


@dataclass(frozen=True, slots=True)
class PassTable:
    """Seconds of one model's passes, by (sequences, rows of each). Empty: nothing is known, and a row is free."""

    seconds: Mapping[tuple[int, int], float]
    padded: bool = False
    """Passes are padded to the measured shapes, as captured ones are; else their time depends on all their rows."""
    packed: Mapping[tuple[int, int], float] = field(default_factory=dict[tuple[int, int], float])
    """Where passes are padded: seconds of packed passes, of sequences of different widths, by (sequences, all rows)."""
    experts: Experts | None = None
    """For a mixture of experts: between measured passes time grows with the experts that are read, not with rows."""
    _rows: tuple[tuple[int, float], ...] = field(init=False, repr=False)
    """(rows, seconds) by rows of the measured shapes: the time of the fastest shape with at least as many rows.

    So a pass that was timed in a stall is not taken to cost more than a larger one.
    """
    _found: dict[tuple[int, int, int], float] = field(
        init=False, repr=False, compare=False, default_factory=dict[tuple[int, int, int], float]
    )
    """A cache of `pass_seconds`, for padded passes."""
    _by_rows: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict[int, float])
    """A cache of `rows_seconds`."""
    _packed_by: dict[int, list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict[int, list[int]]
    )
    """A cache of `packed_rows`."""

    def __post_init__(self) -> None:
        best: dict[int, float] = {}
        for (batch, width), seconds in self.seconds.items():
            best[batch * width] = min(seconds, best.get(batch * width, seconds))
        fewest = accumulate((best[rows] for rows in sorted(best, reverse=True)), min)
        object.__setattr__(self, "_rows", (*zip(sorted(best), reversed([*fewest]), strict=True),))

    @property
    def row_price(self) -> float:
        """What a further row costs, in passes of one row: the mean over the first few."""
        return (self.rows_seconds(_PRICED_ROWS) / self.rows_seconds(1) - 1) / (_PRICED_ROWS - 1)

    def pass_seconds(self, batch: int, width: int, rows: int = 0) -> float:
        """Seconds of a pass of `batch` sequences of at most `width` rows. rows: of all; 0: each has `width`."""
        rows = rows or batch * width
        if not self.padded:
            return self.rows_seconds(rows)
        known = self._found.get((batch, width, rows))
        if known is None:
            fits = [s for (b, w), s in self.seconds.items() if b >= batch and w >= width and b < 2 * batch]
            fits += [s for (b, n), s in self.packed.items() if b >= batch and n >= rows and b < 2 * batch]
            known = self._found[batch, width, rows] = min(fits) if fits else self.rows_seconds(rows)
        return known

    def packed_rows(self, batch: int) -> list[int]:
        """The numbers of rows of the packed passes for this many sequences, in ascending order."""
        known = self._packed_by.get(batch)
        if known is None:
            known = self._packed_by[batch] = sorted(n for b, n in self.packed if batch <= b < 2 * batch)
        return known

    def padded_rows(self, batch: int, width: int, rows: int) -> int:
        """The rows of the pass that is run: of a packed one, where that has fewer than `width` for each sequence."""
        fits = [n for b, n in self.packed if batch <= b < 2 * batch and rows <= n < b * width]
        return min(fits, default=batch * width)

    def rows_seconds(self, rows: int) -> float:
        """Seconds of a pass of this many rows in all: interpolated, beyond the largest measured pass extrapolated."""
        known = self._by_rows.get(rows)
        if known is None:
            known = self._by_rows[rows] = self._interpolated(rows)
        return known

    def _interpolated(self, rows: int) -> float:
        if not self._rows:
            return 1.0
        counts = [count for count, _ in self._rows]
        at = bisect_left(counts, rows)
        if at < len(counts) and counts[at] == rows:
            return self._rows[at][1]
        if at == 0 or len(counts) == 1:
            return self._rows[0][1]
        (low, fast), (high, slow) = self._rows[at - 1 : at + 1] if at < len(counts) else self._rows[-2:]
        start, end, here = (self._read_by(count) for count in (low, high, rows))
        slope = max(0.0, (slow - fast) / (end - start)) if end > start else 0.0
        return (fast if at < len(counts) else slow) + slope * (here - (start if at < len(counts) else end))

    def _read_by(self, rows: int) -> float:
        """What the time of a pass grows with: its rows, or the number of distinct experts that they read."""
        return rows if self.experts is None else self.experts.distinct(rows)


def size_of(batch: int) -> int:
    """The exponent of the power of two that a batch is padded to: what is called its size."""
    return (batch - 1).bit_length()


class RoundKind(NamedTuple):
    """Rounds that cost the same."""

    batch: int
    width: int
    """Rows of the widest sequence."""
    rows: int
    """Rows of all sequences."""
    drafters: tuple[str, ...] = ()
    """The names of the drafters that are asked."""
    steps: int = 0
    """The number of passes of the draft model among them."""

    @property
    def plain(self) -> bool:
        return not self.drafters


@dataclass(slots=True)
class RunningMean:
    """A running mean over rounds, which returns to its prior while nothing is added."""

    value: float
    count: int = _PRIOR_ROUNDS
    last: int = 0
    """The round in which a value was last added."""
    start: float = 0.0
    """The prior, or a lower value learned since: the mean returns to it while nothing is added."""
    recent: int = _ROUNDS
    """The mean is over about this many rounds."""

    def at(self, now: int) -> float:
        """The mean in round `now`. After `recent` rounds without a value, the longer ago the last, the nearer `start`:
        a mean of rounds that come now and then does not."""
        idle = max(0, now - self.last - self.recent)
        return self.start + (self.value - self.start) * 0.5 ** (idle / _HALF_LIFE)

    def add(self, told: float, now: int, rounds: int = 1) -> None:
        """Add a value. rounds: the number of rounds that it is the mean of."""
        self.last = now
        self.count += rounds
        self.value += (told - self.value) * rounds / max(rounds, min(self.count, self.recent))


class RoundCosts:
    """Expected seconds of rounds, for one target and its drafters."""

    def __init__(self, target: PassTable, drafters: Mapping[str, PassTable] | None = None) -> None:
        """drafters: times of the draft steps of the drafters that run a model, by name."""
        self.target, self.drafters = target, dict(drafters or {})
        self.limits: PassLimits | None = None
        """What the target's passes are bound by, where that was measured."""
        self._levels: dict[int, RunningMean] = {}
        """By `size_of` the batch: the ratio of rounds without drafts to measured passes, which corrects all passes."""
        self._last_size = 0
        self._asking: dict[tuple[str, ...], dict[int, RunningMean]] = {}
        """By drafters and `size_of` the batch: seconds that rounds in which they are asked take beyond their passes.
        These are mostly the host's work, which grows with the sequences, and not with the width of passes."""
        self._kinds: dict[RoundKind, RunningMean] = {}
        """By kind of rounds with drafts: the ratio of their seconds to those of passes and asking, both corrected."""
        self._now = 0
        """Rounds noted so far."""
        self._passes: dict[RoundKind, float] = {}
        """A cache of `_measured`."""

    def seconds(self, kind: RoundKind) -> float:
        """Expected seconds of a round of this kind."""
        own = self._kinds.get(kind) if kind.drafters else None
        return self.shared_seconds(kind) if own is None else self.shared_seconds(kind) * own.at(self._now)

    def shared_seconds(self, kind: RoundKind) -> float:
        """As `seconds`, without the correction of this very kind: so more rows never take less."""
        passes = self._measured(kind) * self._level(kind.batch)
        return passes + self.asking_seconds(kind.drafters, kind.batch) if kind.drafters else passes

    def pass_seconds(self, batch: int, width: int, rows: int) -> float:
        """Expected seconds of the target's pass alone."""
        return self.target.pass_seconds(batch, width, rows) * self._level(batch)

    def asking_seconds(self, drafters: tuple[str, ...], batch: int) -> float:
        """Seconds that it takes to ask these drafters; if they were never asked together, the sum over each of them."""
        known = self._nearest(drafters, size_of(batch))
        if known is not None:
            return max(0.0, known.at(self._now))
        return sum(self.asking_seconds((name,), batch) for name in drafters) if len(drafters) > 1 else 0.0

    def _nearest(self, drafters: tuple[str, ...], size: int) -> RunningMean | None:
        """What asking takes at this size of batch, or the nearest at which these drafters were asked; None: at none."""
        known = self._asking.get(drafters)
        if not known:
            return None
        return known.get(size) or known[min(known, key=lambda each: abs(each - size))]

    def knows_asking(self, kind: RoundKind) -> bool:
        """Whether rounds with these drafters, of this size of batch, were timed since start-up."""
        known = self._asking.get(kind.drafters, {}).get(size_of(kind.batch))
        return known is not None and known.last != NEVER

    def start_with(self, kind: RoundKind, seconds: float) -> None:
        """Take the seconds of rounds at start-up as what rounds of this kind take, until later ones correct it."""
        expected, size = self._measured(kind), size_of(kind.batch)
        if kind.plain:
            self._levels[size] = RunningMean(seconds / expected, _START_ROUNDS)
            self._last_size = size
        else:
            known = self._asking.setdefault(kind.drafters, {})
            extra = max(0.0, seconds - expected * self._level(kind.batch))
            known[size] = RunningMean(extra, _PRIOR_ROUNDS, NEVER, extra)
            for smaller in (known[each] for each in known if each < size):  # one that took longer was disturbed
                smaller.value, smaller.start = min(smaller.value, extra), min(smaller.start, extra)

    def observe(self, kind: RoundKind, seconds: float, rounds: int = 1) -> None:
        """Note the seconds of a round. rounds: the number of rounds that `seconds` is the mean of."""
        if seconds <= 0:
            return
        expected = self._measured(kind)
        if expected <= 0:
            return
        self._now += rounds
        if not kind.plain:
            self._observe_drafted(kind, seconds, expected * self._level(kind.batch), rounds)
            return
        size = size_of(kind.batch)
        known, most = self._levels.get(size), _MAX_STEP
        if known is None:
            prior, most = _BORROWED_ROUNDS if self._levels else _PRIOR_ROUNDS, MAX_RATIO
            known = self._levels[size] = RunningMean(self._level(kind.batch), prior)
        known.add(within(seconds / expected, known.value, most), self._now, rounds)
        self._last_size = size

    def _observe_drafted(self, kind: RoundKind, seconds: float, passes: float, rounds: int) -> None:
        """As `observe`, for rounds with drafts. passes: the expected seconds of their passes."""
        size = size_of(kind.batch)
        known = self._asking.setdefault(kind.drafters, {})
        first = size not in known
        asking = known.setdefault(size, RunningMean(0.0, last=self._now))
        own = self._kinds.setdefault(kind, RunningMean(1.0, _KIND_ROUNDS, self._now, start=1.0))
        asking.value, own.value = asking.at(self._now), own.at(self._now)
        expected = own.value * (passes + max(0.0, asking.value))
        seconds = within(seconds, expected, MAX_RATIO if first else _MAX_STEP)
        asking.add(seconds / own.value - passes, self._now, rounds)
        asking.start = min(asking.start, asking.value)  # rounds at the start were slower than they had to be
        own.last = self._now
        if asking.count > _KIND_ROUNDS:
            own.add(seconds / (passes + max(0.0, asking.value)), self._now, rounds)  # what `asking` does not explain
        self._drop_oldest_kind()

    def _drop_oldest_kind(self) -> None:
        """Keep the corrections of at most `_MAX_KINDS`."""
        if len(self._kinds) > _MAX_KINDS:
            del self._kinds[min(self._kinds, key=lambda each: self._kinds[each].last)]

    def borrows_level(self, batch: int) -> bool:
        """Whether rounds without drafts were timed, but none of a batch of this size."""
        return bool(self._levels) and size_of(batch) not in self._levels

    def _level(self, batch: int) -> float:
        known = self._levels.get(size_of(batch)) or self._levels.get(self._last_size)
        return known.value if known else 1.0

    def _measured(self, kind: RoundKind) -> float:
        """The measured seconds of the passes of such a round, without corrections."""
        known = self._passes.get(kind)
        if known is None:
            if len(self._passes) >= _MAX_KINDS:
                self._passes.clear()
            known = self.target.pass_seconds(kind.batch, kind.width, kind.rows)
            if kind.steps:
                tables = [self.drafters[name] for name in kind.drafters if name in self.drafters]
                known += kind.steps * sum(table.pass_seconds(kind.batch, 1) for table in tables)
            self._passes[kind] = known
        return known

    def padded_kind(self, kind: RoundKind, widths: Seq[int]) -> RoundKind:
        """The kind of the captured pass that takes such a round. widths: those that passes are padded to."""
        if not widths:
            return kind
        width = next((w for w in widths if w >= kind.width), kind.width)
        return kind._replace(width=width, rows=self.target.padded_rows(kind.batch, width, kind.rows))


def within(told: float, expected: float, ratio: float) -> float:
    """`told`, limited to between `expected / ratio` and `expected * ratio`."""
    return min(max(told, expected / ratio), expected * ratio)
