"""The handlers of the routes: requests are checked here and answered by a replica."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import aclosing
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.remote.capabilities import check_supported, lacks
from outrider.remote.exchange import Ask, Exchange
from outrider.remote.front import Front
from outrider.remote.guard import Guard
from outrider.remote.upstream import ReplicaError, post
from outrider.server.http.disconnect import ClientDisconnected
from outrider.server.openai.request_schema import (
    ChatRequest,
    CompletionFields,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from outrider.server.openai.responses_request import ResponsesRequest, chat_request
from outrider.server.openai.translate import check_completion, count_sequences
from outrider.server.ops.request_record import CLIENT_CLOSED_REQUEST
from outrider.server.service import RequestChecks
from outrider.server.settings import Settings


class RemoteService(RequestChecks):
    """Replicas behind the routes of one server."""

    def __init__(self, front: Front, settings: Settings, drafting: dict[str, Any] | None = None) -> None:
        """drafting: what is known of the replicas' drafter, for /v1/models."""
        super().__init__(settings)
        self.front, self.drafting = front, drafting or {}
        self.drafts = self.drafting.get("drafter", "none") != "none"
        self.created = int(time.time())

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._answer("/v1/chat/completions", body, request, body.n or 1)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        check_completion(body)
        return await self._answer("/v1/completions", body, request, count_sequences(body))

    async def create_response(self, body: ResponsesRequest, request: Request) -> Response:
        chat_request(body)  # only for its checks
        return await self._answer("/v1/responses", body, request, 1)

    async def relay(self, path: str, body: TokenizeRequest | DetokenizeRequest, request: Request) -> Response:
        """Have a replica's tokenizer answer a request. It takes no place in the queue."""
        headers = self.check_body(body)
        self.front.check_ready()
        made = body.model_dump(exclude_none=True, exclude={"model", *(body.model_extra or ())})
        error: ReplicaError | None = None
        for replica in sorted(self.front.pool.usable(), key=lambda replica: replica.load)[:2]:
            sent = made | ({"model": replica.card.model} if replica.card else {})
            try:
                upstream = await post(self.front.client, replica, path, json.dumps(sent).encode(), {})
                try:
                    raw, _ = await upstream.read_json()
                finally:
                    upstream.close()
                return Response(raw, headers=headers, media_type="application/json")
            except ReplicaError as failed:
                self.front.pool.note_failure(replica, failed)
                error = failed
        raise self.front.unavailable() from error

    def card(self) -> dict[str, Any]:
        """The model, the engine behind it, and what it lacks."""
        self.front.check_ready()
        pool = self.front.pool
        cards = pool.cards
        facts = dict(cards[0].facts) if pool.kind == "outrider" else {}
        return {
            "id": self.settings.served_name,
            "object": "model",
            "created": self.created,
            "owned_by": "outrider",
            "max_model_len": min(card.max_model_len for card in cards),
            **lacks(pool.kind, drafts=self.drafts),
            **facts,
            **self.drafting,
            "engine": ", ".join(sorted({f"{card.kind} {card.version}".strip() for card in cards})),
            "replicas": {"all": len(pool.replicas), "usable": len(pool.usable())},
        }

    async def _answer(self, path: str, body: CompletionFields, request: Request, count: int) -> Response:
        headers, context = self.check_body(body), self.context(request)
        self.front.check_ready()
        check_supported(body, self.front.pool.kind, drafts=self.drafts)
        # vLLM identifies requests by this id: a client may send the same one twice, so a random suffix is added
        sent = {"X-Request-Id": f"{request.state.request_id}-{secrets.token_hex(4)}"}
        ask = Ask(path, body, self.salt(body, request), count, self.settings.served_name, context.owner, sent)
        exchange = Exchange(self.front, ask, Guard(request.receive))
        try:
            async with exchange.guard:
                if body.stream:
                    await exchange.begin_stream()
                    return RelayResponse(exchange, headers)
                raw = await exchange.whole()
        except ClientDisconnected:
            exchange.close()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException as error:
            exchange.fail(error)
            raise
        exchange.close(exchange.figures.events(count))
        return Response(raw, headers=headers, media_type="application/json")


class RelayResponse(Response):
    """A stream that has begun: sent until it ends or the client leaves, then closed."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, headers: dict[str, str]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]
        self.exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self.exchange.guard, aclosing(self.exchange.stream()) as stream:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in stream:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientDisconnected, OSError):
            return  # nobody is left to answer
        finally:  # not in the generator: dropped before its first chunk, it never runs
            self.exchange.close()
