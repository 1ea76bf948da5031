"""What every answer passes through last: its id, safe headers, and one account of it in metrics, log and trace."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.server.asgi import headers_named, refuse
from outrider.server.logs import log, log_error
from outrider.server.metrics import Metrics
from outrider.server.problems import Problem
from outrider.server.record import CURRENT, LEFT, Record
from outrider.server.telemetry import Telemetry

SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
SAFE = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"content-security-policy": b"default-src 'none'; frame-ancestors 'none'",
    b"cache-control": b"no-store",
}
"""Sent with every answer that does not say otherwise."""


class Envelope:
    """The outermost layer: every answer gets its id and its safe headers, and is counted, logged and traced once.

    Whatever goes wrong further in ends here, so that nobody else writes it to a log.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Iterable[str],
        metrics: Metrics,
        telemetry: Telemetry | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """about: what the log says of the server when it starts."""
        self.app, self.routes, self.about = app, frozenset(routes), dict(about or {})
        self.metrics, self.telemetry = metrics, telemetry
        self.open: dict[Record, None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        record = Record(_id(scope), scope["method"], self._closed, _trace(scope))
        self.open[record] = None
        scope.setdefault("state", {})["request_id"] = record.id
        token = CURRENT.set(record)
        answer = Answer(record.id, send)
        try:
            await self.app(scope, receive, answer.send)
        except Exception as error:
            log_error("fault", error, id=record.id)
            if not answer.status:
                why = Problem(500, "an unforeseen fault; the server's log has the details", code="internal_error")
                await refuse(scope, receive, answer.send, why)
            elif not answer.complete:
                raise BrokenAnswerError from None  # uvicorn cuts the connection, which is all that can still be said
        finally:
            CURRENT.reset(token)
            record.client, record.route = scope["state"].get("client", ""), self._route(scope)
            record.end(answer.status or LEFT)

    def _route(self, scope: Scope) -> str:
        """The route that answered, or that would have; only ever one of the app's own."""
        matched: str | None = getattr(scope.get("route"), "path", None)
        return matched or (scope["path"] if scope["path"] in self.routes else "other")

    def _closed(self, record: Record) -> None:
        self.open.pop(record, None)
        self.metrics.answered(record.route, record.status)
        if self.telemetry is not None:
            self.telemetry.tell(record)
        log("request", **request_fields(record))

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The server's start and end."""

        async def told(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                log("start", **self.about)
            elif message["type"] == "lifespan.shutdown.complete":
                for record in list(self.open):
                    record.close()
                if self.telemetry is not None:
                    await asyncio.to_thread(self.telemetry.close)
                log("stop")
            await send(message)

        await self.app(scope, receive, told)


class BrokenAnswerError(Exception):
    """An answer broke off. Says nothing: what went wrong has been logged."""


class Answer:
    """Passes an answer on with its id and safe headers, and remembers how far it came."""

    def __init__(self, id: str, send: Send) -> None:  # noqa: A002 - what it is
        self.status, self.complete = 0, False
        self._id, self._send = id.encode(), send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            given = {name.lower() for name, _ in message.get("headers", ())}
            added = [(name, value) for name, value in SAFE.items() if name not in given]
            headers = [*message.get("headers", ()), (b"x-request-id", self._id), *added]
            message = {**message, "headers": headers}
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)
        await self._send(message)


def request_fields(record: Record) -> dict[str, Any]:
    """What a log says of a request."""
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


def _id(scope: Scope) -> str:
    """The client's own id for its request where it is a sane one, else a new one."""
    given = headers_named(scope, b"x-request-id")
    if len(given) == 1 and SANE_ID.fullmatch(given[0]):
        return given[0].decode()
    return f"req-{secrets.token_hex(12)}"


def _trace(scope: Scope) -> dict[str, str]:
    names = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}
