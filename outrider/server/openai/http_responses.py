"""From a job to an HTTP response: one JSON object, or a stream of chunks."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive

from outrider.engine.events import Event
from outrider.server.http.disconnect import ClientDisconnected, cancel_on_disconnect
from outrider.server.http.errors import to_api_error
from outrider.server.http.sse import DONE_EVENT, EventStreamResponse, encode_event
from outrider.server.openai.response_builder import ResponseBuilder
from outrider.server.ops.request_record import CLIENT_CLOSED_REQUEST
from outrider.server.queue.jobs import Job

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


async def json_response(
    receive: Receive, job: Job | None, builder: ResponseBuilder, headers: dict[str, str]
) -> Response:
    """The whole response as JSON, once the job has finished. job: None where nothing is generated."""

    async def collect() -> None:
        if job is not None:
            async for index, output in job:
                if isinstance(output, Event):
                    builder.add(index, output)

    try:
        await cancel_on_disconnect(receive, collect())
    except ClientDisconnected:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        _cancel(job)
    if not builder.is_long:
        return JSONResponse(builder.response(), headers=headers)
    body = await asyncio.to_thread(lambda: _json_bytes(builder.response()))
    return Response(body, headers=headers, media_type="application/json")


def stream_response(
    job: Job | None, builder: ResponseBuilder, headers: dict[str, str], *, obfuscate: bool = False
) -> Response:
    """The response as server-sent events; the job is cancelled when the client disconnects."""
    return EventStreamResponse(_events(job, builder, obfuscate), lambda: _cancel(job), headers)


async def _events(job: Job | None, builder: ResponseBuilder, obfuscate: bool) -> AsyncGenerator[bytes, None]:
    """The stream's bytes, event by event, to the last event or to the error that ends the stream early."""

    def encode(chunk: dict[str, Any], *, padded: bool = obfuscate) -> bytes:
        name = f"event: {chunk['type']}\n".encode() if builder.named_events else b""
        return name + encode_event(chunk, obfuscate=padded)

    try:
        for chunk in builder.first_chunks():
            yield encode(chunk)
            await asyncio.sleep(0)  # an echo has many chunks: let other streams go on in between
        if job is not None:
            async for index, output in job:
                if isinstance(output, Event):
                    builder.add(index, output)
                    for chunk in builder.event_chunks(index, output):
                        yield encode(chunk)
        for chunk in builder.last_chunks():
            yield encode(chunk)
        if not builder.named_events:
            yield DONE_EVENT
    except Exception as error:  # the status has been sent: the stream must tell any error
        yield encode(builder.error_chunk(to_api_error(error)), padded=False)


def _cancel(job: Job | None) -> None:
    if job is not None:
        job.cancel()


def _json_bytes(response: dict[str, Any]) -> bytes:
    """JSON, written value by value: encoding all at once would hold the interpreter's lock and block other threads."""
    out = io.StringIO()
    out.writelines(_JSON.iterencode(response))
    return out.getvalue().encode()
