"""What a request may look like: its Host, its headers, and how much body, how deep and how soon."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.errors import ConfigError
from outrider.server.asgi import has_body, headers_named, refuse
from outrider.server.problems import Problem

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
WINDOW = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """How large, how deep and how slow a request may be."""

    max_body: int = 8 << 20
    """Bytes of body."""
    max_depth: int = 64
    """JSON arrays and objects inside one another."""
    max_headers: int = 100
    max_header_bytes: int = 32 << 10
    """The request line and all headers together."""
    head_seconds: float = 10.0
    """Time for the request line and the headers to arrive."""
    body_seconds: float = 30.0
    """Time for the whole body to arrive."""
    stall_seconds: float = 60.0
    """A client that takes nothing of a waiting answer for so long is cut off."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)}")


def check_origins(origins: Iterable[str]) -> list[str]:
    """The origins pages may ask from; ConfigError for anything but exact ones."""
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{origin!r} is no exact origin: write scheme, host and port as the browser does, "
                "for example https://chat.example.org or http://localhost:3000; patterns are not taken"
            )
    return list(origins)


class HostCheck:
    """Answers only to the server's own names, so that no web page can reach it under a name of its own."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self.app = app
        self.hosts = LOOPBACK | {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._refusal(scope)) is not None:
            return await refuse(scope, receive, send, why)
        return await self.app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Problem | None:
        given = headers_named(scope, b"host")
        match = HOST.fullmatch(given[0]) if len(given) == 1 else None
        if match is None:
            return Problem(400, "the Host header is missing, doubled or malformed", code="bad_host")
        host = match[1].decode().lower().strip("[]")
        # The address the client reached us at is ours too: where the server listens on all
        # addresses no list could name it, and a page's own name never looks like it.
        reached = (scope.get("server") or ("",))[0]
        if host in self.hosts or host == reached:
            return None
        return Problem(403, f"this server does not answer to {host!r}; start it with --allow-host {host}", code="host")


class HeaderLimit:
    """Refuses too many or too large headers."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
            size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            if len(scope["headers"]) > self.limits.max_headers or size > self.limits.max_header_bytes:
                return await refuse(scope, receive, send, too_large_headers(self.limits))
        return await self.app(scope, receive, send)


def too_large_headers(limits: HttpLimits) -> Problem:
    message = f"at most {limits.max_headers} headers and {limits.max_header_bytes} bytes of them"
    return Problem(431, message, code="headers_too_large")


class BodyLimit:
    """Reads the body before anything parses it, within its limits; the app is handed it whole.

    Where a limit is passed the rest is not read: the answer goes out and the connection
    closes.
    """

    def __init__(self, app: ASGIApp, limits: HttpLimits, note: Callable[[bytes], None] | None = None) -> None:
        """note: told each body that is let in."""
        self.app, self.limits, self.note = app, limits, note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if (why := self._refusal(scope)) is not None:
            return await refuse(scope, receive, send, why)
        if not has_body(scope):
            return await self.app(scope, receive, send)
        body = await self._read(receive)
        if body is None:  # the client left
            return None
        if isinstance(body, Problem):
            return await refuse(scope, receive, send, body)
        if depth_exceeds(body, self.limits.max_depth):
            why = Problem(400, f"the JSON is nested more than {self.limits.max_depth} deep", code="json_too_deep")
            return await refuse(scope, receive, send, why, unread=False)
        if self.note is not None:
            self.note(body)
        return await self.app(scope, _replay(body, receive), send)

    def _refusal(self, scope: Scope) -> Problem | None:
        """What is wrong before any of the body is read."""
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kinds = [kind.split(b";")[0].strip().lower() for kind in headers_named(scope, b"content-type")]
            if kinds != [b"application/json"] or headers_named(scope, b"content-encoding"):
                return Problem(415, "send the body as 'Content-Type: application/json', uncompressed", code="not_json")
        for length in headers_named(scope, b"content-length"):
            if not length.isdigit() or len(length) > 19:
                return Problem(400, "Content-Length is not a number", code="bad_content_length")
            if int(length) > self.limits.max_body:
                return self._too_large()
        return None

    def _too_large(self) -> Problem:
        return Problem(413, f"the body is larger than {self.limits.max_body} bytes", code="body_too_large")

    async def _read(self, receive: Receive) -> bytes | Problem | None:
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
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = self.limits.body_seconds
            return Problem(408, f"the body did not arrive within {seconds:g} seconds", code="body_timeout")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Hand out the body once, then what the connection says: that the client has left."""
    told = False

    async def replayed() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


OTHERS = bytes(c for c in range(256) if c not in b'"[]{}')
STEPS = bytes(1 if c in b"[{" else 255 if c in b"]}" else 0 for c in range(256))


def depth_exceeds(body: bytes, limit: int) -> bool:
    """Whether JSON text opens more than `limit` brackets inside one another, those in strings left out.

    Nothing is parsed, and text that is not JSON may be judged either way. At most a few
    passes over the bytes, in windows, so that neither time nor memory depends on what
    they hold.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    escaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left opens or closes a string
    marks = escaped.translate(None, OTHERS)
    depth, inside = 0, 0
    for start in range(0, len(marks), WINDOW):
        window = marks[start : start + WINDOW]
        quotes = np.frombuffer(window, np.uint8) == ord('"')
        in_string = np.bitwise_xor.accumulate(quotes) ^ bool(inside)
        steps = np.frombuffer(window.translate(STEPS), np.int8) * ~in_string
        depths = depth + np.cumsum(steps, dtype=np.int32)
        if depths.max() > limit:
            return True
        depth, inside = int(depths[-1]), int(in_string[-1])
    return False
