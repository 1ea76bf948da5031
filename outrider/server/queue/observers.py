"""What the engine's thread reports to its observers, such as the metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outrider.engine.events import Event
from outrider.engine.prepare import LateWork

EngineState = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """A sequence has finished."""

    client: str
    event: Event
    """Its last event, with its stats; a sequence that never reached the engine has no stats."""
    arrived: float
    """When it was submitted, by time.perf_counter."""
    admitted: float | None
    """When it joined the batch; None: never."""


@dataclass(frozen=True, slots=True)
class RoundFinished:
    """A round has finished."""

    events: tuple[Event, ...]


EngineObserver = Callable[[SequenceFinished | RoundFinished], None]


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """The state of the engine's thread and its queue at one moment."""

    state: EngineState
    running: int
    waiting: int
    pages_used: int
    pages_total: int
    late_work: LateWork
    """What was compiled, captured or allocated after start-up."""
