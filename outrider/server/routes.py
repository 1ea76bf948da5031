"""The routes, with their request and response schemas."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from outrider import __version__
from outrider.server.http.body import StrictRoute
from outrider.server.http.errors import APIError
from outrider.server.openai import response_schema
from outrider.server.openai.chat_prompt import chat_prompt
from outrider.server.openai.request_schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.openai.responses_request import ResponsesRequest
from outrider.server.service import Service

ERROR_DESCRIPTIONS = {
    400: "The request cannot be served as it is",
    401: "The API key is missing or wrong",
    404: "No such model",
    405: "The route takes another method",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "The queue is full",
    500: "The model failed on this request alone",
    503: "Loading, shutting down, dead, or out of time",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": response_schema.ErrorResponse, "description": text} for status, text in ERROR_DESCRIPTIONS.items()
}
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, or an error; [DONE] is the last"}},
    "required": ["data"],
}
STREAM_CONTENT = {"text/event-stream": {"itemSchema": EVENT_SCHEMA}}  # the schema of one event, as FastAPI writes it


def _responses(model: type, *, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    return ERROR_RESPONSES | {200: {"model": model, "content": STREAM_CONTENT if stream else {}}}


def routes(service: Service) -> APIRouter:
    """The routes of the API."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=_responses(response_schema.ChatCompletion, stream=True))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Generate the next message of a conversation."""
        return await service.chat(body, request)

    @router.post("/v1/completions", responses=_responses(response_schema.Completion, stream=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or several."""
        return await service.complete(body, request)

    @router.post("/v1/responses", responses=_responses(response_schema.ResponseObject, stream=True))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Generate the next items of a conversation, whose previous items the client sends. Nothing is stored."""
        return await service.create_response(body, request)

    _add_tokenizer(router, service)
    _add_models(router, service)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=_responses(response_schema.Health))
    async def health() -> Response:
        """200 when requests are taken; 503 while loading, draining, or dead."""
        _ = service.engine_thread.engine  # raises Unavailable with the reason
        return JSONResponse({"status": "ready"})

    @router.get("/version", responses=_responses(response_schema.Version))
    async def version() -> Response:
        """The software's version."""
        return JSONResponse({"version": __version__})

    return router


def _add_tokenizer(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", responses=_responses(response_schema.Tokenized))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Text, or messages, to token ids."""
        headers = service.check_body(body)
        out = await service.tokenize_pool.run(service.client(request), lambda: _tokenize(service, body))
        return JSONResponse(out, headers=headers)

    @router.post("/detokenize", responses=_responses(response_schema.Detokenized))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Token ids to text."""
        headers, engine = service.check_body(body), service.engine_thread.engine
        last = engine.facts.vocab_size - 1
        if body.tokens and max(body.tokens) > last:
            raise APIError(400, f"tokens: ids run from 0 to {last} here", param="tokens", code="invalid_value")
        text = await service.tokenize_pool.run(
            service.client(request), lambda: engine.tokenizer.decode_all(body.tokens)
        )
        return JSONResponse({"prompt": text}, headers=headers)


def _add_models(router: APIRouter, service: Service) -> None:
    created = int(time.time())

    def card() -> dict[str, Any]:
        facts = service.engine_thread.engine.facts
        return {
            "id": service.settings.served_name,
            "object": "model",
            "created": created,
            "owned_by": "outrider",
            "max_model_len": facts.context,
            "drafter": facts.drafter,
            "max_draft_tokens": facts.max_draft_tokens,
            "number_format": facts.number_format,
            "weight_bytes": facts.weight_bytes,
            "device": facts.device,
            "cache_tokens": facts.page_count * facts.page_size,
            "memory": facts.memory,
        }

    @router.get("/v1/models", responses=_responses(response_schema.ModelList))
    async def models() -> Response:
        """The server's one model."""
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}", responses=_responses(response_schema.ModelCard))
    async def model(name: str) -> Response:
        """One model."""
        if name != service.settings.served_name:
            raise APIError(
                404, f"no such model; this server has {service.settings.served_name!r}", code="model_not_found"
            )
        return JSONResponse(card())


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    engine = service.engine_thread.engine
    tokenizer = engine.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise APIError(400, "send either prompt or messages", param="prompt")
    if body.prompt is not None:
        allow = service.settings.allow_special_tokens != "none"
        tokens = tokenizer.encode(body.prompt, special=body.add_special_tokens is not False, allow_special_tokens=allow)
    else:  # the template writes its own special tokens; more are added only on request
        rendered = chat_prompt(body, tokenizer, allow_special_tokens=service.settings.allow_special_tokens == "all")
        tokens = tokenizer.encode_rendered(rendered, special=body.add_special_tokens is True)
    out: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": engine.facts.context,
        "tokens": tokens,
    }
    if body.return_token_strs:
        out["token_strs"] = [service.texts.text(token) for token in tokens]
    return out
