"""The handlers of the routes: requests are checked here and answered by a replica."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from outrider.remote.capabilities import check_supported, lacks
from outrider.remote.exchange import Ask, Exchange
from outrider.remote.front import Front
from outrider.remote.upstream import ReplicaError, post
from outrider.server.http.disconnect import ClientDisconnected
from outrider.server.http.sse import EventStreamResponse
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
        self.created = int(time.time())

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        return await self._answer("/v1/chat/completions", body, request, body.n or 1)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        check_completion(body)
        return await self._answer("/v1/completions", body, request, count_sequences(body))

    async def create_response(self, body: ResponsesRequest, request: Request) -> Response:
        chat_request(body)  # APIError where it is none
        return await self._answer("/v1/responses", body, request, 1)

    async def relay(self, path: str, body: TokenizeRequest | DetokenizeRequest, request: Request) -> Response:
        """A request that takes no place in the queue: a replica's tokenizer answers it."""
        headers = self.check_body(body)
        self.front.check_ready()
        made = body.model_dump(exclude_none=True, exclude={"model", *(body.model_extra or ())})
        error: ReplicaError | None = None
        for replica in sorted(self.front.pool.usable(), key=lambda replica: replica.load)[:2]:
            sent = made | ({"model": replica.card.model} if replica.card else {})
            try:
                upstream = await post(self.front.session, replica, path, json.dumps(sent).encode(), {})
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
            **facts,
            **self.drafting,
            "engine": ", ".join(sorted({f"{card.kind} {card.version}".strip() for card in cards})),
            "replicas": {"all": len(pool.replicas), "usable": len(pool.usable())},
            **lacks(pool.kind),
        }

    async def _answer(self, path: str, body: CompletionFields, request: Request, count: int) -> Response:
        headers, context = self.check_body(body), self.context(request)
        self.front.check_ready()
        check_supported(body, self.front.pool.kind)
        # a client chooses its id, and may send one twice: vLLM knows its requests by theirs
        sent = {"X-Request-Id": f"{request.state.request_id}-{secrets.token_hex(4)}"}
        salt = self.salt(body, request)
        exchange = Exchange(self.front, Ask(path, body, salt, count, self.settings.served_name, context.owner, sent))
        try:
            if body.stream:
                await context.run(exchange.begin_stream())
                return EventStreamResponse(exchange.stream(), exchange.close, headers)
            raw = await context.run(exchange.whole())
        except ClientDisconnected:
            exchange.close()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException as error:
            exchange.fail(error)
            raise
        exchange.close(exchange.figures.events(count))
        return Response(raw, headers=headers, media_type="application/json")
