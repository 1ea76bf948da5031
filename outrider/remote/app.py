"""The application whose requests replicas answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.middleware import Middleware

from outrider.remote.direct_routes import DirectRoutes
from outrider.remote.front import Front
from outrider.remote.metrics import RemoteExporter
from outrider.remote.routes import remote_routes
from outrider.remote.service import RemoteService
from outrider.server.app import assemble_app, make_openapi
from outrider.server.openai.field_types import MAX_TOKEN_ID
from outrider.server.ops.metrics import MetricsCollector
from outrider.server.settings import Settings


def create_remote_app(front: Front, settings: Settings, drafting: dict[str, Any] | None = None) -> FastAPI:
    """The application over replicas. API keys, limits, the page and metrics are as with an engine of its own."""
    metrics = MetricsCollector(front)
    exporter = RemoteExporter(front, metrics, settings.served_name)
    service = RemoteService(front, settings, drafting)
    app = assemble_app(remote_routes(service), metrics, exporter.text, settings, front.lifespan)
    app.user_middleware.append(Middleware(DirectRoutes, service=service))  # after keys and limits, before routing
    app.openapi = lambda: make_openapi(app, settings, MAX_TOKEN_ID + 1)  # only replicas know their vocabulary
    return app
