"""Requests that go past FastAPI's routing are answered as the routes answer them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from remote_world import FakeServer, RemoteRunning, running_world, start_remote
from starlette.types import ASGIApp, Receive, Scope, Send

import outrider.remote.app

USER = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}


class Routed:
    """Leaves all requests to the routes."""

    def __init__(self, app: ASGIApp, service: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def both():
    made = running_world()
    direct = next(made)()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outrider.remote.app, "DirectRoutes", Routed)
        routed = start_remote(FakeServer(direct.fake))
    yield direct, routed
    routed.stop()
    next(made, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": USER, "max_tokens": 3}),
        ("/v1/chat/completions", {"messages": USER, "stream": True, "nonsense": 1}),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/v1/completions", {"prompt": "long " * 20_000}),
        ("/v1/responses", {"input": "a", "stream": True}),
        ("/v1/completions", {"prompt": "a", "model": "another"}),
        ("/v1/completions", {"prompt": "a", "best_of": 3}),
        ("/v1/completions", {"prompt": "a", "n": 1000}),
        ("/v1/completions", {"prompt": "a", "typical_p": 0.5}),
        ("/v1/completions", {"temperature": 1}),
        ("/v1/completions", []),
        ("/v1/completions", None),
        ("/v1/chat/completions", {"messages": [{"role": "nobody"}]}),
        ("/v1/responses", {"input": "a", "store": True}),
    ],
)
def test_answers_are_the_routes(both: tuple[RemoteRunning, RemoteRunning], path: str, body: Any):
    asked = both[0].fake.bodies
    answers = [each.http.post(path, content=json.dumps(body), headers=JSON) for each in both]
    ids = ("x-request-id", "date", "content-length")
    direct, routed = (
        (answer.status_code, answer.text, {k: v for k, v in answer.headers.items() if k not in ids})
        for answer in answers
    )
    assert direct == routed
    assert direct[0] >= 400 or asked[-1] == asked[-2]


@pytest.mark.parametrize("content", [b"", b"{", b'{"prompt": "a", "prompt": "b"}', b'{"prompt": NaN}', b"\xff"])
def test_what_is_no_json(both: tuple[RemoteRunning, RemoteRunning], content: bytes):
    direct, routed = (each.http.post("/v1/completions", content=content, headers=JSON) for each in both)
    assert (direct.status_code, direct.text) == (routed.status_code, routed.text)
    assert direct.status_code == 400


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/nothing"])
def test_other_paths_and_methods(both: tuple[RemoteRunning, RemoteRunning], path: str):
    direct, routed = (each.http.post(path, json={"prompt": "a"}) for each in both)
    assert (direct.status_code, direct.text) == (routed.status_code, routed.text)
    assert [each.http.get("/v1/completions").status_code for each in both] == [405, 405]
