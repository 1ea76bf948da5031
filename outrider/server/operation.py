"""What stands around the routes, put in place: request ids, keys, limits, metrics, logs and traces."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware

from outrider.server.auth import Auth, Keys
from outrider.server.envelope import Envelope
from outrider.server.exposition import CONTENT_TYPE, Exposition
from outrider.server.limits import BodyLimit, HeaderLimit, HostCheck, HttpLimits, OpenLimit, check_origins
from outrider.server.metrics import Metrics
from outrider.server.protocol import bounded_protocol
from outrider.server.record import note_body
from outrider.server.routes import ERRORS
from outrider.server.settings import Settings
from outrider.server.telemetry import connect
from outrider.server.worker import Worker


def install(app: FastAPI, worker: Worker, settings: Settings) -> None:
    """Called last by `create_app`, when every route stands. The last middleware added is the first to be asked."""
    limits = http_limits(settings)
    metrics = Metrics(worker)
    _add_metrics_route(app, Exposition(worker, metrics, settings.served_name))
    telemetry = connect(settings.otlp_endpoint, settings.served_name) if settings.otlp_endpoint else None
    app.add_middleware(BodyLimit, limits=limits, note=note_body if settings.log_prompts else None)
    app.add_middleware(Auth, keys=Keys(settings.api_keys))
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
    app.add_middleware(OpenLimit, limits=limits)
    about = {
        "model": settings.served_name,
        "host": settings.host,
        "port": settings.port,
        "keys": len(settings.api_keys),
    }
    app.add_middleware(Envelope, routes=app.openapi()["paths"], metrics=metrics, telemetry=telemetry, about=about)


def http_limits(settings: Settings) -> HttpLimits:
    held = max(HttpLimits().max_held, 4 * settings.max_body)
    return HttpLimits(max_body=settings.max_body, body_seconds=settings.body_timeout, max_held=held)


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """What `uvicorn.Config` is to be given beside the app and the address."""
    return {
        "http": bounded_protocol(http_limits(settings)),
        "ws": "none",
        "access_log": False,
        "log_config": None,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": 30,
    }


def _add_metrics_route(app: FastAPI, exposition: Exposition) -> None:
    async def metrics() -> Response:
        """The server's figures, as Prometheus reads them."""
        return Response(exposition.text(), headers={"content-type": CONTENT_TYPE})

    text = {"content": {"text/plain": {"schema": {"type": "string"}}}}
    app.add_api_route("/metrics", metrics, methods=["GET"], response_class=Response, responses=ERRORS | {200: text})
