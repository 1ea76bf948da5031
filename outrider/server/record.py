"""One HTTP request and its answer, put together from what the connection and the worker tell of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.engine.events import Event
from outrider.engine.stats import Stats

CURRENT: ContextVar[Record | None] = ContextVar("the request being answered", default=None)
LEFT = 499  # the client left before any answer began; nginx's number for it
MAX_BODY_CHARS = 1 << 16  # of a body in the log, where the operator asked for it
CORRUPTED = "NaN or infinite"  # the engine's words where the model's logits are no numbers
GRACE = 2.0  # seconds the figures of texts that nobody waits for any more may take to come


@dataclass(slots=True, eq=False)
class Record:
    """Changed in the event loop alone. `closed` is called once, when the answer and all its texts have ended."""

    id: str
    method: str
    closed: Callable[[Record], None]
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    """The client's traceparent and tracestate."""
    route: str = "other"
    """One of the app's own, or 'other': never what a client wrote."""
    client: str = ""
    body: str = ""
    """What the client sent; noted only where the operator asked for it."""
    status: int = LEFT
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)
    """Summed over its texts."""
    finish_reasons: list[str] = field(default_factory=list[str])
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    _start: float = field(default_factory=time.perf_counter)
    _texts: int = 0
    _over: bool = False
    _told: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def expect(self, texts: int) -> None:
        """So many texts were asked for."""
        self._texts += texts

    def finished(self, event: Event, arrived: float, admitted: float | None) -> None:
        """From the worker's thread: one of its texts has ended."""
        try:
            self._loop.call_soon_threadsafe(self._finish, event, arrived, admitted)
        except RuntimeError:  # the loop has closed: its exchanges were closed before it
            return

    def end(self, status: int) -> None:
        """The answer is over, whole or not."""
        self.status, self.seconds, self._over = status, time.perf_counter() - self._start, True
        if self._texts:  # cancelled, and its figures come with the next round; not at all where the engine has died
            self._loop.call_later(GRACE, self.close)
        else:
            self.close()

    def close(self) -> None:
        if not self._told:
            self._told = True
            self.closed(self)

    def _finish(self, event: Event, arrived: float, admitted: float | None) -> None:
        self._texts -= 1
        self.finish_reasons.append(reason_of(event))
        if admitted is not None:
            self.queue_seconds = max(self.queue_seconds or 0.0, admitted - arrived)
        if event.stats is not None:
            self.stats.add(event.stats)
            if event.stats.first:
                first = event.stats.first - arrived
                self.first_token_seconds = min(first, self.first_token_seconds or first)
        if self._over and not self._texts:
            self.close()


def reason_of(event: Event) -> str:
    """Why a text ended; one that was only scored wrote nothing and has no figures."""
    return "scored" if event.finish == "stop" and event.stats is None else event.finish or "error"


def is_corrupted(event: Event) -> bool:
    """Whether the model's numbers ended the text, and not what the request asked for."""
    return CORRUPTED in event.error


def note_body(body: bytes) -> None:
    """Keep the body of the request being answered, for the log."""
    record = CURRENT.get()
    if record is not None:
        record.body = body[:MAX_BODY_CHARS].decode(errors="replace")
