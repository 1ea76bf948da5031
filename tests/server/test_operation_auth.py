"""Keys: every route the app has needs one, but for those that may load without; and which key is told by nothing."""

from __future__ import annotations

import hmac
from collections.abc import Iterator

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from operation_world import KEY, OTHER_KEY, Running, exchange, post, serving

from outrider.server.http import auth
from outrider.server.http.auth import ApiKeys

OPEN = {"/", "/docs", "/favicon.ico", "/health", "/page/{name:path}"}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as made:
        yield made


def walk(running: Running) -> list[tuple[str, str]]:
    """(method, path) of every route the app answers on, found by asking the app."""
    found = []
    for route in iter_route_contexts(running.app.routes):
        found += [(method, str(route.path)) for method in route.methods or {"GET"}]
    return sorted(found)


def at(path: str) -> str:
    """A path that the route matches."""
    return path.replace("{name:path}", "toy")


def ask(client: httpx.Client, method: str, path: str) -> httpx.Response:
    headers = {"Content-Type": "application/json"} if method == "POST" else {}
    return client.request(method, at(path), headers=headers, content=b"{}" if method == "POST" else None)


def test_every_route_but_health_and_the_page_needs_a_key(running: Running):
    routes = walk(running)
    assert {"/health", "/metrics", "/openapi.json", "/v1/models", "/v1/chat/completions", "/tokenize"} <= {
        path for _, path in routes
    }
    with running.client(None) as none, running.client("sk-outrider-test-kez") as wrong, running.client() as right:
        for method, path in routes:
            expected = path not in OPEN
            for client in (none, wrong):
                answer = ask(client, method, path)
                assert (answer.status_code == 401) == expected, (method, path, answer.status_code)
                if expected and method != "HEAD":
                    assert answer.json()["error"]["type"] == "authentication_error"
                    assert answer.headers["www-authenticate"] == "Bearer"
            assert ask(right, method, path).status_code != 401, (method, path)


def test_a_path_that_only_looks_open_needs_a_key(running: Running):
    for path in ("/health/", "//health", "/health/../v1/models", "/page/../v1/models", "/HEALTH", "/health%2f"):
        request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        assert exchange(running, request)[0] == 401, path
    assert exchange(running, b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")[0] == 401


@pytest.mark.parametrize("host", ["localhost/health?", "localhost/health#", "/health", "localhost@evil/health"])
def test_a_malformed_host_opens_no_route(running: Running, host: str):
    """Starlette's request.url is made from the Host header; authorising by it would open every route."""
    status, body = exchange(running, f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert status == 400
    assert b"toy" not in body


def test_either_key_opens_the_door_and_each_goes_by_a_name_of_its_own(running: Running):
    names = {}
    for key in (KEY, OTHER_KEY):
        with running.client(key) as client:
            answer = client.get("/v1/models")
            assert answer.status_code == 200
            asked = answer.headers["x-request-id"]
        names[key] = running.heard.of(asked)["client"]
        assert key not in running.heard.text
    assert names[KEY] != names[OTHER_KEY]
    assert all(name.startswith("key-") and len(name) == 16 for name in names.values())


def test_the_scheme_is_bearer_in_any_case_and_the_header_comes_once(running: Running):
    for value, status in (
        (f"bearer {KEY}", 200),
        (f"BEARER {KEY}", 200),
        (f"Basic {KEY}", 401),
        (KEY, 401),
        ("Bearer", 401),
        ("Bearer ", 401),
        (f"Bearer {KEY} x", 401),
        (f"Bearer {KEY}\xe9", 401),
    ):
        request = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: {value}\r\n\r\n".encode("latin-1")
        assert exchange(running, request)[0] == status, value
    twice = post(b"{}", f"Authorization: Bearer {OTHER_KEY}")
    assert exchange(running, twice)[0] == 401


def test_no_key_is_kept_and_every_key_is_compared(monkeypatch: pytest.MonkeyPatch):
    keys = ApiKeys(["first-key-1", "second-key-2", "third-key-3"])
    assert "first-key-1" not in repr(vars(keys))
    compared = 0

    def counting(one: bytes, other: bytes) -> bool:
        nonlocal compared
        compared += 1
        return hmac.compare_digest(one, other)

    monkeypatch.setattr(auth, "hmac", type("Counting", (), {"compare_digest": staticmethod(counting)}))
    for offered in (b"first-key-1", b"third-key-3", b"none-of-them", b""):
        compared = 0
        keys.client(offered)
        assert compared == 3
    assert keys.client(b"none-of-them") is None
    assert keys.client(b"first-key-1") == ApiKeys(["first-key-1"]).client(b"first-key-1")


def test_without_keys_a_client_goes_by_its_address():
    with serving(api_keys=()) as running, running.client(None) as client:
        asked = client.get("/v1/models").headers["x-request-id"]
        assert running.heard.of(asked)["client"] == "127.0.0.1"
