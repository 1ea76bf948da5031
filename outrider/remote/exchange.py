"""One request on its way: its turn in the queue, a replica, the response or stream, and its figures.

Nothing is sent to the client before the replica has generated something. Until then a replica that fails is replaced
by another, once; after that its failure is the last event of the stream.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from outrider.engine.events import Event
from outrider.remote.bodies import replica_body
from outrider.remote.figures import Figures
from outrider.remote.front import Front
from outrider.remote.prefixes import page_hashes, prompt_text
from outrider.remote.replica import Replica
from outrider.remote.sse_reader import ServerEvent
from outrider.remote.upstream import ReplicaError, ReplicaRefusedError, Upstream, post, refusal
from outrider.server.http.errors import APIError, to_api_error
from outrider.server.http.sse import DONE_EVENT, encode_event
from outrider.server.openai.request_schema import CompletionFields
from outrider.server.openai.responses_request import ResponsesRequest
from outrider.server.queue.jobs import DeadlineExceeded, JobOwner, Unavailable

MAX_TRIES = 2
DONE = "[DONE]"
_LAST_TYPES = ("response.completed", "response.incomplete", "response.failed", "error")
_EMPTY_TYPES = (
    "response.created",
    "response.queued",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request."""

    path: str
    body: CompletionFields
    salt: str
    count: int
    """Sequences it generates."""
    served_name: str
    """What clients call the model."""
    owner: JobOwner
    headers: dict[str, str]
    """Sent to the replica: the request's id."""

    @property
    def named(self) -> bool:
        """Whether the events of its stream have names, and the last says that it is the last."""
        return isinstance(self.body, ResponsesRequest)


@dataclass(slots=True)
class Chunk:
    """An event of a stream and its JSON; None for the one that says that the stream is complete."""

    event: ServerEvent
    value: dict[str, Any] | None


