"""API keys, and the name of each client in queues, caches and logs."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.http.asgi import header_values, send_error
from outrider.server.http.errors import APIError

PUBLIC_PATHS = frozenset({"/", "/docs", "/favicon.ico", "/health"})
PAGE_PREFIX = "/page/"

NO_KEY = "this server needs an API key: send it as 'Authorization: Bearer <key>'"
WRONG_KEY = "the API key is not one of this server's"


class ApiKeys:
    """The server's API keys, held only as SHA-256 digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def client(self, offered: bytes) -> str | None:
        """The short name of the client with this key; None where the key is unknown.

        Every key is compared in constant time, so that the time taken reveals nothing.
        """
        digest, found = _digest(offered), b""
        for known in self._digests:
            same = hmac.compare_digest(digest, known)
            found = known if same else found
        return f"key-{_digest(b'client ' + found).hex()[:12]}" if found else None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def is_public(scope: Scope) -> bool:
    """Whether a request needs no key: /health and the files of the pages, which reveal nothing of the model.

    Decided by scope["path"], which the router matches too; never by a URL that a malformed Host header changes.
    """
    path: str = scope["path"]
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return path in PUBLIC_PATHS or (path.startswith(PAGE_PREFIX) and ".." not in path)


class AuthMiddleware:
    """Refuses requests without a valid key, and sets scope["state"]["client"] to the client's name.

    Without keys every request is let in, and a client's name is its address.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["client"] = client_address(scope)
        if len(self.keys):
            error = self._identify(scope)
            if error is not None and not is_public(scope):
                return await send_error(scope, receive, send, error)
        return await self.app(scope, receive, send)

    def _identify(self, scope: Scope) -> APIError | None:
        """Set the client's name by its key; returns an error where the key is missing or wrong."""
        offered = header_values(scope, b"authorization")
        if len(offered) != 1:
            return _unauthorized(NO_KEY, "missing_api_key")
        scheme, _, key = offered[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return _unauthorized(NO_KEY, "missing_api_key")
        client = self.keys.client(key.strip(b" "))
        if client is None:
            return _unauthorized(WRONG_KEY, "invalid_api_key")
        scope["state"]["client"] = client
        return None


def _unauthorized(message: str, code: str) -> APIError:
    return APIError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def client_address(scope: Scope) -> str:
    peer = scope.get("client")
    return peer[0] if peer else "unknown"
