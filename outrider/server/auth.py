"""Who is asking: API keys, and the name a client goes by in queues, caches, metrics and logs."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.asgi import headers_named, refuse
from outrider.server.problems import Problem

OPEN_PATHS = frozenset({"/", "/health"})
PAGE = "/page/"

NO_KEY = "this server needs an API key: send it as 'Authorization: Bearer <key>'"
WRONG_KEY = "the API key is not one of this server's"


class Keys:
    """The server's API keys, held only as SHA-256 digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def client(self, offered: bytes) -> str | None:
        """The short name of the client with this key; None where it is not one of ours.

        Every key is compared, each in constant time, so that the time taken tells
        neither whether nor which.
        """
        digest, found = _digest(offered), b""
        for known in self._digests:
            same = hmac.compare_digest(digest, known)
            found = known if same else found
        return f"key-{_digest(b'client ' + found).hex()[:12]}" if found else None


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).digest()


def needs_no_key(scope: Scope) -> bool:
    """/health, and the page's own files: nothing that answers for the model.

    Judged by scope["path"], which the router matches too; never by a URL that a
    malformed Host header could change.
    """
    path: str = scope["path"]
    if scope["method"] not in ("GET", "HEAD"):
        return False
    return path in OPEN_PATHS or (path.startswith(PAGE) and ".." not in path)


class Auth:
    """Lets in who has a key, and puts the client's name in scope["state"]["client"].

    With no keys set everyone may ask, and a client goes by its address.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["client"] = address_of(scope)
        if len(self.keys):
            why = self._identify(scope)
            if why is not None and not needs_no_key(scope):
                return await refuse(scope, receive, send, why)
        return await self.app(scope, receive, send)

    def _identify(self, scope: Scope) -> Problem | None:
        """Name the client by its key; a refusal where there is none or a wrong one."""
        offered = headers_named(scope, b"authorization")
        if len(offered) != 1:
            return _unknown(NO_KEY, "missing_api_key")
        scheme, _, key = offered[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return _unknown(NO_KEY, "missing_api_key")
        client = self.keys.client(key.strip(b" "))
        if client is None:
            return _unknown(WRONG_KEY, "invalid_api_key")
        scope["state"]["client"] = client
        return None


def _unknown(message: str, code: str) -> Problem:
    return Problem(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def address_of(scope: Scope) -> str:
    peer = scope.get("client")
    return peer[0] if peer else "unknown"
