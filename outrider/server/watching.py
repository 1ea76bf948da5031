"""What a worker tells whoever watches it: metrics, logs, and tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outrider.engine.events import Event
from outrider.server.record import Record

State = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class Finished:
    """A text has ended, as observers are told."""

    client: str
    event: Event
    """Its last, with its figures; a text that never reached the engine has none."""
    arrived: float
    """By time.perf_counter."""
    admitted: float | None
    """When it got its place in the batch; None: never."""
    record: Record | None = None
    """The HTTP request it belongs to, where there is one."""


@dataclass(frozen=True, slots=True)
class Round:
    """A round is over, as observers are told."""

    events: tuple[Event, ...]


Observer = Callable[[Finished | Round], None]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Where the server stands now."""

    state: State
    running: int
    waiting: int
    pages_used: int
    pages_total: int
