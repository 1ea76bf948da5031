"""The routes of the page at /, and of /docs: static files under a strict content security policy."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from outrider.server.http.errors import APIError

STATIC = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_FILE_NAME = re.compile(r"([a-z0-9][a-z0-9_-]*/)?[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)*\.[a-z0-9]+")


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return page_file("index.html")

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> Response:
        return page_file("docs.html")

    @router.api_route("/favicon.ico", methods=["GET", "HEAD"])
    async def icon() -> Response:
        """What browsers ask for where an answer is no page of ours, and names no icon."""
        return page_file("icon.svg")

    @router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
    async def named(name: str) -> Response:
        return page_file(name)

    return router


def page_file(name: str) -> Response:
    """A file of the page; APIError where the name is not one of its files."""
    path = STATIC / name
    if not _FILE_NAME.fullmatch(name) or path.suffix not in MEDIA_TYPES or not path.is_file():
        raise APIError(404, "the page has no such file", code="not_found")
    return Response(path.read_bytes(), media_type=MEDIA_TYPES[path.suffix], headers=PAGE_HEADERS)
