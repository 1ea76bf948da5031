"""The server's metrics, gathered from what its backend reports. prometheus.py writes them out."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, replace

from outrider.engine.events import Event
from outrider.engine.stats import Stats, Tally, total
from outrider.server.ops.request_record import finish_reason_of
from outrider.server.queue.backend import Backend
from outrider.server.queue.observers import RoundFinished, SequenceFinished

LATENCIES = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
TOKEN_LATENCIES = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)


@dataclass(slots=True)
class Histogram:
    """Counts of values between bounds; one more count than bounds, for values above all of them."""

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
class ServerMetrics:
    """Every metric at one moment."""

    http: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])
    """Responses, by route and status."""
    finished: Counter[str] = field(default_factory=Counter[str])
    """Sequences, by finish reason."""
    corrupted: int = 0
    """Sequences that failed because the model's logits were NaN or infinite."""
    stats: Stats = field(default_factory=Stats)
    """Summed over finished sequences; in a copy from `values`, over running ones too."""
    queue: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    """Seconds from a request's arrival to its sequence joining the batch."""
    first_token: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    """Seconds from arrival to the first token."""
    inter_token: Histogram = field(default_factory=lambda: Histogram(TOKEN_LATENCIES))
    """Seconds between tokens: a round's time divided by its tokens."""
    end_to_end: Histogram = field(default_factory=lambda: Histogram(LATENCIES))
    """Seconds from arrival to the end."""


class MetricsCollector:
    """Gathers metrics from the engine's thread and the event loop; `values` returns a copy.

    The lock is held for a few additions, or for the copy.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._values = ServerMetrics()
        self._live: dict[int, Stats] = {}
        """The stats of running sequences, by id; the engine keeps changing them."""
        self._last_token: dict[int, float] = {}
        """When each running sequence last got a token."""
        backend.observers.append(self.observe)

    def observe(self, report: SequenceFinished | RoundFinished) -> None:
        """Called for each finished sequence and each round: on the engine's thread, or the event loop (replicas)."""
        now = time.perf_counter()
        with self._lock:
            if isinstance(report, SequenceFinished):
                self._add_sequence(report, now)
            else:
                self._add_round(report, now)

    def add_response(self, route: str, status: int) -> None:
        """Called in the event loop for each response. route: one of the app's, never a client's own words."""
        with self._lock:
            self._values.http[route, status] += 1

    def values(self) -> ServerMetrics:
        """A copy of every metric, running sequences included."""
        with self._lock:
            f = self._values
            return replace(
                f,
                http=f.http.copy(),
                finished=f.finished.copy(),
                stats=total([f.stats, *map(_copy_stats, self._live.values())]),
                queue=f.queue.copy(),
                first_token=f.first_token.copy(),
                inter_token=f.inter_token.copy(),
                end_to_end=f.end_to_end.copy(),
            )

    def _add_round(self, report: RoundFinished, now: float) -> None:
        for event in report.events:
            if event.finish is None:  # a finished one is reported before its round
                self._observe_tokens(event, now)
                if event.seq_id not in self._live:
                    self._follow(event.seq_id)

    def _follow(self, seq_id: int) -> None:
        """Count a sequence while it runs; one first seen while the server drains counts when it finishes."""
        stats = self._backend.stats_of(seq_id)
        if stats is not None:
            self._live[seq_id] = stats

    def _add_sequence(self, report: SequenceFinished, now: float) -> None:
        event, f = report.event, self._values
        self._observe_tokens(event, now)
        self._last_token.pop(event.seq_id, None)
        self._live.pop(event.seq_id, None)
        f.finished[finish_reason_of(event)] += 1
        f.corrupted += event.at_fault == "model"
        f.end_to_end.observe(now - report.arrived)
        if report.admitted is not None:
            f.queue.observe(report.admitted - report.arrived)
        if event.stats is not None:
            f.stats.add(event.stats)
            if event.stats.first:
                f.first_token.observe(event.stats.first - report.arrived)

    def _observe_tokens(self, event: Event, now: float) -> None:
        if event.tokens:
            if event.seq_id in self._last_token:
                seconds = (now - self._last_token[event.seq_id]) / len(event.tokens)
                self._values.inter_token.observe(seconds, len(event.tokens))
            self._last_token[event.seq_id] = now


def _copy_stats(stats: Stats) -> Stats:
    """A copy of stats that the engine's thread keeps changing."""
    drafters = {name: _copy_tally(tally) for name, tally in list(stats.drafters.items())}
    return replace(stats, plain=_copy_tally(stats.plain), drafters=drafters)


def _copy_tally(tally: Tally) -> Tally:
    return replace(tally, by_depth=list(tally.by_depth), by_accepted=list(tally.by_accepted))
