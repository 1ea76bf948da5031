"""What the middleware shares: a scope's headers, and error responses in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import time

from starlette.types import Receive, Scope, Send

from outrider.server.http.errors import APIError

LINGER_SECONDS = 1.0
LINGER_BYTES = 8 << 20


def error_body(error: APIError) -> bytes:
    return json.dumps(error.body()).encode()


def header_values(scope: Scope, name: bytes) -> list[bytes]:
    """Every value of a header, in order."""
    return [value for key, value in scope["headers"] if key == name]


def has_body(scope: Scope) -> bool:
    """Whether the headers announce a body."""
    lengths = header_values(scope, b"content-length")
    return bool(header_values(scope, b"transfer-encoding")) or any(length.strip() != b"0" for length in lengths)


async def send_error(
    scope: Scope, receive: Receive, send: Send, error: APIError, *, unread: bool | None = None
) -> None:
    """Send an error response. unread: a part of the body is unread, so close the connection; None: if one is announced.

    What the client still sends is discarded for a moment before the connection closes: closing on unread data
    resets it, and many clients would see the reset instead of the response.
    """
    unread = has_body(scope) if unread is None else unread
    body = error_body(error)
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(error.headers or {})}
    if unread:
        headers["Connection"] = "close"
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status_code, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": unread})
    if unread:
        await _linger(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _linger(receive: Receive) -> None:
    """Discard what the client still sends, up to LINGER_SECONDS and LINGER_BYTES."""
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
