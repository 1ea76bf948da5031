"""The outermost middleware: request ids, security headers, and each request counted, logged and traced once."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.http.asgi import header_values, send_error
from outrider.server.http.errors import internal_error
from outrider.server.ops.logs import log_error, log_event
from outrider.server.ops.metrics import MetricsCollector
from outrider.server.ops.request_record import CLIENT_CLOSED_REQUEST, CURRENT_RECORD, RequestRecord
from outrider.server.ops.tracing import RequestTracer

REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
SECURITY_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cache-control": b"no-store",
}
"""Added to every response that does not set them."""


class RequestMiddleware:
    """Gives every response its id and security headers, and counts, logs and traces it once.

    Exceptions of the inner app are caught and logged here, so that nothing else logs them.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[str],
        metrics: MetricsCollector,
        tracer: RequestTracer | None = None,
        start_fields: Mapping[str, Any] | None = None,
    ) -> None:
        """start_fields: the fields of the log's `start` line."""
        self.app, self.routes, self.start_fields = app, frozenset(routes), dict(start_fields or {})
        self.metrics, self.tracer = metrics, tracer
        self.open: dict[RequestRecord, None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._lifespan(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        record = RequestRecord(_request_id(scope), scope["method"], self._closed, _trace_headers(scope))
        self.open[record] = None
        scope.setdefault("state", {})["request_id"] = record.id
        token = CURRENT_RECORD.set(record)
        response = ResponseTracker(record.id, send)
        try:
            await self.app(scope, receive, response.send)
        except Exception as error:
            log_error("fault", error, id=record.id)
            if not response.status:
                await send_error(scope, receive, response.send, internal_error())
            elif not response.complete:
                raise ResponseAbortedError from None  # uvicorn then closes the connection
        finally:
            CURRENT_RECORD.reset(token)
            record.client, record.route = scope["state"].get("client", ""), self._route(scope)
            record.end(response.status or CLIENT_CLOSED_REQUEST)

    def _route(self, scope: Scope) -> str:
        """The route that matched; without a match, the path where it is one of the app's routes, else `other`."""
        matched: str | None = getattr(scope.get("route"), "path", None)
        return matched or (scope["path"] if scope["path"] in self.routes else "other")

    def _closed(self, record: RequestRecord) -> None:
        self.open.pop(record, None)
        self.metrics.add_response(record.route, record.status)
        if self.tracer is not None:
            self.tracer.export(record)
        log_event("request", **request_fields(record))

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Log the server's start and end."""

        async def logged(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                log_event("start", **self.start_fields)
            elif message["type"] == "lifespan.shutdown.complete":
                for record in list(self.open):
                    record.close()
                if self.tracer is not None:
                    await asyncio.to_thread(self.tracer.close)
                log_event("stop")
            await send(message)

        await self.app(scope, receive, logged)


class ResponseAbortedError(Exception):
    """A response broke off. It has no message: the cause has been logged."""


class ResponseTracker:
    """Sends a response with its id and security headers, and notes its status and whether it is complete."""

    def __init__(self, request_id: str, send: Send) -> None:
        self.status, self.complete = 0, False
        self._id, self._send = request_id.encode(), send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name.lower() for name, _ in message.get("headers", ())}
            added = [(name, value) for name, value in SECURITY_HEADERS.items() if name not in given]
            headers = [*message.get("headers", ()), (b"x-request-id", self._id), *added]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        await self._send(message)


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """The fields of a request's log line."""
    fields: dict[str, Any] = {
        "id": record.id,
        "client": record.client,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "seconds": _rounded(record.seconds),
    }
    if record.finish_reasons:
        stats = record.stats
        fields |= {
            "finish": ",".join(record.finish_reasons),
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.shared_tokens,
            "tokens": stats.tokens,
            "passes": stats.passes,
            "queue_seconds": _rounded(record.queue_seconds),
            "first_token_seconds": _rounded(record.first_token_seconds),
            "drafters": {
                name: {"drafts": tally.rounds, "drafted": tally.drafted, "accepted": tally.accepted}
                for name, tally in stats.drafters.items()
            },
        }
    if record.body:
        fields["body"] = record.body
    return fields


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _request_id(scope: Scope) -> str:
    """The client's own x-request-id where it is well-formed, else a new one."""
    given = header_values(scope, b"x-request-id")
    if len(given) == 1 and REQUEST_ID.fullmatch(given[0]):
        return given[0].decode()
    return f"req-{secrets.token_hex(12)}"


def _trace_headers(scope: Scope) -> dict[str, str]:
    names = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}
