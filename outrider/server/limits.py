"""What a request may look like: its Host, its headers, and how much body, how deep and how soon."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.errors import ConfigError
from outrider.server.asgi import has_body, headers_named, refuse
from outrider.server.problems import Problem

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::[0-9]{1,5})?")
ORIGIN = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")
WINDOW = 1 << 15
SMALL = 1 << 16  # bytes of body that are always taken
MAX_OPENED = 1 << 16  # arrays and objects of one body; millions of them take seconds to read


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
    max_open: int = 1024
    """Requests being answered at once; as many connections more may stand idle."""
    max_held: int = 256 << 20
    """Bytes of all large bodies together, from the first that is read to the end of its answer."""

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


class OpenLimit:
    """Answers so many requests at once and no more. /health is always answered: it takes no time."""

    def __init__(self, app: ASGIApp, limits: HttpLimits) -> None:
        self.app, self.limits, self.open = app, limits, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        if self.open >= self.limits.max_open:
            return await refuse(scope, receive, send, _busy(f"{self.open} requests are being answered"))
        self.open += 1
        try:
            return await self.app(scope, receive, send)
        finally:
            self.open -= 1


def _busy(why: str) -> Problem:
    message = f"{why}, as many as this server takes at once; try again soon"
    return Problem(503, message, code="too_busy", headers={"Retry-After": "5"})


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
        self.held = 0
        """Bytes of large bodies whose requests have not ended."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if (why := self._refusal(scope)) is not None:
            return await refuse(scope, receive, send, why)
        if not has_body(scope):
            return await self.app(scope, receive, send)
        share = Share(self)
        try:
            return await self._pass_on(scope, receive, send, share)
        finally:
            self.held -= share.size

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, share: Share) -> None:
        body = await self._read(receive, share)
        if body is None:  # the client left
            return None
        if isinstance(body, Problem):
            return await refuse(scope, receive, send, body)
        if depth_exceeds(body, self.limits.max_depth):
            message = f"the JSON is nested more than {self.limits.max_depth} deep, or has over {MAX_OPENED} brackets"
            why = Problem(400, message, code="json_too_deep")
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

    async def _read(self, receive: Receive, share: Share) -> bytes | Problem | None:
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
                    if not share.grow(len(body)):
                        return _busy("the bodies of other requests take all the room there is")
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            seconds = self.limits.body_seconds
            return Problem(408, f"the body did not arrive within {seconds:g} seconds", code="body_timeout")


class Share:
    """What one body takes of the room for all. A small one takes none of it, so that large ones never keep it out."""

    def __init__(self, room: BodyLimit) -> None:
        self.room, self.size = room, 0

    def grow(self, size: int) -> bool:
        """Whether the body may be so large."""
        more = size - self.size if size > SMALL else 0
        if self.room.held + more > self.room.limits.max_held:
            return False
        self.room.held += more
        self.size += more
        return True


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
    """Whether JSON text opens more than `limit` brackets inside one another, or more than MAX_OPENED in all.

    Those in strings do not count. Nothing is parsed, and text that is not JSON may be judged either way. At most a few
    passes over the bytes, in windows, so that neither time nor memory depends on what
    they hold.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    escaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left opens or closes a string
    marks = escaped.translate(None, OTHERS)
    depth, inside, opened = 0, 0, 0
    for start in range(0, len(marks), WINDOW):
        window = marks[start : start + WINDOW]
        quotes = np.frombuffer(window, np.uint8) == ord('"')
        in_string = np.bitwise_xor.accumulate(quotes) ^ bool(inside)
        steps = np.frombuffer(window.translate(STEPS), np.int8) * ~in_string
        depths = depth + np.cumsum(steps, dtype=np.int32)
        opened += np.count_nonzero(steps == 1)
        if depths.max() > limit or opened > MAX_OPENED:
            return True
        depth, inside = int(depths[-1]), int(in_string[-1])
    return False
