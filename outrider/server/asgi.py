"""What the middlewares share: reading a scope's headers, and refusing a request in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import time

from starlette.types import Receive, Scope, Send

from outrider.server.problems import Problem

LINGER_SECONDS = 1.0
LINGER_BYTES = 8 << 20


def body_of(why: Problem) -> bytes:
    return json.dumps(why.body()).encode()


def headers_named(scope: Scope, name: bytes) -> list[bytes]:
    """Every value of a header, in order."""
    return [value for key, value in scope["headers"] if key == name]


def has_body(scope: Scope) -> bool:
    """Whether the client says that a body follows."""
    lengths = headers_named(scope, b"content-length")
    return bool(headers_named(scope, b"transfer-encoding")) or any(length.strip() != b"0" for length in lengths)


async def refuse(scope: Scope, receive: Receive, send: Send, why: Problem, *, unread: bool | None = None) -> None:
    """Answer with a problem, and close the connection where a body is left unread (None: where one was announced).

    The answer is whole at once. What the client is still sending is then thrown away for
    a moment before the connection closes: closing on unread data resets it, and many
    clients would see the reset in place of the answer.
    """
    unread = has_body(scope) if unread is None else unread
    body = body_of(why)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(why.headers or {})}
    if unread:
        headers["Connection"] = "close"
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": why.status_code, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": unread})
    if unread:
        await _linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    """Throw away what the client still sends: a second of it at most, and no more than a body may hold."""
    until, seen = time.monotonic() + LINGER_SECONDS, 0
    try:
        async with asyncio.timeout(LINGER_SECONDS):
            while seen < LINGER_BYTES and time.monotonic() < until:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                seen += len(message["body"])
    except TimeoutError:
        return
