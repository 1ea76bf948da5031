"""Server-sent events: chunks of a stream to bytes, and the response that sends them."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.server.http.disconnect import ClientDisconnected, cancel_on_disconnect

DONE_EVENT = b"data: [DONE]\n\n"
PADDED_BYTES = 512  # the size of an obfuscated chunk is a multiple of this
_FIELD = ', "obfuscation": ""}'


def encode_event(chunk: dict[str, Any], *, obfuscate: bool = False) -> bytes:
    """The bytes of one event. obfuscate: pad it, so that its size tells a text's length in steps of PADDED_BYTES."""
    body = json.dumps(chunk, ensure_ascii=False, allow_nan=False)
    if not obfuscate:
        return f"data: {body}\n\n".encode()
    length = len(body.encode()) + len(_FIELD) - 1
    padding = secrets.token_hex(PADDED_BYTES // 2)[: -length % PADDED_BYTES]
    return f'data: {body[:-1]}, "obfuscation": "{padding}"}}\n\n'.encode()


class EventStreamResponse(Response):
    """Sends events as they come, until the stream ends or the client disconnects; then calls `close`."""

    media_type = "text/event-stream"

    def __init__(self, stream: AsyncGenerator[bytes, None], close: Callable[[], None], headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self.stream, self.close = stream, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await cancel_on_disconnect(receive, self._send(send))
        except (ClientDisconnected, OSError):
            return  # nobody is left to answer
        finally:  # not in the generator: dropped before its first chunk, it never runs
            self.close()

    async def _send(self, send: Send) -> None:
        async with aclosing(self.stream):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self.stream:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
