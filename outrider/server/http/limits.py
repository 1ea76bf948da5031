"""Limits on a request: its Host header, its headers, the size, depth and time of its body, and how many there are."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.errors import ConfigError
from outrider.server.http.asgi import has_body, header_values, send_error
from outrider.server.http.errors import APIError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HOST_HEADER = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
SCAN_BYTES = 1 << 15
SMALL_BODY = 1 << 16  # bytes; a body up to this size is always accepted
MAX_BRACKETS = 1 << 16  # arrays and objects of one body; millions of them take seconds to parse


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """How large, how deep and how slow a request may be."""

    max_body: int = 8 << 20
    """Bytes of body."""
    max_depth: int = 64
    """How deep JSON arrays and objects may be nested."""
    max_headers: int = 100
    max_header_bytes: int = 32 << 10
    """The request line and all headers together."""
    header_seconds: float = 10.0
    """Time for the request line and the headers to arrive."""
    body_seconds: float = 30.0
    """Time for the whole body to arrive."""
    stall_seconds: float = 60.0
    """A client that reads nothing of its response for this long is disconnected."""
    max_concurrent: int = 1024
    """Requests served at once; as many more connections may be idle."""
    max_buffered: int = 256 << 20
    """Bytes of all large bodies together; a body counts from its first byte read to the end of the response."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


def check_origins(origins: Iterable[str]) -> list[str]:
    """The origins that CORS allows. ConfigError for one that is not exact, such as a pattern."""
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{origin!r} is no exact origin: write scheme, host and port as the browser does, "
                "for example https://chat.example.org or http://localhost:3000; patterns are not taken"
            )
    return list(origins)


class HostCheck:
    """Accepts only the server's own names as Host, so that no web page can reach it under another (DNS rebinding)."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self.app = app
        self.hosts = LOOPBACK | {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._refusal(scope)) is not None:
            return await send_error(scope, receive, send, error)
        return await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> APIError | None:
        given = header_values(scope, b"host")
        match = HOST_HEADER.fullmatch(given[0]) if len(given) == 1 else None
        if match is None:
            return APIError(400, "the Host header is missing, doubled or malformed", code="bad_host")
        host = match[1].decode().lower().strip("[]")
        # the address the client connected to is accepted too: a server on all addresses cannot list it, and a page
        # that rebinds DNS sends its own name instead
        reached = (scope.get("server") or ("",))[0]
        if host in self.hosts or host == reached:
            return None
        return APIError(403, f"this server does not answer to {host!r}; start it with --allow-host {host}", code="host")


class ConcurrencyLimit:
    """Bounds the requests served at once. /health is always answered."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self.app, self.limits, self.open = app, limits, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        if self.open >= self.limits.max_concurrent:
            return await send_error(scope, receive, send, _busy(f"{self.open} requests are being answered"))
        self.open += 1
        try:
            return await self.app(scope, receive, send)
        finally:
            self.open -= 1


def _busy(reason: str) -> APIError:
    message = f"{reason}, as many as this server takes at once; try again soon"
    return APIError(503, message, code="too_busy", headers={"Retry-After": "5"})


