"""What the server around the routes needs of whatever answers them: an engine's thread, or other servers."""

from __future__ import annotations

import threading
from typing import Protocol

from outrider.engine.stats import Stats
from outrider.server.queue.observers import EngineObserver, EngineState, QueueSnapshot


class Backend(Protocol):
    """Loaded, asked for its state, drained and stopped by the server; any thread may call it."""

    observers: list[EngineObserver]
    """Told of every sequence that ends; filled before `start`."""
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
        """Take nothing new; stop when everything taken has finished, or after `timeout` seconds."""
        ...

    def snapshot(self) -> QueueSnapshot: ...
    def stats_of(self, seq_id: int) -> Stats | None:
        """The figures of a running sequence so far; None where they are not known."""
        ...
