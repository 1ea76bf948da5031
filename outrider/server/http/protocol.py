"""uvicorn's HTTP protocol with limits on connections, on incomplete headers, and on clients that do not read.

uvicorn buffers headers without a limit of size or time before the app sees the request, and closes a connection only
when the client has read everything. It also drops the body of a request with an Upgrade header; here that header is
ignored, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outrider.server.http.asgi import error_body
from outrider.server.http.errors import APIError
from outrider.server.http.limits import HttpLimits, headers_too_large
from outrider.server.ops.logs import log_event


def bounded_protocol(limits: HttpLimits) -> type[HttpToolsProtocol]:
    """A protocol class with these limits, for `uvicorn.Config(http=...)`."""
    return type("BoundedHttp", (BoundedHttpProtocol,), {"limits": limits})


IDLE_SECONDS = 1.0  # a connection idle for less is never closed to make room
UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade(?=:)")


class HeadTooLargeError(Exception):
    """Raised inside the parser, which then gives up the connection."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to headers or trailers without end and 408 to slow headers; disconnects clients that do not read."""

    limits: ClassVar[HttpLimits] = HttpLimits()
    idle_since: float | None = None
    """When the connection was made or its last response ended; None: a request is being served."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._error: APIError | None = None
        self._silent = True
        self.idle_since = time.monotonic()
        self._begin_head()
        super().connection_made(transport)
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._silent = False
        was_head = self._in_head
        super().data_received(_without_upgrade(data) if was_head or self.idle_since is not None else data)
        if was_head and self._in_head:  # an incomplete header is in the parser alone
            self._unfinished += len(data)
            if self._unfinished > self.limits.max_header_bytes and not self.transport.is_closing():
                self._give_up(headers_too_large(self.limits))

    def pause_writing(self) -> None:
        """The write buffer is full: from now on the client must read some of it in time."""
        super().pause_writing()
        self._end_stall()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size() and self._stall is None:  # the end of a response is still unread
            self._watch_reader()

    def on_message_begin(self) -> None:
        self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url), headers=0)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4, headers=1)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_head()
        self.idle_since = None
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        if not self.pipeline:
            self.idle_since = time.monotonic()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for a request it cannot parse."""
        self._give_up(self._error or APIError(400, f"this is not HTTP: {msg}", code="bad_http"))

    def _make_room(self) -> None:
        """Where there are too many connections, close the one that has been idle longest.

        Where all are in use the new one stays, to be refused by ConcurrencyLimit, up to twice as many.
        """
        if len(self.connections) <= self.limits.max_concurrent:
            return
        before = time.monotonic() - IDLE_SECONDS
        others = (each for each in self.connections if isinstance(each, BoundedHttpProtocol))
        idle = [(each.idle_since, id(each), each) for each in others if each.idle_since and each.idle_since < before]
        if idle:
            min(idle)[-1].transport.abort()
        elif len(self.connections) > 2 * self.limits.max_concurrent:
            self.transport.abort()

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._unfinished, self._bytes, self._headers = True, 0, 0, 0
        self._timer = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.limits.stall_seconds, self._check_reader, left)

    def _check_reader(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_reader()
        else:
            log_event("refused", code="reader_stalled")
            self.transport.abort()  # close would wait for the client to read

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _count(self, size: int, *, headers: int) -> None:
        """Headers and trailers count together: both are buffered until the request ends."""
        self._bytes += size
        self._headers += headers
        # one beyond the limit passes, for the app to refuse with the request's id
        if self._headers > self.limits.max_headers + 1 or self._bytes > 2 * self.limits.max_header_bytes:
            self._error = headers_too_large(self.limits)
            raise HeadTooLargeError

    def _too_slow(self) -> None:
        self._timer = None
        if self._silent:  # browsers connect in advance; nothing was requested
            self.transport.close()
        elif not self.transport.is_closing():
            seconds = self.limits.header_seconds
            self._give_up(APIError(408, f"the headers did not arrive within {seconds:g} seconds", code="head_timeout"))

    def _give_up(self, error: APIError) -> None:
        """Send the error unless a response has begun, and close. Logged here: the app never sees the request."""
        log_event("refused", status=error.status_code, code=error.code)
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = error_body(error)
            head = (
                b"content-type: application/json\r\nx-content-type-options: nosniff\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            )
            self.transport.write(STATUS_LINE[error.status_code] + head + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """The data with the name of an Upgrade header, if its head has one, replaced by a meaningless name."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"x-grade", head) + end + rest
