"""Requests that cannot be: each is told why, in OpenAI's shape, and none is a 5xx."""

from __future__ import annotations

from typing import Any

import pytest
from server_world import Running

from outrider.server.app import create_app
from outrider.server.http.request_middleware import RequestMiddleware

URL = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def problem(answer: Any, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    (error,) = answer.json().values()
    assert sorted(error) == ["code", "message", "param", "type"]
    return error


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "Field required"),
        (b"{", "not JSON"),
        (b"[]", "valid dictionary"),
        (b'{"prompt": NaN}', "NaN"),
        (b'{"prompt": "a", "temperature": Infinity}', "Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "too large"),
        (b'{"prompt": "a", "seed": 99999999999999999999}', "too large"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "too long"),
        (b'{"prompt": "a", "prompt": "b"}', "more than once"),
        (b'{"prompt": "a", "user": {"b": 1, "b": 2}}', "more than once"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "\\udfff": 1}', "surrogate"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "a", "user": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", "nested"),
    ],
)
def test_json_that_cannot_be_meant(served: Running, raw: bytes, says: str):
    answer = served.http.post(URL, content=raw, headers={"content-type": "application/json"})
    assert says in problem(answer)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 1),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", ["a", 1]),
        ("prompt", [-1]),
        ("prompt", [258]),
        ("prompt", [1 << 40]),
        ("prompt", ""),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", 1.5),
        ("n", 0),
        ("n", 129),
        ("n", 1 << 62),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", 1 << 60),
        ("logprobs", 21),
        ("logprobs", True),
        ("stop", ["a"] * 5),
        ("stop", ""),
        ("stop", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"258": 1}),
        ("logit_bias", {"1": 101}),
        ("seed", 1 << 63),
        ("seed", 1.5),
        ("stop_token_ids", [999]),
        ("allowed_token_ids", []),
        ("min_tokens", 99),
        ("best_of", 2),
        ("suffix", "end"),
        ("stream", 1),
        ("echo", "yes"),
        ("prediction", {"type": "content", "content": [{"type": "image_url"}]}),
        ("speculation", {"drafter": "eagle"}),
        ("speculation", {"max_tokens": -1}),
        ("speculation", {"what": 1}),
    ],
)
def test_a_value_out_of_range_is_a_400_that_names_the_field(served: Running, field: str, value: Any):
    error = problem(served.post(URL, **{"prompt": "a", "max_tokens": 4} | {field: value}))
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    if error["param"] is not None:
        assert error["param"].split(".")[0] == field


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": "hi"},
        {"messages": [{"role": "king", "content": "hi"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]},
        CHAT | {"top_logprobs": 2},
        CHAT | {"logprobs": True, "top_logprobs": 21},
        CHAT | {"max_tokens": 0},
        CHAT | {"tool_choice": "required"},
        CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
        CHAT | {"response_format": {"type": "regex", "regex": "("}},
        CHAT | {"response_format": {"type": "xml"}},
    ],
)
def test_a_chat_that_cannot_be(served: Running, body: dict[str, Any]):
    problem(served.post("/v1/chat/completions", **body))


def test_a_prompt_too_long_is_told_both_numbers(served: Running):
    error = problem(served.post(URL, prompt="a" * 300))
    assert error["code"] == "context_length_exceeded"
    assert "256" in error["message"]
    assert "300" in error["message"]
    assert problem(served.post("/v1/chat/completions", messages=[{"role": "user", "content": "a" * 300}]))["code"] == (
        "context_length_exceeded"
    )


def test_more_texts_than_a_request_may_ask_for(served: Running):
    error = problem(served.post(URL, prompt=["a"] * 1024, n=128))
    assert "1024" in error["message"]
    assert "this server takes" in problem(served.post(URL, prompt=["a"] * 300))["message"]


def test_routes_methods_and_models_that_do_not_exist(served: Running):
    assert problem(served.post(URL, prompt="a", model="gpt-4"), 404)["code"] == "model_not_found"
    assert problem(served.http.get("/v1/models/gpt-4"), 404)["code"] == "model_not_found"
    assert served.http.get("/v1/models/toy").json()["id"] == "toy"
    assert problem(served.http.get("/v1/nothing"), 404)["code"] == "not_found"
    assert problem(served.http.get(URL), 405)["code"] == "method_not_allowed"


def test_browsers_that_open_an_answer_find_an_icon(served: Running):
    asked, page = served.http.get("/favicon.ico"), served.http.get("/page/icon.svg")
    assert asked.status_code == 200
    assert asked.headers["content-type"] == page.headers["content-type"] == "image/svg+xml"
    assert asked.content == page.content


@pytest.mark.parametrize(
    "name", ["../settings.py", "..%2fsettings.py", "%2e%2e/app.py", "__init__.py", ".hidden", "a/b/c.js", "%00.js"]
)
def test_the_page_gives_no_file_but_its_own(served: Running, name: str):
    assert served.http.get(f"/page/{name}").status_code == 404


def test_a_field_that_is_not_honoured_is_named(served: Running, serve):
    extra = {"audio": {"voice": "x"}, "store": True, "user": "me", "metadata": {"a": "b"}, "bad\r\nname": 1}
    answer = served.post("/v1/chat/completions", **CHAT | extra | {"service_tier": "auto", "verbosity": "low"})
    assert answer.status_code == 200
    assert answer.headers["x-outrider-ignored"] == "audio, bad??name, store, verbosity"
    streamed = served.post("/v1/chat/completions", **CHAT | {"stream": True, "stream_options": {"colour": 1}})
    assert streamed.headers["x-outrider-ignored"] == "stream_options.colour"
    strict = serve(strict=True)
    assert "audio" in problem(strict.post("/v1/chat/completions", **CHAT | extra))["message"]
    assert strict.post("/v1/chat/completions", **CHAT | {"store": False, "user": "me"}).status_code == 200


def test_a_model_that_says_nan_fails_one_request_alone(serve):
    running = serve()
    running.target.poison = ord("%")
    bad, good = running.post(URL, prompt="%", max_tokens=4), running.post(URL, prompt="a", max_tokens=4)
    assert problem(bad, 500)["code"] == "model_error"
    assert good.status_code == 200
    assert problem(running.post(URL, prompt="a%b", echo=True, logprobs=1, max_tokens=0), 500)["code"] == "model_error"
    with running.http.stream("POST", URL, json={"prompt": "%", "stream": True}) as answer:
        assert answer.status_code == 200
        assert '"code": "model_error"' in answer.read().decode()
    running.llm.engine.check()


def test_the_document_knows_every_route_and_no_422(served: Running):
    document = served.http.get("/openapi.json").json()
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/tokenize",
        "/detokenize",
        "/health",
        "/version",
    } <= set(document["paths"])
    for path in document["paths"].values():
        for operation in path.values():
            assert "422" not in operation["responses"]


def test_requests_are_counted_by_the_routes_of_the_document(served: Running):
    app = create_app(served.engine_thread, served.settings)
    (counting,) = [each for each in app.user_middleware if each.cls is RequestMiddleware]
    assert sorted(counting.kwargs["routes"]) == sorted(app.openapi()["paths"])
