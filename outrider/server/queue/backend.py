"""What the server needs of its backend, which answers requests: an engine's thread, or other servers."""

from __future__ import annotations

import threading
from typing import Protocol

from outrider.engine.stats import Stats
from outrider.server.queue.observers import EngineObserver, EngineState, QueueSnapshot


class Backend(Protocol):
    """Started, asked for its state, drained and stopped by the server. Any thread may call all but `stats_of`."""

    observers: list[EngineObserver]
    """Called for every finished sequence, and by an engine's thread for every round; filled before `start`."""
    stopped: threading.Event
    """Set when nothing more will be answered."""
    was_ready: bool
    """Whether it has ever been ready."""
    failure: BaseException | None
    """The error that stopped it."""

    @property
    def state(self) -> EngineState: ...
    def start(self) -> None: ...
    def drain(self, timeout: float) -> None:
        """Accept nothing new; stop when everything accepted has finished, or after `timeout` seconds."""
        ...

    def snapshot(self) -> QueueSnapshot: ...
    def stats_of(self, seq_id: int) -> Stats | None:
        """The figures of a running sequence so far; None where they are not known. Called by observers."""
        ...
