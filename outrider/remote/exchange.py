"""One request to a replica: its turn in the queue, the choice of a replica, the response or stream, and its figures.

Nothing is sent to the client before the replica has generated something. Until then a replica that fails is replaced
by another, once; after that its failure is the last event of the stream.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeVar

from pydantic_core import to_json

from outrider.engine.events import Event
from outrider.remote.bodies import body_fields, replica_body
from outrider.remote.figures import Figures
from outrider.remote.front import Front
from outrider.remote.guard import Guard
from outrider.remote.prefixes import page_hashes, prompt_text
from outrider.remote.relay import Relay, renamed
from outrider.remote.replica import Replica
from outrider.remote.upstream import ReplicaError, ReplicaRefusedError, Upstream, post
from outrider.server.http.errors import to_api_error
from outrider.server.openai.request_schema import CompletionFields
from outrider.server.queue.jobs import DeadlineExceeded, JobOwner, Unavailable

MAX_TRIES = 2
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request."""

    path: str
    body: CompletionFields
    salt: str
    count: int
    """The number of sequences it generates."""
    served_name: str
    """What clients call the model."""
    owner: JobOwner
    headers: dict[str, str]
    """The headers for the replica: the request's id."""


class Exchange:
    """Made when the request is accepted; the caller must end it with `close` or `fail`, whatever happens."""

    def __init__(self, front: Front, ask: Ask, guard: Guard) -> None:
        """guard: the caller enters it to await anything here. QueueFull, RequestError or Unavailable: not accepted."""
        front.check_ready()
        self.front, self.ask, self.guard, self.figures = front, ask, guard, Figures()
        self.fields = body_fields(ask.body)
        self.hashes = page_hashes(ask.salt, prompt_text(self.fields))
        self.ticket = front.queue.submit(ask.owner.client, ask.count)
        if ask.owner.record is not None:
            ask.owner.record.expect_sequences(ask.count)
        self._replica: Replica | None = None
        self._upstream: Upstream | None = None
        self._relay = Relay(ask.body, ask.served_name, self.figures)
        self._held: list[bytes] = []
        self._begun = self._closed = False
        left = ask.owner.deadline - time.perf_counter()
        self._deadline = asyncio.get_running_loop().call_later(left, self._time_up)

    async def whole(self) -> bytes:
        """The whole response, as JSON."""
        return await self._tried(self._whole)

    async def begin_stream(self) -> None:
        """Wait until the stream has something to show. Errors until then are raised, as for a whole response."""
        await self._tried(self._begin)
        self._begun = True

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events, from the first to the last, or to the error that ends the stream early."""
        relay = self._relay
        try:
            yield b"".join(self._held)
            while not relay.ended:
                if relay.error is not None:
                    raise relay.error
                if data := await self._next():
                    yield data
            self.close(self.figures.events(self.ask.count))
        except Exception as error:  # the status has been sent: the stream must tell any error
            if isinstance(error, ReplicaError) and self._replica is not None:
                self.front.pool.note_failure(self._replica, error)
            self.fail(error)
            yield relay.error_event(to_api_error(_client_error(error)))

    def fail(self, error: BaseException) -> None:
        """End the request with this error."""
        self.close([Event(-1, finish="error", error=str(error))] * self.ask.count)

    def close(self, events: Seq[Event] = ()) -> None:
        """End the request with these last events of its sequences; none: cancelled. Only the first call counts."""
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        self.guard.close()
        self._leave()
        self.front.finish(self.ticket, self.ask.owner, events or [Event(-1, finish="cancelled")] * self.ask.count)

    async def _tried(self, send: Callable[[Replica], Awaitable[ResultT]]) -> ResultT:
        """Wait for the request's turn and send it to a replica; where that one fails, to another one."""
        if not self.ticket.turn.done():
            await self.ticket.turn
        tried: list[Replica] = []
        error: Exception | None = None
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
        raise _client_error(error or self.front.unavailable())

    async def _post(self, replica: Replica) -> Upstream:
        card, ask = replica.card, self.ask
        if card is None:
            raise ReplicaError("it has not said what it serves")
        body = to_json(replica_body(self.fields, ask.body, card, ask.salt))
        self._upstream = await post(self.front.client, replica, ask.path, body, ask.headers)
        return self._upstream

    async def _whole(self, replica: Replica) -> bytes:
        raw, value = await (await self._post(replica)).read_json()
        self.figures.read(value)
        if not renamed(value, self.ask.served_name):
            return raw
        return json.dumps(value, ensure_ascii=False).encode()

    async def _begin(self, replica: Replica) -> None:
        """Read up to the first event that has something to show."""
        await self._post(replica)
        self._relay, self._held = Relay(self.ask.body, self.ask.served_name, self.figures), []
        while not self._relay.shows:
            if self._relay.error is not None:
                raise self._relay.error
            self._held.append(await self._next())
        self.figures.first = time.perf_counter()

    async def _next(self) -> bytes:
        """Read what arrives next; returns the bytes for the client. ReplicaError where the stream ends too early."""
        data = await self._upstream.read() if self._upstream is not None else b""
        if not data:
            raise ReplicaError("its stream ended before it was complete")
        return self._relay.feed(data)

    def _time_up(self) -> None:
        """The deadline has passed: a stream that has begun ends with an error event, anything else with an error."""
        if self._begun and self._upstream is not None:
            self._upstream.cut(DeadlineExceeded())
        else:
            self.guard.end(DeadlineExceeded())

    def _leave(self) -> None:
        """Release the replica and the connection to it."""
        if self._upstream is not None:
            self._upstream.close(ended=self._relay.ended)
        if self._replica is not None:
            self._replica.load -= self.ask.count
        self._upstream = self._replica = None


def _client_error(error: Exception) -> Exception:
    """The error that the client gets for a failure: the replica's own error where it sent one."""
    if isinstance(error, ReplicaRefusedError):
        return error.error
    if isinstance(error, ReplicaError):
        return Unavailable(f"the engine failed on this request: {error}; send it again", "engine_failed", 1)
    return error
