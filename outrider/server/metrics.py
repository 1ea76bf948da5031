"""The server's figures, gathered as the worker tells of them. How they are spelled is in exposition.py."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace

from outrider.engine.events import Event
from outrider.engine.stats import Stats, Tally, total
from outrider.server.jobs import Unavailable
from outrider.server.record import is_corrupted, reason_of
from outrider.server.worker import Finished, Round, Worker

SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
PACES = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class Histogram:
    """How often values fell between bounds; one more place than bounds, for what lies above all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list[int])
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def copy(self) -> Histogram:
        return replace(self, counts=list(self.counts))


@dataclass(slots=True)
class Figures:
    """All that is counted, at one moment."""

    http: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Answers, by route and status."""
    finished: Counter[str] = field(default_factory=Counter[str])
    """Texts, by finish reason."""
    corrupted: int = 0
    """Texts that ended because the model gave no numbers."""
    stats: Stats = field(default_factory=Stats)
    """Summed over texts; in a copy, those not yet ended too."""
    queue: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Seconds from a request's arrival to its place in the batch."""
    first: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Seconds from arrival to the first token."""
    pace: Histogram = field(default_factory=lambda: Histogram(PACES))
    """Seconds between tokens: a round's time shared among the tokens it brought."""
    whole: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    """Seconds from arrival to the end."""


class Metrics:
    """Gathers figures from the worker's thread and the event loop's; `figures` gives a copy to whoever asks.

    The lock is held for a few additions, or to copy.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._figures = Figures()
        self._live: dict[int, Stats] = {}
        """The engine's own figures of texts not yet ended, by sequence; it goes on changing them."""
        self._told: dict[int, float] = {}
        """When each of those texts last got a token."""
        worker.observers.append(self.observe)

    def observe(self, what: Finished | Round) -> None:
        """Told by the worker, in its thread, of each text that ended and of each round."""
        now = time.perf_counter()
        with self._lock:
            if isinstance(what, Finished):
                self._finish(what, now)
            else:
                self._note_round(what, now)
        if isinstance(what, Finished) and what.record is not None:
            what.record.finished(what.event, what.arrived, what.admitted)

    def answered(self, route: str, status: int) -> None:
        """Told by the event loop of each answer. route: one of the app's own, never what a client wrote."""
        with self._lock:
            self._figures.http[route, status] += 1

    def figures(self) -> Figures:
        """A copy of all figures, with those of the texts still being written."""
        with self._lock:
            f = self._figures
            return replace(
                f,
                http=f.http.copy(),
                finished=f.finished.copy(),
                stats=total([f.stats, *map(_still, self._live.values())]),
                queue=f.queue.copy(),
                first=f.first.copy(),
                pace=f.pace.copy(),
                whole=f.whole.copy(),
            )

    def _note_round(self, what: Round, now: float) -> None:
        for event in what.events:
            if event.finish is None:  # one that ended was told of before its round
                self._pace(event, now)
                if event.seq_id not in self._live:
                    self._adopt(event.seq_id)

    def _adopt(self, seq_id: int) -> None:
        """Follow a text while it is written; one first seen while the server drains counts when it ends."""
        try:
            engine = self._worker.llm.engine
        except Unavailable:
            return
        if engine.alive(seq_id):
            self._live[seq_id] = engine.live(seq_id).stats

    def _finish(self, what: Finished, now: float) -> None:
        event, f = what.event, self._figures
        self._pace(event, now)
        self._told.pop(event.seq_id, None)
        self._live.pop(event.seq_id, None)
        f.finished[reason_of(event)] += 1
        f.corrupted += is_corrupted(event)
        f.whole.observe(now - what.arrived)
        if what.admitted is not None:
            f.queue.observe(what.admitted - what.arrived)
        if event.stats is not None:
            f.stats.add(event.stats)
            if event.stats.first:
                f.first.observe(event.stats.first - what.arrived)

    def _pace(self, event: Event, now: float) -> None:
        if event.tokens:
            if event.seq_id in self._told:
                self._figures.pace.observe((now - self._told[event.seq_id]) / len(event.tokens), len(event.tokens))
            self._told[event.seq_id] = now


def _still(stats: Stats) -> Stats:
    """A text's figures while the engine's thread changes them: its tallies as they are now."""
    drafters = {name: _copy(tally) for name, tally in list(stats.drafters.items())}
    return replace(stats, all=_copy(stats.all), drafters=drafters)


def _copy(tally: Tally) -> Tally:
    return replace(tally, drafted_at=list(tally.drafted_at), accepted_at=list(tally.accepted_at))
