"""The routes and what each takes and gives."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from outrider import __version__
from outrider.server import answers
from outrider.server.body import StrictRoute
from outrider.server.problems import Problem
from outrider.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from outrider.server.service import Service
from outrider.server.translate import template_message

STATUSES = {
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
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": answers.Error, "description": says} for status, says in STATUSES.items()
}
EVENT = {
    "type": "object",
    "properties": {"data": {"type": "string", "description": "A chunk as JSON, or an error; [DONE] is the last"}},
    "required": ["data"],
}
STREAM = {"text/event-stream": {"itemSchema": EVENT}}  # of each event, as FastAPI itself writes it


def _gives(model: type, *, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    return ERRORS | {200: {"model": model, "content": STREAM if stream else {}}}


def routes(service: Service) -> APIRouter:
    """Every route that clients of the model use."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", responses=_gives(answers.ChatCompletion, stream=True))
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await service.chat(body, request)

    @router.post("/v1/completions", responses=_gives(answers.Completion, stream=True))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Write on from one prompt or several."""
        return await service.complete(body, request)

    _add_tokenizer(router, service)
    _add_models(router, service)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", responses=_gives(answers.Health))
    async def health() -> Response:
        """200 when requests are taken; 503 while loading, draining, or dead."""
        _ = service.worker.llm  # raises why not
        return JSONResponse({"status": "ready"})

    @router.get("/version", responses=_gives(answers.Version))
    async def version() -> Response:
        """The software's version."""
        return JSONResponse({"version": __version__})

    return router


def _add_tokenizer(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize", responses=_gives(answers.Tokenized))
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        """Text, or a conversation, to ids."""
        headers = service.admit(body)
        told = await service.tokenizing.do(service.client(request), lambda: _tokenize(service, body))
        return JSONResponse(told, headers=headers)

    @router.post("/detokenize", responses=_gives(answers.Detokenized))
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        """Ids to text."""
        headers, llm = service.admit(body), service.worker.llm
        last = llm.engine.target.vocab_size - 1
        if body.tokens and max(body.tokens) > last:
            raise Problem(400, f"tokens: ids run from 0 to {last} here", param="tokens", code="invalid_value")
        text = await service.tokenizing.do(service.client(request), lambda: llm.tokenizer.decode_all(body.tokens))
        return JSONResponse({"prompt": text}, headers=headers)


def _add_models(router: APIRouter, service: Service) -> None:
    born = int(time.time())

    def card() -> dict[str, Any]:
        llm = service.worker.llm
        return {
            "id": service.settings.served_name,
            "object": "model",
            "created": born,
            "owned_by": "outrider",
            "max_model_len": llm.engine.target.context,
            "drafter": llm.drafter.name,
        }

    @router.get("/v1/models", responses=_gives(answers.ModelList))
    async def models() -> Response:
        """The model there is."""
        return JSONResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}", responses=_gives(answers.ModelCard))
    async def model(name: str) -> Response:
        """One model."""
        if name != service.settings.served_name:
            raise Problem(
                404, f"no such model; this server has {service.settings.served_name!r}", code="model_not_found"
            )
        return JSONResponse(card())


def _tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    tokenizer = service.worker.llm.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise Problem(400, "send either prompt or messages", param="prompt")
    if body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, special=body.add_special_tokens is not False)
    else:  # the template writes its own special tokens; more are added only where that is asked for
        given = [template_message(message) for message in body.messages or ()]
        text = tokenizer.chat(given, add_generation_prompt=body.add_generation_prompt is not False)
        tokens = tokenizer.encode(text, special=body.add_special_tokens is True)
    out: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": service.worker.llm.engine.target.context,
        "tokens": tokens,
    }
    if body.return_token_strs:
        out["token_strs"] = [service.texts.text(token) for token in tokens]
    return out
