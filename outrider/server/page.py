"""The page at /: files of one folder, by name, under a strict policy."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from outrider.server.problems import Problem

FOLDER = Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
_NAME = re.compile(r"([a-z0-9][a-z0-9_-]*/)?[a-z0-9][a-z0-9_-]*(\.[a-z0-9]+)*\.[a-z0-9]+")


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index() -> Response:
        return file("index.html")

    @router.api_route("/page/{name:path}", methods=["GET", "HEAD"])
    async def named(name: str) -> Response:
        return file(name)

    return router


def file(name: str) -> Response:
    """A file of the page. A name is at most one folder deep and has no dots but before an ending that is known."""
    path = FOLDER / name
    if not _NAME.fullmatch(name) or path.suffix not in TYPES or not path.is_file():
        raise Problem(404, "the page has no such file", code="not_found")
    return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)
