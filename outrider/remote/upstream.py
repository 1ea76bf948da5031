"""A request to a replica, its response, and what went wrong with it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from outrider.remote.http_client import Connection, HttpClient
from outrider.remote.replica import Replica
from outrider.server.http.errors import APIError

MAX_ERROR_BYTES = 1 << 16


class ReplicaError(Exception):
    """A replica could not be reached, broke off, or sent an invalid response. Another replica may do better."""


class ReplicaRefusedError(ReplicaError):
    """The replica answered with an error: its queue is full, it is shutting down, or it failed on this request."""

    def __init__(self, message: str, error: APIError) -> None:
        super().__init__(message)
        self.error = error
        """What the client is told where no other replica takes the request."""


class Upstream:
    """One response that is being read. Close it, whatever happens."""

    def __init__(self, replica: Replica, connection: Connection) -> None:
        self.replica, self.connection = replica, connection
        self.error: Exception | None = None
        """Why it was cut."""
        replica.open.add(self)

    def cut(self, error: Exception) -> None:
        """End the response with this error, which `read` then raises."""
        self.error = error
        self.connection.abort()

    def close(self, *, ended: bool = False) -> None:
        """Give the connection back. If the response has not ended, close it instead: the replica then ends the request.

        ended: all that matters of the response has been read.
        """
        self.replica.open.discard(self)
        self.connection.release(ended=ended and self.error is None)

    async def read(self) -> bytes:
        """What has arrived; b"" at the end. ReplicaError where it breaks off, or the error it was cut with."""
        try:
            data = await self.connection.read()
        except OSError as error:
            raise self.broken(error) from error
        if self.error is not None:
            raise self.error
        return data

    async def read_json(self) -> tuple[bytes, dict[str, Any]]:
        """The whole response, as it came and parsed. ReplicaError where it is no JSON object."""
        try:
            raw = await self.connection.read_all()
            value = json.loads(raw)
        except OSError as error:
            raise self.broken(error) from error
        except ValueError as error:
            raise ReplicaError("its response is not JSON") from error
        if not isinstance(value, dict):
            raise ReplicaError("its response is no JSON object")
        return raw, value

    def broken(self, error: BaseException) -> Exception:
        """What ended it: the reason it was cut, or this error of the network."""
        return self.error or ReplicaError(f"the connection broke off ({type(error).__name__})")


async def post(client: HttpClient, replica: Replica, path: str, body: bytes, headers: Mapping[str, str]) -> Upstream:
    """Send a request; returns its response once the status is known, and is 200.

    ReplicaError where another replica may do better, APIError where the request itself was refused.
    """
    try:
        connection = await client.post(replica.url, path, body, headers.items())
    except OSError as error:
        raise ReplicaError(f"it cannot be reached ({type(error).__name__})") from error
    upstream = Upstream(replica, connection)
    if connection.status == 200:
        return upstream
    raw = b""
    try:
        while len(raw) < MAX_ERROR_BYTES and (data := await upstream.read()):
            raw += data
    finally:
        upstream.close()
    raise refusal(connection.status, raw)


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
    if status < 400 or status in (401, 403, 404, 405):  # this server's fault, not the client's
        return APIError(502, f"the engine answers {status}: {message}", code="engine_error")
    error = APIError(status, message, code=code or "engine_error", param=param if isinstance(param, str) else None)
    if status in (429, 503):
        error.headers = {"Retry-After": "5"}
    if status in (429, 500, 502, 503, 504):
        return ReplicaRefusedError(f"it answers {status}: {message[:200]}", error)
    return error


async def get(client: HttpClient, url: str, path: str, seconds: float) -> tuple[int, bytes]:
    """Status and body. TimeoutError after `seconds`, another OSError where the server cannot be reached."""
    async with asyncio.timeout(seconds):
        connection = await client.get(url, path)
        try:
            return connection.status, await connection.read_all()
        finally:
            connection.release(ended=False)
