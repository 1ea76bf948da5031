"""uvicorn's HTTP protocol with limits on connections, pipelining, incomplete headers, and clients that do not read.

uvicorn buffers headers and pipelined requests without a limit before the app sees them, appends trailers to the
headers, and closes a connection only when the client has read everything. It also takes the body of a request with an
Upgrade header for another protocol; here that header is ignored, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import ClassVar

import httptools
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from outrider.server.http.asgi import error_body
from outrider.server.http.errors import APIError
from outrider.server.http.limits import HttpLimits, headers_too_large
from outrider.server.ops.logs import log_event


def bounded_protocol(limits: HttpLimits) -> type[HttpToolsProtocol]:
    """A protocol class with these limits, for the `uvicorn.Config(http=...)` of one server."""
    return type("BoundedHttp", (BoundedHttpProtocol,), {"limits": limits, "idle": OrderedDict(), "evicted": set()})


IDLE_SECONDS = 1.0  # a connection idle for less is never closed to make room
PIECE_BYTES = 4096  # parsed at a time; bounds the requests that are queued on one connection
INVALID_HTTP = "Invalid HTTP request received."


class HeadTooLargeError(Exception):
    """Raised inside the parser, which then gives up the connection."""


class PipelineFlow(FlowControl):
    """Reads nothing more while enough waits to be parsed."""

    full = False

    def resume_reading(self) -> None:
        if not self.full:
            super().resume_reading()


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 431 to headers or trailers without end and 408 to slow headers; disconnects clients that do not read."""

    limits: ClassVar[HttpLimits] = HttpLimits()
    idle: ClassVar[OrderedDict[BoundedHttpProtocol, None]] = OrderedDict()
    """The server's connections that are serving no request, the longest idle one first."""
    evicted: ClassVar[set[BoundedHttpProtocol]] = set()
    """Connections that were closed to make room and whose sockets are still open."""
    idle_since: float | None = None
    """When the connection was made or its last response ended; None: a request is being served."""
    _timer: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _error: APIError | None = None  # why the parser was stopped
    _last: APIError | None = None  # sent after the responses to earlier requests; then the connection closes
    _served: RequestResponseCycle | None = None
    _unparsed: bytes = b""
    _silent = True
    _muted = False  # a new parser is reading headers that have been handled already

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Register the connection, or close it where twice max_concurrent are open. Constant work either way."""
        self._make_room()
        if len(self.connections) >= 2 * self.limits.max_concurrent:
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self.flow = self._flow = PipelineFlow(transport)
        self._set_idle()
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_stall()
        self.idle.pop(self, None)
        self.evicted.discard(self)
        self._unparsed = b""
        if self._served is not None:  # uvicorn tells only the newest request, which may be queued
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._last is not None:
            return
        self._silent = False
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()

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
        self._watch_closing()

    def on_message_begin(self) -> None:
        if not self._muted:
            self._unset_keepalive_if_required()
            self._begin_head()
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._muted:
            self._count(len(url), headers=0)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailers count as headers do, and are then ignored: the request is being served by the time they come."""
        if not self._muted:
            self._count(len(name) + len(value) + 4, headers=1)
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._muted:
            self._end_head()
            self._unset_keepalive_if_required()
            self.idle_since = None
            self.idle.pop(self, None)
            super().on_headers_complete()
            if not self.pipeline:
                self._served = self.cycle

    def on_message_complete(self) -> None:
        if not (self.parser.should_upgrade() and self._framing()):  # else the body is still to be parsed
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, parse what has arrived meanwhile, or wait for more."""
        self._served = self.pipeline[-1][0] if self.pipeline else None
        if self._served is None and self in self.connections:
            self._set_idle()
        super().on_response_complete()
        if self.transport.is_closing():
            return self._watch_closing()
        if self.idle_since is not None and self._last is not None:
            return self._close_with(self._last)
        if self.idle_since is not None and self._in_head:
            self._start_timer()
        if not self.pipeline:
            self._parse()
        return self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """Called for a request that cannot be parsed."""
        self._give_up(self._error or APIError(400, f"this is not HTTP: {msg}", code="bad_http"))

    def _make_room(self) -> None:
        """Before a connection is added to max_concurrent others, close the one that has been idle longest.

        Where all are in use the new one stays, up to twice max_concurrent: ConcurrencyLimit refuses its requests.
        """
        if len(self.connections) - len(self.evicted) < self.limits.max_concurrent:
            return
        longest = next(iter(self.idle), None)
        if longest is None or (longest.idle_since or 0.0) > time.monotonic() - IDLE_SECONDS:
            return
        del self.idle[longest]
        self.evicted.add(longest)
        longest.transport.abort()

    def _set_idle(self) -> None:
        self.idle_since = time.monotonic()
        self.idle[self] = None

    def _parse(self) -> None:
        """Parse what has arrived. What comes after a queued request waits until that one is served."""
        data, start = memoryview(self._unparsed), 0
        while start < len(data) and not (self.pipeline or self._last or self.transport.is_closing()):
            start += self._parse_piece(data[start : start + PIECE_BYTES])
        self._unparsed = bytes(data[start:])
        self._flow.full = len(self._unparsed) > PIECE_BYTES
        if self.pipeline:  # uvicorn has paused reading, which would hide a disconnect
            self.flow.resume_reading()

    def _parse_piece(self, piece: memoryview) -> int:
        """Returns the number of bytes parsed."""
        self._began = False
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade()
            return upgrade.args[0]
        except httptools.HttpParserError:
            self.logger.warning(INVALID_HTTP)
            self.send_400_response(INVALID_HTTP)
            return len(piece)
        if self._in_head and not self._began:  # the parser holds an incomplete header, not counted yet
            self._unfinished += len(piece)
            if self._unfinished > 2 * self.limits.max_header_bytes:
                self._give_up(headers_too_large(self.limits))
        return len(piece)

    def _ignore_upgrade(self) -> None:
        """Give the body of a request with an Upgrade header to a new parser: the old one has skipped it."""
        framing = self._framing()
        if framing:
            self.parser = httptools.HttpRequestParser(self)
            self._muted = True
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
            self._muted = False

    def _framing(self) -> bytes:
        """The header lines that say where the body ends."""
        names = (b"content-length", b"transfer-encoding")
        return b"".join(b"%s: %s\r\n" % each for each in self.headers if each[0] in names)

    def _begin_head(self) -> None:
        self._in_head, self._began, self._unfinished, self._bytes, self._headers = True, True, 0, 0, 0
        self._start_timer()

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(self.limits.header_seconds, self._too_slow)

    def _watch_reader(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.limits.stall_seconds, self._check_reader, left)

    def _watch_closing(self) -> None:
        """A connection that is closing stays open while the end of a response is unread."""
        if self.transport.get_write_buffer_size() and self._stall is None:
            self._watch_reader()

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
        """Headers and trailers count together."""
        self._bytes += size
        self._headers += headers
        # slightly more than the limit passes: HeaderLimit refuses it, with the request's id
        if self._headers > self.limits.max_headers + 1 or self._bytes > 2 * self.limits.max_header_bytes:
            self._error = headers_too_large(self.limits)
            raise HeadTooLargeError

    def _too_slow(self) -> None:
        self._timer = None
        if self._silent:  # browsers connect in advance; nothing was requested
            self.transport.close()
        elif self.idle_since is not None and not self.transport.is_closing():  # else a request is being served
            seconds = self.limits.header_seconds
            self._give_up(APIError(408, f"the headers did not arrive within {seconds:g} seconds", code="head_timeout"))

    def _give_up(self, error: APIError) -> None:
        """Send the error and close, after the responses to earlier requests. Logged here: the app never sees this."""
        log_event("refused", status=error.status_code, code=error.code)
        if self.idle_since is not None:
            self._close_with(error)
        elif self._in_head:
            self._last = error
        elif self.pipeline:  # the request whose body is at fault is queued, and is not served
            self.pipeline.popleft()
            self._last = error
        else:
            self._close_with(None if self.cycle.response_started else error)

    def _close_with(self, error: APIError | None) -> None:
        if error is not None:
            body = error_body(error)
            head = (
                b"content-type: application/json\r\nx-content-type-options: nosniff\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            )
            self.transport.write(STATUS_LINE[error.status_code] + head + body)
        self.transport.close()
        self._watch_closing()
