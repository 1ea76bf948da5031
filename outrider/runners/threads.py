"""The number of CPU threads of a runner's passes, chosen by measurement.

On free cores more threads are faster. Beside other busy processes they can be slower than one: each operation ends
with its last thread, which may be waiting for a core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

MAX_THREADS = 4096
MAX_ROWS = 64  # passes of more rows are not timed: few are alike
TRIAL_PASSES = 5
MAX_RATIO = 0.93  # a trial succeeds where its passes take at most so much of the usual time
CHANGED_RATIO = 1.4  # a pass that takes so much longer or shorter than usual calls for a trial
HOPELESS_RATIO = 2.0  # a trial's pass that takes longer than this ends it
SETTLING_PASSES = 4  # passes after such a change until the usual time has adapted
MIN_INTERVAL, MAX_INTERVAL = 0.25, 4.0  # seconds between trials; doubled while they fail
MAX_LOSS = 0.03  # share of the time that trials may lose
MEASURING_SECONDS = 0.2  # spent measuring at start


def thread_counts(most: int) -> tuple[int, ...]:
    """The counts to choose from: `most`, and its halves down to 1."""
    return tuple(most >> i for i in range(most.bit_length()))


@contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Inside the `with` block torch runs this thread's operations on `count` threads; None: as before."""
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(slots=True)
class _Trial:
    """A few passes with another thread count."""

    index: int
    ratios: list[float] = field(default_factory=list[float])
    """Each pass's time over the usual time of its rows."""
    lost: float = 0.0
    """Seconds by which they took longer than usual."""


class ThreadChooser:
    """Times passes and moves to the neighbouring thread count where that is faster.

    Now and then, and soon after passes have become slower or faster, a few passes run with the neighbouring count.
    """

    def __init__(
        self, counts: Seq[int], first: int | None = None, *, clock: Callable[[], float] = perf_counter, told: str = ""
    ) -> None:
        """counts: descending, without repeats; a single one is always used, none leaves torch's own. first: of counts.

        told: text about how the first count was chosen, for people to read.
        """
        self.counts, self.told, self._clock = tuple(counts), told, clock
        self._index = 0 if first is None else self.counts.index(first)
        self._step = 1
        """The index in `counts` of the next trial's count, less the present index."""
        self._usual: dict[int, float] = {}
        """Seconds of a pass, by its rows: a mean that follows the last few passes."""
        self._trial: _Trial | None = None
        self._settling = 0
        self._interval = MIN_INTERVAL
        self._next_trial = clock() + MIN_INTERVAL
        self._earliest_trial = 0.0
        """The time by which trials have lost no more than MAX_LOSS of the time."""

    @property
    def count(self) -> int | None:
        """The present count; None where torch's own is used."""
        return self.counts[self._index] if self.counts else None

    @contextmanager
    def run_pass(self, rows: int) -> Iterator[None]:
        """Inside the `with` block one pass of so many rows runs, with the present count or a trial's, and is timed."""
        if len(self.counts) < 2 or rows > MAX_ROWS:
            with use_threads(self.count):
                yield
            return
        trial = self._trial if rows in self._usual else None
        began = self._clock()
        with use_threads(self.counts[trial.index] if trial else self.count):
            yield
        now = self._clock()
        if trial is None:
            self._follow(rows, now - began, now)
        else:
            self._judge(trial, now - began, self._usual[rows], now)

    def _follow(self, rows: int, seconds: float, now: float) -> None:
        """Note a pass with the present count; begin a trial where one is due."""
        usual = self._usual.get(rows, seconds)
        self._usual[rows] = (usual + seconds) / 2
        if not usual <= CHANGED_RATIO * seconds <= CHANGED_RATIO**2 * usual:
            self._usual = {rows: self._usual[rows]}  # what is known of other passes is out of date
            self._settling, self._interval, self._next_trial = SETTLING_PASSES, MIN_INTERVAL, now
        elif self._settling:
            self._settling -= 1
        elif now >= max(self._next_trial, self._earliest_trial):
            if not 0 <= self._index + self._step < len(self.counts):
                self._step = -self._step
            self._trial = _Trial(self._index + self._step)

    def _judge(self, trial: _Trial, seconds: float, usual: float, now: float) -> None:
        """Note a trial's pass. At its end, move to its count or stay."""
        trial.ratios.append(seconds / usual)
        trial.lost += max(0.0, seconds - usual)
        hopeless = seconds > HOPELESS_RATIO * usual
        if not hopeless and len(trial.ratios) < TRIAL_PASSES:
            return
        ratio = median(trial.ratios)
        if not hopeless and ratio <= MAX_RATIO:
            self._index, self._interval = trial.index, MIN_INTERVAL
            self._usual = {rows: mean * ratio for rows, mean in self._usual.items()}
        else:
            self._step, self._interval = -self._step, min(2 * self._interval, MAX_INTERVAL)
        self._trial = None
        self._next_trial, self._earliest_trial = now + self._interval, now + trial.lost / MAX_LOSS


def threads_of(device: torch.device, given: int | None, run: Callable[[], object]) -> ThreadChooser:
    """For passes on this device: the given number, or beginning with the fastest for `run`. Off the CPU, no choice."""
    if device.type != "cpu":
        return ThreadChooser(())
    return choose_threads(torch.get_num_threads(), run) if given is None else ThreadChooser((given,), told=str(given))


def choose_threads(most: int, run: Callable[[], object], *, clock: Callable[[], float] = perf_counter) -> ThreadChooser:
    """A chooser over `most` threads and fewer that begins with the count by which `run` is fastest.

    Counts take turns for MEASURING_SECONDS, the larger ones first; those far behind are left out.
    """
    times: dict[int, list[float]] = {}
    counts = thread_counts(most)
    if len(counts) < 2:
        return ThreadChooser(counts, told=f"{most}")
    with use_threads(most):
        run()  # a first run also reads weights from the disk
    end = clock() + MEASURING_SECONDS
    while clock() < end:
        for count in (c for c in counts if clock() < end and not _is_behind(c, times)):
            with use_threads(count):
                began = clock()
                run()
                times.setdefault(count, []).append(clock() - began)
    rates = {count: 1 / median(seconds) for count, seconds in times.items()}
    best = max(rates, key=rates.__getitem__)
    rows = ", ".join(f"{count} thread{'s' * (count > 1)} {rates[count]:.3g}" for count in sorted(rates))
    return ThreadChooser(counts, best, told=f"{best} of {most} (measured: {rows} passes/s)")


def _is_behind(count: int, times: dict[int, list[float]]) -> bool:
    """Whether this count, or if it was not timed the next larger one, takes more than twice the best time."""
    best = min((median(seconds) for seconds in times.values()), default=0.0)
    own = times.get(count) or next((times[c] for c in sorted(times) if c > count), None)
    return own is not None and median(own) > HOPELESS_RATIO * best
