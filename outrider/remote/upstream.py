"""HTTP to the replicas: a request, its response whole or as events, and what went wrong with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp

from outrider.remote.replica import Replica
from outrider.remote.sse_reader import EventReader, MalformedEventError, ServerEvent
from outrider.server.http.errors import APIError

CONNECT_SECONDS = 2.0
KEPT_SECONDS = 2.0  # an idle connection is closed before uvicorn's 5 seconds, so that none is used as it ends
MAX_ERROR_BYTES = 1 << 16
_NETWORK_ERRORS = (aiohttp.ClientError, OSError, asyncio.TimeoutError)


class ReplicaError(Exception):
    """A replica could not be reached, broke off, or answered what is no answer. Another may do better."""


class ReplicaRefusedError(ReplicaError):
    """It answered that it cannot: its queue is full, it is being shut down, or it failed on this request."""

    def __init__(self, message: str, error: APIError) -> None:
        super().__init__(message)
        self.error = error
        """What the client is told where no other replica takes the request."""


def make_session(key: str = "") -> aiohttp.ClientSession:
    """A session for all replicas. key: sent to each as a Bearer token."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        auto_decompress=False,
        read_bufsize=1 << 20,
    )


class Upstream:
    """One response that is being read. Close it, whatever happens."""

    def __init__(self, replica: Replica, response: aiohttp.ClientResponse) -> None:
        self.replica, self.response = replica, response
        self.error: Exception | None = None
        """Why it was cut."""
        replica.open.add(self)

    def cut(self, error: Exception) -> None:
        """End it with this error, which whoever reads it gets."""
        self.error = error
        self.response.close()

    def close(self) -> None:
        """Give the connection back; one whose response was not read to its end is closed, and the request with it."""
        self.replica.open.discard(self)
        if self.response.content.at_eof():
            self.response.release()
        else:
            self.response.close()

    async def read_json(self) -> tuple[bytes, dict[str, Any]]:
        """The whole response, as it came and parsed. ReplicaError where it is no JSON object."""
        try:
            raw = await self.response.read()
            value = json.loads(raw)
        except _NETWORK_ERRORS as error:
            raise self.broken(error) from error
        except ValueError as error:
            raise ReplicaError("its response is not JSON") from error
        if not isinstance(value, dict):
            raise ReplicaError("its response is no JSON object")
        return raw, value

    async def events(self) -> AsyncGenerator[list[ServerEvent], None]:
        """The events of a stream, those that arrive together at once. ReplicaError where it breaks off or is none."""
        reader = EventReader()
        try:
            async for data in self.response.content.iter_any():
                events: list[ServerEvent] = []
                try:
                    events.extend(reader.feed(data))
                finally:  # those before a malformed one are events too
                    if events:
                        yield events
        except _NETWORK_ERRORS as error:
            raise self.broken(error) from error
        except MalformedEventError as error:
            raise ReplicaError(f"its stream is malformed: {error}") from error
        if self.error is not None:
            raise self.error

    def broken(self, error: BaseException) -> Exception:
        """What ended it: the reason it was cut, or this error of the network."""
        return self.error or ReplicaError(f"the connection broke off ({type(error).__name__})")


async def post(
    session: aiohttp.ClientSession, replica: Replica, path: str, body: bytes, headers: Mapping[str, str]
) -> Upstream:
    """Send a request; returns its response once the status is known, and is 200.

    ReplicaError where another replica may do better, APIError where the request itself was refused.
    """
    sent = {"Content-Type": "application/json", **headers}
    try:
        response = await session.post(replica.url + path, data=body, headers=sent)
    except _NETWORK_ERRORS as error:
        raise ReplicaError(f"it cannot be reached ({type(error).__name__})") from error
    upstream = Upstream(replica, response)
    if response.status == 200:
        return upstream
    try:
        raw = await response.content.read(MAX_ERROR_BYTES)
    except _NETWORK_ERRORS as error:
        raise upstream.broken(error) from error
    finally:
        upstream.close()
    raise refusal(response.status, raw)


def refusal(status: int, raw: bytes) -> Exception:
    """What an error response means: an APIError for the client, or a ReplicaError."""
    try:
        told = json.loads(raw)["error"]
        message, param, code = str(told["message"]), told.get("param"), told.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = f"status {status}", None, None
    code = code if isinstance(code, str) else None  # vLLM repeats the status there
    if code is None and "maximum context length" in message:
        code, param = "context_length_exceeded", None
    if status in (401, 403, 404, 405):  # of this server's own doing, not the client's
        return APIError(502, f"the engine answers {status}: {message}", code="engine_error")
    error = APIError(status, message, code=code or "engine_error", param=param if isinstance(param, str) else None)
    if status in (429, 503):
        error.headers = {"Retry-After": "5"}
    if status in (429, 500, 502, 503, 504):
        return ReplicaRefusedError(f"it answers {status}: {message[:200]}", error)
    return error


async def get(session: aiohttp.ClientSession, url: str, seconds: float) -> tuple[int, bytes]:
    """Status and body. TimeoutError after so many seconds, OSError or aiohttp.ClientError where it cannot be had."""
    async with asyncio.timeout(seconds), session.get(url) as response:
        return response.status, await response.read()