class Exchange:
    """Made when the request is taken; `close` it, whatever happens."""

    def __init__(self, front: Front, ask: Ask) -> None:
        """QueueFull, RequestError or Unavailable where it is not taken."""
        front.check_ready()
        self.front, self.ask, self.figures = front, ask, Figures()
        self.hashes = page_hashes(ask.salt, prompt_text(ask.body.model_dump(exclude_none=True)))
        self.ticket = front.queue.submit(ask.owner.client, ask.count)
        if ask.owner.record is not None:
            ask.owner.record.expect_sequences(ask.count)
        self._replica: Replica | None = None
        self._upstream: Upstream | None = None
        self._chunks: AsyncGenerator[list[Chunk], None] | None = None
        self._held: list[Chunk] = []
        self._sent = 0
        self._closed = False
        self._deadline: asyncio.TimerHandle | None = None

    async def whole(self) -> bytes:
        """The whole response, as JSON."""
        return await self._tried(self._whole)

    async def begin_stream(self) -> None:
        """Wait until the stream has something to show. The errors until then are those of a whole response."""
        await self._tried(self._begin)
        left = self.ask.owner.deadline - time.perf_counter()
        if self._upstream is not None:
            self._deadline = asyncio.get_running_loop().call_later(left, self._upstream.cut, DeadlineExceeded())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events, from the first to the last, or to the error that ends the stream early."""
        try:
            if data := self._encode(self._held):
                yield data
            if self._chunks is not None and not _is_last(self._held[-1]):
                async with aclosing(self._chunks) as arriving:
                    async for chunks in arriving:
                        if data := self._encode(chunks):
                            yield data
            self.close(self.figures.events(self.ask.count))
        except Exception as error:  # the status is sent: whatever it is, the stream must say so
            if isinstance(error, ReplicaError) and self._replica is not None:
                self.front.pool.note_failure(self._replica, error)
            self.fail(error)
            yield self._error_event(to_api_error(_client_error(error)))

    def fail(self, error: BaseException) -> None:
        """It has ended with this error."""
        self.close([Event(-1, finish="error", error=str(error))] * self.ask.count)

    def close(self, events: Seq[Event] = ()) -> None:
        """It has ended with these events; without any, because nobody waits for it. Only the first call counts."""
        if self._closed:
            return
        self._closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._leave()
        self.front.finish(self.ticket, self.ask.owner, events or [Event(-1, finish="cancelled")] * self.ask.count)

    async def _tried(self, send: Callable[[Replica], Awaitable[ResultT]]) -> ResultT:
        """Send it to a replica, and to another where that one fails."""
        await self.ticket.turn
        tried: list[Replica] = []
        error: Exception = self.front.unavailable()
        while len(tried) < MAX_TRIES:
            replica = self.front.pool.choose(self.hashes, tried)
            if replica is None:
                break
            tried.append(replica)
            replica.load += self.ask.count
            replica.requests += 1
            self._replica = replica
            try:
                return await send(replica)
            except ReplicaError as failed:
                error = failed
                self.front.pool.note_failure(replica, failed)
                self._leave()
        raise _client_error(error)

    async def _post(self, replica: Replica) -> Upstream:
        card = replica.card
        if card is None:
            raise ReplicaError("it has not said what it serves")
        body = json.dumps(replica_body(self.ask.body, card, self.ask.salt), ensure_ascii=False).encode()
        return await post(self.front.session, replica, self.ask.path, body, self.ask.headers)

    async def _whole(self, replica: Replica) -> bytes:
        upstream = await self._post(replica)
        try:
            raw, value = await upstream.read_json()
        finally:
            upstream.close()
        self.figures.read(value)
        if not self._renamed(value):
            return raw
        return json.dumps(value, ensure_ascii=False).encode()

    async def _begin(self, replica: Replica) -> None:
        """Read up to the first event that has something to show."""
        self._upstream, self._held = await self._post(replica), []
        self._chunks = self._read(self._upstream)
        async for chunks in self._chunks:
            self._held += chunks
            if any(_is_last(chunk) or _shows(chunk) for chunk in chunks):
                break
        self.figures.first = time.perf_counter()

    async def _read(self, upstream: Upstream) -> AsyncGenerator[list[Chunk], None]:
        """The chunks up to the last. ReplicaError where it does not come, or one is no JSON object."""
        async for events in upstream.events():
            chunks: list[Chunk] = []
            try:
                for event in events:
                    chunks.append(self._parse(event))
                    if _is_last(chunks[-1]):
                        break
            finally:  # those before a malformed one are chunks too
                if chunks:
                    yield chunks
            if _is_last(chunks[-1]):
                return
        raise ReplicaError("its stream ended before it was complete")

    def _parse(self, event: ServerEvent) -> Chunk:
        if event.data == DONE:
            return Chunk(event, None)
        try:
            value = json.loads(event.data)
        except ValueError as error:
            raise ReplicaError("an event of its stream is not JSON") from error
        if not isinstance(value, dict):
            raise ReplicaError("an event of its stream is no JSON object")
        if isinstance(told := value.get("error"), dict) and not self.ask.named:
            raise refusal(told["code"] if isinstance(told.get("code"), int) else 500, event.data.encode())
        self.figures.read(value)
        return Chunk(event, value)

    def _encode(self, chunks: Seq[Chunk]) -> bytes:
        return b"".join(map(self._encode_one, chunks))

    def _encode_one(self, chunk: Chunk) -> bytes:
        """What the client is sent of a chunk: nothing of a usage that it did not ask for."""
        value, options = chunk.value, self.ask.body.stream_options
        if value is None:
            return b"" if self.ask.named else DONE_EVENT
        if not self.ask.named and not value.get("choices") and not (options and options.include_usage):
            return b""
        self._sent = value.get("sequence_number", self._sent) if self.ask.named else 0
        name = f"event: {chunk.event.name}\n".encode() if chunk.event.name else b""
        obfuscate = bool(options and options.include_obfuscation)
        if self._renamed(value) or obfuscate:
            return name + encode_event(value, obfuscate=obfuscate)
        return name + f"data: {chunk.event.data}\n\n".encode()

    def _error_event(self, error: APIError) -> bytes:
        if not self.ask.named:
            return encode_event(error.body())
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\n" + encode_event(told | {"sequence_number": self._sent + 1})

    def _renamed(self, value: dict[str, Any]) -> bool:
        """Write our name of the model where the replica has another; whether it had."""
        response = value.get("response")
        inner = response if isinstance(response, dict) else value
        if inner.get("model") in (None, self.ask.served_name):
            return False
        inner["model"] = self.ask.served_name
        return True

    def _leave(self) -> None:
        """The replica it was given to has nothing more to do for it."""
        if self._upstream is not None:
            self._upstream.close()
        if self._replica is not None:
            self._replica.load -= self.ask.count
        self._upstream = self._replica = None


def _is_last(chunk: Chunk) -> bool:
    return chunk.value is None or chunk.value.get("type") in _LAST_TYPES


def _shows(chunk: Chunk) -> bool:
    """Whether a chunk has more than the frame of a response: part of a text, a call, or its end."""
    value = chunk.value or {}
    if "type" in value:
        return value["type"] not in _EMPTY_TYPES
    choices: list[dict[str, Any]] = value.get("choices") or [{"finish_reason": "none"}]
    for choice in choices:
        delta = choice.get("delta") or {}
        if choice.get("text") or choice.get("finish_reason") or any(delta[name] for name in delta if name != "role"):
            return True
    return False


def _client_error(error: Exception) -> Exception:
    """What the client is told of a failure: the replica's own words where it had any for it."""
    if isinstance(error, ReplicaRefusedError):
        return error.error
    if isinstance(error, ReplicaError):
        return Unavailable(f"the engine failed on this request: {error}; send it again", "engine_failed", 1)
    return error
