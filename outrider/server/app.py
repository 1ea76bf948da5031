"""The application: routes, errors, the middleware around them, and the OpenAPI document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware

from outrider import __version__
from outrider.server.http.auth import ApiKeys, AuthMiddleware
from outrider.server.http.errors import add_error_handlers
from outrider.server.http.limits import BodyLimit, ConcurrencyLimit, HeaderLimit, HostCheck, HttpLimits, check_origins
from outrider.server.http.request_middleware import RequestMiddleware
from outrider.server.openai.field_types import MAX_TOKEN_ID
from outrider.server.ops.metrics import MetricsCollector
from outrider.server.ops.prometheus import PROMETHEUS_TEXT, PrometheusExporter
from outrider.server.ops.request_record import record_body
from outrider.server.ops.tracing import connect_tracer
from outrider.server.queue.engine_thread import EngineThread
from outrider.server.routes import ERROR_RESPONSES, routes
from outrider.server.service import Service
from outrider.server.settings import Settings
from outrider.server.web.page import page_routes

MetricsText = Callable[[], Awaitable[bytes]]
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(engine_thread: EngineThread, settings: Settings) -> FastAPI:
    """The application for an engine of this process. The caller starts the engine's thread."""
    metrics = MetricsCollector(engine_thread)
    exporter = PrometheusExporter(engine_thread, metrics, settings.served_name)

    async def text() -> bytes:
        return exporter.text()

    def vocab_size() -> int | None:
        return engine_thread.engine.facts.vocab_size if engine_thread.state == "ready" else None

    app = assemble_app(routes(Service(engine_thread, settings)), metrics, text, settings)
    app.openapi = lambda: make_openapi(app, settings, vocab_size())
    return app


def assemble_app(
    router: APIRouter,
    metrics: MetricsCollector,
    text: MetricsText,
    settings: Settings,
    lifespan: Lifespan | None = None,
) -> FastAPI:
    """The application around the API's routes: error handlers, the page, /metrics with `text`, and the middleware."""
    # no redirects: behind a proxy they would point at http, and a client would send its key unencrypted
    app = FastAPI(
        title="Outrider",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    add_error_handlers(app)
    app.include_router(router)
    app.include_router(page_routes())
    _add_metrics_route(app, text)
    documented = [route for route in (*router.routes, *app.routes) if isinstance(route, APIRoute)]
    paths = [route.path_format for route in documented if route.include_in_schema]
    _add_middleware(app, metrics, settings, paths)
    return app


def http_limits(settings: Settings) -> HttpLimits:
    buffered = max(HttpLimits().max_buffered, 4 * settings.max_body)
    return HttpLimits(max_body=settings.max_body, body_seconds=settings.body_timeout, max_buffered=buffered)


def _add_middleware(app: FastAPI, metrics: MetricsCollector, settings: Settings, paths: list[str]) -> None:
    """paths: the paths in the OpenAPI document. The middleware added last sees a request first."""
    limits = http_limits(settings)
    tracer = connect_tracer(settings.otlp_endpoint, settings.served_name) if settings.otlp_endpoint else None
    app.add_middleware(BodyLimit, limits=limits, on_body=record_body if settings.log_prompts else None)
    app.add_middleware(AuthMiddleware, keys=ApiKeys(settings.api_keys))
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=check_origins(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            allow_credentials=False,
            expose_headers=["X-Request-Id", "Retry-After", "X-Outrider-Ignored"],
        )
    app.add_middleware(HeaderLimit, limits=limits)
    app.add_middleware(HostCheck, hosts=(settings.host, *settings.allow_hosts))
    app.add_middleware(ConcurrencyLimit, limits=limits)
    start_fields = {
        "model": settings.served_name,
        "host": settings.host,
        "port": settings.port,
        "keys": len(settings.api_keys),
    }
    app.add_middleware(RequestMiddleware, routes=paths, metrics=metrics, tracer=tracer, start_fields=start_fields)


def _add_metrics_route(app: FastAPI, make_text: MetricsText) -> None:
    async def metrics() -> Response:
        """The server's metrics in Prometheus' text format."""
        return Response(await make_text(), headers={"content-type": PROMETHEUS_TEXT})

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    responses = ERROR_RESPONSES | {200: text}
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response, responses=responses)


def make_openapi(app: FastAPI, settings: Settings, vocab_size: int | None) -> dict[str, Any]:
    """The OpenAPI document of this server: it names the one model, bounds token ids, and leaves out FastAPI's 422.

    The document is cached once the vocabulary is known.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    schemas: dict[str, Any] = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest", "TokenizeRequest", "DetokenizeRequest"):
        served = {"anyOf": [{"const": settings.served_name}, {"type": "null"}], "title": "Model"}
        schemas[name]["properties"]["model"] = served
    if vocab_size is not None:
        for name in ("CompletionRequest", "ChatRequest", "ResponsesRequest", "DetokenizeRequest"):
            _bound_ids(schemas[name], vocab_size - 1)
        app.openapi_schema = document
    return document


def _bound_ids(schema: Any, last: int) -> None:
    """Write the last id of the vocabulary wherever a schema bounds token ids."""
    if isinstance(schema, dict) and schema.get("maximum") == MAX_TOKEN_ID:
        schema["maximum"] = last
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _bound_ids(inner, last)
