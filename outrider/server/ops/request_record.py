"""What is known of one HTTP request and its response, gathered for the log, the metrics and the trace."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from outrider.engine.events import Event
from outrider.engine.stats import Stats

CURRENT_RECORD: ContextVar[RequestRecord | None] = ContextVar("the request being answered", default=None)
CLIENT_CLOSED_REQUEST = 499  # the client left before a response began; nginx's status for it
MAX_BODY_CHARS = 1 << 16  # of a body in the log, with --log-prompts
STATS_GRACE_SECONDS = 2.0  # how long the stats of cancelled sequences may take to arrive


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request. Changed in the event loop alone; `on_close` is called once, when its response and all its
    sequences have ended."""

    id: str
    method: str
    on_close: Callable[[RequestRecord], None]
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    """The client's traceparent and tracestate."""
    route: str = "other"
    """One of the app's routes, or 'other': never a client's own words."""
    client: str = ""
    body: str = ""
    """The request's body; empty without --log-prompts."""
    status: int = CLIENT_CLOSED_REQUEST
    began: float = field(default_factory=time.time)
    seconds: float = 0.0
    stats: Stats = field(default_factory=Stats)
    """Summed over its sequences."""
    finish_reasons: list[str] = field(default_factory=list[str])
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    _start: float = field(default_factory=time.perf_counter)
    _sequences: int = 0
    _response_ended: bool = False
    _closed: bool = False
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    def expect_sequences(self, count: int) -> None:
        """Expect `count` more sequences to finish."""
        self._sequences += count

    def sequence_finished(self, event: Event, arrived: float, admitted: float | None) -> None:
        """One of its sequences has finished. Any thread may call it."""
        try:
            self._loop.call_soon_threadsafe(self._add, event, arrived, admitted)
        except RuntimeError:  # the event loop is closed, and every record with it
            return

    def end(self, status: int) -> None:
        """The response has ended, complete or not."""
        self.status, self.seconds, self._response_ended = status, time.perf_counter() - self._start, True
        if self._sequences:  # cancelled: their stats come with the next round, or never from an engine that died
            self._loop.call_later(STATS_GRACE_SECONDS, self.close)
        else:
            self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.on_close(self)

    def _add(self, event: Event, arrived: float, admitted: float | None) -> None:
        self._sequences -= 1
        self.finish_reasons.append(finish_reason_of(event))
        if admitted is not None:
            self.queue_seconds = max(self.queue_seconds or 0.0, admitted - arrived)
        if event.stats is not None:
            self.stats.add(event.stats)
            if event.stats.first:
                first = event.stats.first - arrived
                self.first_token_seconds = min(first, self.first_token_seconds or first)
        if self._response_ended and not self._sequences:
            self.close()


def finish_reason_of(event: Event) -> str:
    """Why a sequence ended; `scored` for a prompt that was only scored, which has no stats."""
    return "scored" if event.finish == "stop" and event.stats is None else event.finish or "error"


def record_body(body: bytes) -> None:
    """Keep the body of the current request for the log."""
    record = CURRENT_RECORD.get()
    if record is not None:
        record.body = body[:MAX_BODY_CHARS].decode(errors="replace")
