"""The API's routes where replicas answer them, with the same request schemas."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from outrider import __version__
from outrider.remote.service import RemoteService
from outrider.server.http.body import StrictRoute
from outrider.server.http.errors import APIError
from outrider.server.openai import response_schema
from outrider.server.openai.request_schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.openai.responses_request import ResponsesRequest
from outrider.server.routes import ERROR_RESPONSES, STREAM_CONTENT

BAD_GATEWAY = {"model": response_schema.ErrorResponse, "description": "The engine refused this server's own request"}
ERRORS: dict[int | str, dict[str, Any]] = ERROR_RESPONSES | {502: BAD_GATEWAY}
GENERATED = ERRORS | {200: {"description": "As the engine answers", "content": STREAM_CONTENT}}
"""The engine's own response: its fields differ between engines and their versions."""


def remote_routes(service: RemoteService) -> APIRouter:
    """The routes of the API."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=GENERATED)
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await service.chat(body, request)

    @router.post("/v1/completions", responses=GENERATED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        return await service.complete(body, request)

    @router.post("/v1/responses", responses=GENERATED)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Generate the next items of a conversation, whose previous items the client sends. Nothing is stored."""
        return await service.create_response(body, request)

    @router.post("/tokenize", responses=ERRORS | {200: {"model": response_schema.Tokenized}})
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Text, or messages, to token ids."""
        if (body.prompt is None) == (body.messages is None):
            raise APIError(400, "send either prompt or messages", param="prompt")
        return await service.relay("/tokenize", body, request)

    @router.post("/detokenize", responses=ERRORS | {200: {"model": response_schema.Detokenized}})
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Token ids to text."""
        return await service.relay("/detokenize", body, request)

    _add_state(router, service)
    return router


def _add_state(router: APIRouter, service: RemoteService) -> None:
    name_of_model = service.settings.served_name

    @router.get("/v1/models", responses=ERRORS)
    async def models() -> Response:
        """The server's one model."""
        return JSONResponse({"object": "list", "data": [service.card()]})

    @router.get("/v1/models/{name:path}", responses=ERRORS)
    async def model(name: str) -> Response:
        """One model."""
        if name != name_of_model:
            raise APIError(404, f"no such model; this server has {name_of_model!r}", code="model_not_found")
        return JSONResponse(service.card())

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=ERRORS | {200: {"model": response_schema.Health}})
    async def health() -> Response:
        """200 while a replica takes requests; 503 while all load, drain or are dead."""
        service.front.check_ready()
        return JSONResponse({"status": "ready"})

    @router.get("/version", responses=ERRORS | {200: {"model": response_schema.Version}})
    async def version() -> Response:
        """The software's version."""
        return JSONResponse({"version": __version__})
