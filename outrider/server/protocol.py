"""The connection itself, bounded: uvicorn's HTTP protocol with limits on how many there are, on headers that have yet
to end, and on readers.

uvicorn keeps every header until the last has come, however many and however slow; the app
and its middlewares are only asked then. And it closes a connection only when its reader
has taken all that was written, which one that never reads never does. It drops the body of a
request that would rather speak another protocol; here such a wish is passed over, as HTTP allows.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from outrider.server.asgi import body_of
from outrider.server.limits import HttpLimits, too_large_headers
from outrider.server.logs import log
from outrider.server.problems import Problem


def bounded_protocol(limits: HttpLimits) -> type[HttpToolsProtocol]:
    """What `uvicorn.Config(http=...)` takes, with these limits."""
    return type("BoundedHttp", (BoundedHttp,), {"limits": limits})


IDLE_SECONDS = 1.0  # a connection is never closed for another before
UPGRADE = re.compile(rb"(?i)(?<=\r\n)upgrade(?=:)")


class HeadTooLargeError(Exception):
    """Raised inside the parser, which gives up the connection."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to headers, or trailers, without end, and 408 to headers that do not come; cuts off idle readers."""

    limits: ClassVar[HttpLimits] = HttpLimits()
    idle_since: float | None = None
    """When the connection was made or its last answer ended; None: a request is being answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._why: Problem | None = None
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
        if was_head and self._in_head:  # a header that has yet to end is in the parser's hands alone
            self._unfinished += len(data)
            if self._unfinished > self.limits.max_header_bytes and not self.transport.is_closing():
                self._give_up(too_large_headers(self.limits))

    def pause_writing(self) -> None:
        """More waits to be read than should; from here on the reader has to take some of it in time."""
        super().pause_writing()
        self._end_stall()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        if self.transport.get_write_buffer_size() and self._stall is None:  # the last of an answer is yet to be read
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
        """Every request that cannot be read ends here; answered in OpenAI's shape like all others."""
        self._give_up(self._why or Problem(400, f"this is not HTTP: {msg}", code="bad_http"))

    def _make_room(self) -> None:
        """Close the connection that has been idle longest where there are more than may be open.

        Where all of them are in use the new one may stay, to be told so, up to twice as many.
        """
        if len(self.connections) <= self.limits.max_open:
            return
        before = time.monotonic() - IDLE_SECONDS
        others = (each for each in self.connections if isinstance(each, BoundedHttp))
        idle = [(each.idle_since, id(each), each) for each in others if each.idle_since and each.idle_since < before]
        if idle:
            min(idle)[-1].transport.abort()
        elif len(self.connections) > 2 * self.limits.max_open:
            self.transport.abort()

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._unfinished, self._bytes, self._headers = True, 0, 0, 0
        self._timer = self.loop.call_later(self.limits.head_seconds, self._too_slow)

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
            log("refused", code="reader_stalled")
            self.transport.abort()  # close would wait for the reader

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _count(self, size: int, *, headers: int) -> None:
        """Headers and trailers count together: both are kept until the request ends."""
        self._bytes += size
        self._headers += headers
        # One beyond the limit passes, for the app to refuse with the request's own id.
        if self._headers > self.limits.max_headers + 1 or self._bytes > 2 * self.limits.max_header_bytes:
            self._why = too_large_headers(self.limits)
            raise HeadTooLargeError

    def _too_slow(self) -> None:
        self._timer = None
        if self._silent:  # browsers connect ahead of need; nothing was asked, so nothing is answered
            self.transport.close()
        elif not self.transport.is_closing():
            seconds = self.limits.head_seconds
            self._give_up(Problem(408, f"the headers did not arrive within {seconds:g} seconds", code="head_timeout"))

    def _give_up(self, why: Problem) -> None:
        """Answer where no answer has begun, and close. No app is ever asked, so it is logged here."""
        log("refused", status=why.status_code, code=why.code)
        answering: Any = self.cycle
        if answering is None or answering.response_complete or not answering.response_started:
            body = body_of(why)
            head = (
                b"content-type: application/json\r\nx-content-type-options: nosniff\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            )
            self.transport.write(STATUS_LINE[why.status_code] + head + body)
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """A head, and what follows it, with the header that asks for another protocol made one without meaning."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"x-grade", head) + end + rest
