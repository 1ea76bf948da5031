"""Between a job and a connection: whole answers, streams, and clients that hang up."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.engine.events import Event
from outrider.server.jobs import Job
from outrider.server.problems import problem_of
from outrider.server.record import LEFT
from outrider.server.sse import DONE, encode

T = TypeVar("T")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class ClientGone(Exception):  # noqa: N818 - it is the client's right, and no error
    """The client hung up."""


class Teller(Protocol):
    """Makes an answer of events; see chat.py and completions.py."""

    def begin(self) -> Iterator[dict[str, Any]]: ...
    def add(self, index: int, event: Event) -> None: ...
    def chunks(self, index: int, event: Event) -> Iterator[dict[str, Any]]: ...
    def end(self) -> Iterator[dict[str, Any]]: ...
    def answer(self) -> dict[str, Any]: ...
    @property
    def at_length(self) -> bool: ...


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work; ClientGone, and the work cancelled, as soon as the client hangs up. The body has been read."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def whole(receive: Receive, job: Job | None, teller: Teller, headers: dict[str, str]) -> Response:
    """One JSON answer."""

    async def collect() -> None:
        if job is not None:
            async for index, told in job:
                if isinstance(told, Event):
                    teller.add(index, told)

    try:
        await unless_gone(receive, collect())
    except ClientGone:
        return Response(status_code=LEFT)
    finally:
        if job is not None:
            job.cancel()
    if not teller.at_length:
        return JSONResponse(teller.answer(), headers=headers)
    body = await asyncio.to_thread(lambda: written(teller.answer()))
    return Response(body, headers=headers, media_type="application/json")


def written(answer: dict[str, Any]) -> bytes:
    """An answer as JSON, for a thread: written value by value, as the encoder at once would let no other thread run."""
    out = io.StringIO()
    out.writelines(_JSON.iterencode(answer))
    return out.getvalue().encode()


async def chunks(job: Job | None, teller: Teller, obfuscate: bool) -> AsyncGenerator[bytes, None]:
    """A stream to its [DONE], or to the error that ends it early."""
    try:
        for chunk in teller.begin():
            yield encode(chunk, obfuscate=obfuscate)
            await asyncio.sleep(0)  # an echo has many chunks, and others want to be heard in between
        if job is not None:
            async for index, told in job:
                if isinstance(told, Event):
                    teller.add(index, told)
                    for chunk in teller.chunks(index, told):
                        yield encode(chunk, obfuscate=obfuscate)
        for chunk in teller.end():
            yield encode(chunk, obfuscate=obfuscate)
        yield DONE
    except Exception as error:  # headers are out: whatever it was, the stream must say so
        yield encode(problem_of(error).body())


class EventStream(Response):
    """Sends a stream of a job as it comes, until it ends or the client goes; then cancels the job."""

    media_type = "text/event-stream"

    def __init__(self, stream: AsyncGenerator[bytes, None], job: Job | None, headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self.stream, self.job = stream, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except (ClientGone, OSError):
            return  # nobody is left to tell
        finally:  # not the stream's own: one that was left before its first chunk never began
            if self.job is not None:
                self.job.cancel()

    async def _send(self, send: Send) -> None:
        async with aclosing(self.stream):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self.stream:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
