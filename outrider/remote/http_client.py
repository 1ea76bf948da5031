"""An HTTP/1.1 client for the replicas with keep-alive: asyncio's transports and httptools' parser, without tasks.

The task that sent a request reads the response; `read` returns all that has arrived. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

import httptools

CONNECT_SECONDS, TLS_CONNECT_SECONDS = 2.0, 10.0
KEPT_SECONDS = 2.0  # an idle connection is closed before uvicorn's 5 seconds, so that none is used as it ends
MAX_UNREAD = 1 << 20  # bytes of a response received and not read; more pauses the connection
_FRAMING = (b"content-length", b"transfer-encoding")


class BrokenConnectionError(ConnectionError):
    """The connection ended within a response, or the response was not HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server, and the idle connections to it."""

    host: str
    port: int
    tls: bool
    name: bytes
    """For the Host header."""
    path: bytes
    """The prefix of every request's path."""
    idle: deque[Connection] = field(default_factory=deque["Connection"])

    @classmethod
    def of(cls, url: str) -> Address:
        """url: as `check_url` returns it."""
        parts = urlsplit(url)
        tls = parts.scheme == "https"
        port, path = parts.port or (443 if tls else 80), quote(parts.path, safe="/%")
        return cls(parts.hostname or "", port, tls, parts.netloc.encode("idna"), path.encode())

    def keep(self, connection: Connection) -> None:
        """Add a connection to the idle ones, and close those that have been idle for too long."""
        connection.idle_since = time.monotonic()
        self.idle.append(connection)
        while self.idle[0].idle_since < connection.idle_since - KEPT_SECONDS:
            self.idle.popleft().abort()

    def take(self) -> Connection | None:
        """The idle connection that was used last; None where none can be used."""
        while self.idle:
            connection = self.idle.pop()
            if not connection.closed and connection.idle_since > time.monotonic() - KEPT_SECONDS:
                return connection
            connection.abort()
        return None


class Connection(asyncio.Protocol):
    """A connection for one request at a time, whose response is read as it arrives."""

    transport: asyncio.Transport

    def __init__(self, address: Address) -> None:
        self.address = address
        self.closed = False
        self.idle_since = 0.0
        self.status = 0
        """The status of the response; 0 until its headers have arrived."""
        self.complete = True
        """Whether the response has been received whole."""
        self._error: BrokenConnectionError | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._unread = 0
        self._paused = self._framed = self._kept = self._leaving = False
        self._waiter: asyncio.Future[None] | None = None

    def send(self, request: bytes) -> None:
        """Send a request, head and body. The previous response must have been received."""
        self.status, self.complete, self._framed, self._kept = 0, False, False, False
        self.transport.write(request)

    async def head(self) -> int:
        """The status, once it is known. OSError where the connection breaks before."""
        while not self.status:
            await self._arrival()
        return self.status

    async def read(self) -> bytes:
        """What has arrived of the body; b"" at its end. OSError where the connection breaks before."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._arrival()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._unread = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    async def read_all(self) -> bytes:
        pieces: list[bytes] = []
        while data := await self.read():
            pieces.append(data)
        return b"".join(pieces)

    def release(self, *, ended: bool) -> None:
        """Keep the connection, or close it. ended: only the end of the response is missing, which is waited for."""
        self._pieces.clear()
        if self.closed or (self.complete and not self._kept) or not (self.complete or ended):
            self.abort()
        elif self.complete:
            self.address.keep(self)
        else:
            self._leaving = True
            asyncio.get_running_loop().call_later(KEPT_SECONDS, self._abort_leaving)

    def abort(self) -> None:
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # pyright: ignore[reportAttributeAccessIssue] - of a TCP or TLS connection

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.status and not self._framed:  # a response without a length ends with the connection
            self.complete = True
        if self in self.address.idle:
            self.address.idle.remove(self)
        self._break(f"the connection ended ({type(exc).__name__})" if exc else "the connection ended")

    def data_received(self, data: bytes) -> None:
        if self.complete:
            return self.abort()  # no request is open
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(f"no HTTP: {error}")
            return self.abort()
        if self._leaving and self.complete:
            self._leaving = False
            self.release(ended=True)
        return self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in _FRAMING

    def on_headers_complete(self) -> None:
        self.status, self._kept = self._parser.get_status_code(), self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        if self._leaving:
            return
        self._pieces.append(body)
        self._unread += len(body)
        if self._unread > MAX_UNREAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        self.complete = True

    async def _arrival(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _break(self, why: str) -> None:
        self._error = self._error or BrokenConnectionError(why)
        self._wake()

    def _abort_leaving(self) -> None:
        if self._leaving:
            self.abort()


class HttpClient:
    """The connections to all replicas."""

    def __init__(self, key: str = "") -> None:
        """key: sent to each replica as a Bearer token."""
        self._authorization = f"Authorization: Bearer {key}\r\n".encode() if key else b""
        self._addresses: dict[str, Address] = {}

    async def post(self, url: str, path: str, body: bytes, headers: Iterable[tuple[str, str]] = ()) -> Connection:
        """Send JSON; returns the connection once the status is known. OSError where it fails.

        url: a server, as `check_url` returns it. headers: without line breaks; they are sent as they are.
        """
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers).encode()
        framing = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        return await self._ask(b"POST", url, path, lines + framing, body)

    async def get(self, url: str, path: str) -> Connection:
        """Like `post`, without a body."""
        return await self._ask(b"GET", url, path, b"", b"")

    def close(self) -> None:
        for address in self._addresses.values():
            for connection in list(address.idle):
                connection.abort()

    async def _ask(self, method: bytes, url: str, path: str, lines: bytes, body: bytes) -> Connection:
        address = self._addresses.get(url)
        if address is None:
            address = self._addresses[url] = Address.of(url)
        connection = address.take() or await _connect(address)
        first = b"%s %s%s HTTP/1.1\r\nHost: %s\r\n" % (method, address.path, path.encode(), address.name)
        try:
            connection.send(first + self._authorization + lines + b"\r\n" + body)
            await connection.head()
        except BaseException:
            connection.abort()
            raise
        return connection


async def _connect(address: Address) -> Connection:
    seconds = TLS_CONNECT_SECONDS if address.tls else CONNECT_SECONDS
    async with asyncio.timeout(seconds):
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(address), address.host, address.port, ssl=address.tls or None
        )
    return connection
