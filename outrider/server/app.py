"""The application: routes, errors, the OpenAPI document, and what operates around them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from outrider import __version__
from outrider.server import operation, problems
from outrider.server.page import page_routes
from outrider.server.routes import routes
from outrider.server.schema import MAX_ID
from outrider.server.service import Service
from outrider.server.settings import Settings
from outrider.server.worker import Worker


def create_app(worker: Worker, settings: Settings) -> FastAPI:
    """The server's application. The worker is started by whoever runs it."""
    # no redirects: behind a proxy they would point at http, and a client would send its key there in the clear
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    problems.install(app)
    app.include_router(routes(Service(worker, settings)))
    app.include_router(page_routes())
    app.openapi = lambda: _document(app, worker, settings)
    operation.install(app, worker, settings)
    return app


def _document(app: FastAPI, worker: Worker, settings: Settings) -> dict[str, Any]:
    """OpenAPI, true to this server: its one model and vocabulary, and a 400 where FastAPI would write a 422."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    made = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path in made["paths"].values():
        for operation_ in path.values():
            operation_["responses"].pop("422", None)
    schemas: dict[str, Any] = made["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in ("ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"):
        served = {"anyOf": [{"const": settings.served_name}, {"type": "null"}], "title": "Model"}
        schemas[name]["properties"]["model"] = served
    if worker.state == "ready":  # before, the vocabulary is not known
        _bound_ids(schemas["CompletionRequest"], worker.llm.engine.target.vocab_size - 1)
        _bound_ids(schemas["ChatRequest"], worker.llm.engine.target.vocab_size - 1)
        _bound_ids(schemas["DetokenizeRequest"], worker.llm.engine.target.vocab_size - 1)
        app.openapi_schema = made
    return made


def _bound_ids(schema: Any, last: int) -> None:
    """Write the vocabulary's end wherever a schema speaks of token ids."""
    if isinstance(schema, dict) and schema.get("maximum") == MAX_ID:
        schema["maximum"] = last
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _bound_ids(inner, last)