class HeaderLimit:
    """Refuses too many or too large headers, and paths with control characters: the router ignores a final newline."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
            size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            if len(scope["headers"]) > self.limits.max_headers or size > self.limits.max_header_bytes:
                return await send_error(scope, receive, send, headers_too_large(self.limits))
            if CONTROL_CHARACTER.search(scope["path"]):
                error = APIError(404, "no route has control characters in its path", code="not_found")
                return await send_error(scope, receive, send, error)
        return await self.app(scope, receive, send)


def headers_too_large(limits: HttpLimits) -> APIError:
    message = f"at most {limits.max_headers} headers and {limits.max_header_bytes} bytes of them"
    return APIError(431, message, code="headers_too_large")


class BodyLimit:
    """Reads the body within its limits before anything parses it, and passes it on whole.

    Past a limit the rest stays unread: the error is sent and the connection closes.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits, on_body: Callable[[bytes], None] | None = None) -> None:
        """on_body: called with each body that is accepted."""
        self.app, self.limits, self.on_body = app, limits, on_body
        self.buffered = 0
        """Bytes of large bodies whose requests have not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if (error := self._refusal(scope)) is not None:
            return await send_error(scope, receive, send, error)
        if not has_body(scope):
            return await self.app(scope, receive, send)
        budget = BodyBudget(self)
        try:
            return await self._pass_on(scope, receive, send, budget)
        finally:
            self.buffered -= budget.size

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, budget: BodyBudget) -> None:
        body = await self._read(receive, budget)
        if body is None:  # the client left
            return None
        if isinstance(body, APIError):
            return await send_error(scope, receive, send, body)
        if nesting_exceeds(body, self.limits.max_depth):
            message = f"the JSON is nested more than {self.limits.max_depth} deep, or has over {MAX_BRACKETS} brackets"
            error = APIError(400, message, code="json_too_deep")
            return await send_error(scope, receive, send, error, unread=False)
        if self.on_body is not None:
            self.on_body(body)
        return await self.app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Scope) -> APIError | None:
        """The error, if any, before the body is read."""
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kinds = [kind.split(b";")[0].strip().lower() for kind in header_values(scope, b"content-type")]
            if kinds != [b"application/json"] or header_values(scope, b"content-encoding"):
                return APIError(415, "send the body as 'Content-Type: application/json', uncompressed", code="not_json")
        for length in header_values(scope, b"content-length"):
            if not length.isdigit() or len(length) > 19:
                return APIError(400, "Content-Length is not a number", code="bad_content_length")
            if int(length) > self.limits.max_body:
                return self._too_large()
        return None

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is larger than {self.limits.max_body} bytes", code="body_too_large")

    async def _read(self, receive: Receive, budget: BodyBudget) -> bytes | APIError | None:
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self.limits.max_body:
                        return self._too_large()
                    if not budget.grow(len(body)):
                        return _busy("the bodies of other requests take all the room there is")
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = self.limits.body_seconds
            return APIError(408, f"the body did not arrive within {seconds:g} seconds", code="body_timeout")


class BodyBudget:
    """One body's part of max_buffered. A small body takes nothing, so that large ones never keep it out."""

    def __init__(self, limit: BodyLimit) -> None:
        self.limit, self.size = limit, 0

    def grow(self, size: int) -> bool:
        """Count the body with this size; False, and not counted, where max_buffered would be exceeded."""
        more = size - self.size if size > SMALL_BODY else 0
        if self.limit.buffered + more > self.limit.limits.max_buffered:
            return False
        self.limit.buffered += more
        self.size += more
        return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """A receive function that returns the body once, then the connection's own messages, such as a disconnect."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


NOT_BRACKETS = bytes(c for c in range(256) if c not in b'"[]{}')
BRACKET_STEPS = bytes(1 if c in b"[{" else 255 if c in b"]}" else 0 for c in range(256))


def nesting_exceeds(body: bytes, limit: int) -> bool:
    """Whether JSON text nests brackets deeper than `limit`, or has more than MAX_BRACKETS in all.

    Brackets in strings do not count. Nothing is parsed, and for text that is not JSON the result may be either.
    A few passes over the bytes, so that time and memory depend on their number alone.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    escaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left opens or closes a string
    marks = escaped.translate(None, NOT_BRACKETS)
    depth, inside, opened = 0, 0, 0
    for start in range(0, len(marks), SCAN_BYTES):
        window = marks[start : start + SCAN_BYTES]
        quotes = np.frombuffer(window, np.uint8) == ord('"')
        in_string = np.bitwise_xor.accumulate(quotes) ^ bool(inside)
        steps = np.frombuffer(window.translate(BRACKET_STEPS), np.int8) * ~in_string
        depths = depth + np.cumsum(steps, dtype=np.int32)
        opened += np.count_nonzero(steps == 1)
        if depths.max() > limit or opened > MAX_BRACKETS:
            return True
        depth, inside = int(depths[-1]), int(in_string[-1])
    return False
