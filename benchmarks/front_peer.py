"""A server that answers as vLLM does, without a model and as fast as Python can: the peer of `front.py --alone`.

    python benchmarks/front_peer.py PORT

A prompt is `SECONDS anything`: so long after each other come its chunks, the first at once. Every chunk is a write.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httptools

CARD = {"id": "demo", "object": "model", "created": 1, "owned_by": "vllm", "max_model_len": 4096}
ANSWERS = {
    b"/health": b"{}",
    b"/version": b'{"version": "0.32.0"}',
    b"/v1/models": json.dumps({"object": "list", "data": [CARD]}).encode(),
}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """An event as vLLM writes it, framed as a chunk of HTTP."""
    head: dict[str, Any] = {"id": "cmpl-9f1c2b3a4d5e6f70", "object": "text_completion", "created": 1784000000}
    data = b"data: %s\n\n" % json.dumps(head | {"model": "demo", "choices": choices} | more).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(finish: str | None) -> bytes:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return event([choice | {"token_ids": None}])


USAGE = {"prompt_tokens": 5, "total_tokens": 15, "completion_tokens": 10}
TOKEN, LAST = token(None), token("length")
END = event([], usage=USAGE) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Peer(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.parser = httptools.HttpRequestParser(self)
        self.path, self.body, self.closed = b"", b"", False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.path, self.body = url, b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        if self.path in ANSWERS:
            answer = ANSWERS[self.path]
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
            self.transport.write(head + answer)
            return
        asked = json.loads(self.body)
        self.transport.write(STREAM_HEAD)
        self.send(float(asked["prompt"].split()[0]), asked["max_tokens"])

    def send(self, gap: float, left: int) -> None:
        """The next token, and the rest after it."""
        if self.closed:
            return
        self.transport.write(TOKEN if left > 1 else LAST)
        if left == 1:
            self.transport.write(END)
        else:
            asyncio.get_running_loop().call_later(gap, self.send, gap, left - 1)


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Peer, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
