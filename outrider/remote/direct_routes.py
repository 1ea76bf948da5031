"""Answers requests for text without FastAPI's routing, whose matching and dependencies cost more than everything else.

Only small, well-formed requests are answered here: others go to the routes, so that their errors stay the same.
"""

from __future__ import annotations

from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.errors import RequestError
from outrider.remote.service import RemoteService
from outrider.server.http.body import LARGE_BODY, parse_json
from outrider.server.http.errors import APIError, error_response
from outrider.server.openai.request_schema import ChatRequest, CompletionRequest
from outrider.server.openai.responses_request import ResponsesRequest
from outrider.server.queue.jobs import Unavailable


class DirectRoutes:
    """The innermost middleware, right before the routes."""

    def __init__(self, app: ASGIApp, service: RemoteService) -> None:
        self.app = app
        self._routes = {
            "/v1/chat/completions": (ChatRequest, service.chat),
            "/v1/completions": (CompletionRequest, service.complete),
            "/v1/responses": (ResponsesRequest, service.create_response),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            return await self.app(scope, receive, send)
        model, answer = route
        message = await receive()  # the whole body: BodyLimit has read it
        try:
            raw: bytes = message.get("body", b"")
            body = model.model_validate(parse_json(raw)) if len(raw) < LARGE_BODY else None
        except (APIError, ValidationError):
            body = None
        if body is None:
            return await self.app(scope, _again(message, receive), send)
        try:
            response = await answer(body, Request(scope, receive))
        except (HTTPException, RequestError, Unavailable) as error:
            response = error_response(error)
        return await response(scope, receive, send)


def _again(message: Message, receive: Receive) -> Receive:
    """A receive function that returns this message first, then those of `receive`."""
    left = [message]

    async def received() -> Message:
        return left.pop() if left else await receive()

    return received
