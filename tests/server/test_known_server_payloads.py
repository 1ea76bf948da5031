"""Requests that brought other servers down or told too much, each against ours: refused, alone, and nothing leaks.

Named by the advisories that the payloads come from.
"""

from __future__ import annotations

import http.server
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from client_world import Serve
from server_world import VOCAB, Running, until

from outrider.server.run import listen
from outrider.server.settings import Settings

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: dict[str, dict[str, Any]] = {
    COMPLETE: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": MESSAGES, "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
LEAKS = re.compile(r"0x[0-9a-f]{6,}|Traceback|site-packages|outrider/|\.py\b|object at")


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, in OpenAI's shape, which tells nothing of the server's inside (CVE-2026-22778)."""
    assert answer.status_code == status, answer.text[:500]
    (error,) = answer.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.content) < 2000
    assert not LEAKS.search(answer.text)
    return error


@pytest.fixture(autouse=True)
def still_there(served: Running) -> Iterator[None]:
    """After each payload the next request is answered, and no page is held."""
    yield
    assert served.post(COMPLETE, prompt="a", max_tokens=2).status_code == 200
    until(lambda: served.engine_thread.snapshot().pages_used == 0)
    served.llm.engine.check()


BIG = (129, 16385, 1 << 31, 1 << 53, 1 << 62, (1 << 63), (1 << 64) - 1, 10**30)


@pytest.mark.parametrize("field", ["n", "best_of"])
@pytest.mark.parametrize("value", BIG)
def test_a_giant_number_of_choices(served: Running, field: str, value: int):
    """CVE-2026-34756: refused by the schema, before anything is made of it."""
    refused(served.post(COMPLETE, prompt="a", **{field: value}))


@pytest.mark.parametrize(
    "field", ["max_tokens", "n", "best_of", "min_tokens", "logprobs", "top_logprobs", "max_completion_tokens", "top_k"]
)
@pytest.mark.parametrize("value", [-2, -(1 << 31), -(1 << 63), 1 << 62])
def test_a_number_out_of_bounds(served: Running, field: str, value: int):
    """CVE-2026-21869: a negative count is never computed with."""
    path = CHAT if field in ("top_logprobs", "max_completion_tokens") else COMPLETE
    assert refused(served.post(path, **ROUTES[path] | {field: value}))["param"] == field


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 1, 1 << 30, (1 << 31) - 1, 1 << 31, 1 << 40, -1])
@pytest.mark.parametrize("field", ["prompt", "stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"])
def test_an_id_outside_the_vocabulary(served: Running, field: str, token: int):
    """CVE-2026-54234: one bad id killed an engine that others shared."""
    value = {str(token): 1.0} if field == "logit_bias" else [token]
    refused(served.post(COMPLETE, **ROUTES[COMPLETE] | {field: value}))


def test_an_id_outside_the_vocabulary_is_no_text(served: Running):
    answer = served.post("/detokenize", tokens=[104, VOCAB, (1 << 31) - 1, 105])
    assert answer.status_code == 400 or answer.json() == {"prompt": "hi"}
    refused(served.post("/detokenize", tokens=[1 << 31]))


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_a_template_from_a_client_is_refused(served: Running, path: str):
    """CVE-2025-61620, CVE-2026-5760, CVE-2024-34359: it is neither run nor ignored."""
    bomb = "{% for a in range(10**9) %}{{ ''.__class__.__mro__ }}{% endfor %}"
    assert refused(served.post(path, messages=MESSAGES, chat_template=bomb))["param"] == "chat_template"


def test_tensors_from_a_client_are_refused(served: Running):
    """CVE-2025-62164: they would have to be unpickled."""
    assert refused(served.post(COMPLETE, prompt="a", prompt_embeds="gASVAA=="))["param"] == "prompt_embeds"
    refused(served.post(COMPLETE, prompt_embeds="gASVAA=="))


@pytest.fixture
def canary() -> Iterator[tuple[str, list[str]]]:
    """A web server that nobody should call, and the paths it was called with."""
    called: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            called.append(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name for it
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", called
    server.shutdown()
    server.server_close()


def test_no_address_is_ever_fetched(served: Running, canary: tuple[str, list[str]]):
    """CVE-2025-6242, -2026-24779, -34753, -73560: pictures, sound, files and schemas by address."""
    url, called = canary
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": f"{url}/image"}},
        {"type": "input_image", "image_url": f"{url}/input"},
        {"type": "audio_url", "audio_url": {"url": f"{url}/audio"}},
        {"type": "video_url", "video_url": {"url": f"{url}/video"}},
        {"type": "file", "file": {"file_url": f"{url}/file"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    ]
    for part in parts:
        refused(served.post(CHAT, messages=[{"role": "user", "content": [part]}], max_tokens=1))
    for schema in ({"$ref": f"{url}/ref"}, {"$schema": f"{url}/meta", "$ref": f"{url}/ref"}):
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        refused(served.post(CHAT, messages=MESSAGES, response_format=form, max_tokens=1))
    text = [{"type": "text", "text": f"see {url}/text"}]
    assert served.post(CHAT, messages=[{"role": "user", "content": text}], max_tokens=1).status_code == 200
    assert called == []
    assert httpx.get(f"{url}/heard").status_code == 404  # it would have heard
    assert called == ["/heard"]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


SCHEMAS: list[Any] = [
    {"type": "nonsense"},
    {"type": ["object", 7]},
    {"$ref": "#/$defs/missing"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(?=a)b"},
    {"type": "string", "pattern": "\\1(a)"},
    {"type": "string", "minLength": 10, "maxLength": 1},
    {"type": "integer", "minimum": 5, "maximum": 1},
    {"enum": []},
    {"allOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
    {"type": "string", "minLength": 10**9},
    {"anyOf": [{"const": i} for i in range(3000)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}},
    deep(25),
    False,
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema)[:40])
def test_a_schema_that_cannot_be_hurts_nobody(served: Running, schema: Any):
    """CVE-2025-48942, CVE-2025-57809: refused, or served; never a fault."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    answer = served.post(CHAT, messages=MESSAGES, response_format=form, max_tokens=2)
    if answer.status_code != 200:
        refused(answer)


PATTERNS = [
    "(a+)+$",
    "(x+x+)+y",
    "((a|a)*)*b",
    "(.*a){12}",
    "(a{1,500}){1,500}",
    "((a{1,100}){1,100}){1,100}",
    "a{1000000}",
    "(" * 200 + "a" + ")" * 200,
    "[" + "a-z" * 5000 + "]",
    "|".join(f"word{i}" for i in range(2000)),
    "(?P<a>b)(?P=a)",
    "\\p{Nonsense}",
    "a" * 200_000,
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:20])
def test_a_pattern_made_to_be_slow_hurts_nobody(served: Running, pattern: str):
    """CVE-2026-55574, CVE-2025-58446: within the client's patience, and others are answered meanwhile."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        body = {"messages": MESSAGES, "max_tokens": 2, "response_format": {"type": "regex", "regex": pattern}}
        answers.append(httpx.post(f"{served.url}{CHAT}", json=body, timeout=20))

    thread = threading.Thread(target=ask)
    thread.start()
    assert served.post(COMPLETE, prompt="a", max_tokens=2).status_code == 200
    thread.join(25)
    (answer,) = answers
    if answer.status_code != 200:
        refused(answer)


@pytest.mark.parametrize("path", list(ROUTES))
@pytest.mark.parametrize(
    "raw",
    [
        b'{"seed": NaN}',
        b'{"seed": -Infinity}',
        b'{"a": 1, "a": 2}',
        b'{"a": "\xff\xfe"}',
        b'{"a": "\\ud83d"}',
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a": 1' + b"0" * 5000 + b"}",
        b"[" * 100,
        b"null",
        b"\xef\xbb\xbf{}",
        b"",
    ],
    ids=lambda raw: raw[:16].hex(),
)
def test_json_that_cannot_be_meant_on_every_route(served: Running, path: str, raw: bytes):
    """CVE-2026-54236: the fix of one router had missed another; here one place reads them all."""
    refused(served.http.post(path, content=raw, headers={"content-type": "application/json"}))


def test_megabytes_of_stop_strings(served: Running):
    refused(served.post(COMPLETE, prompt="a", stop=["x" * (10 << 20)]), 413)
    refused(served.post(COMPLETE, prompt="a", stop=["x" * (1 << 20)] * 4))
    refused(served.post(COMPLETE, prompt="a", stop=["x"] * 500_000))
    assert served.post(COMPLETE, prompt="a", stop=["x" * 1024] * 4, max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    "given",
    [
        {"repetition_penalty": 5e-324},
        {"temperature": 5e-324},
        {"top_p": 5e-324},
        {"typical_p": 5e-324},
        {"min_p": 1.0, "temperature": 100},
        {"presence_penalty": -2.0, "frequency_penalty": -2.0, "repetition_penalty": 100.0},
        {"allowed_token_ids": [65], "banned_token_ids": [65]},
        {"logit_bias": {str(token): -100 for token in range(VOCAB)}},
    ],
    ids=lambda given: ",".join(given),
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_at_the_edge_are_no_fault_of_the_server(served: Running, given: dict[str, Any], temperature: float):
    """A request whose own options leave no token to choose is a bad request, not a broken model."""
    answer = served.post(COMPLETE, **{"prompt": "aa", "max_tokens": 4, "temperature": temperature} | given)
    if answer.status_code != 200:
        refused(answer)


def test_a_field_name_is_never_sent_back_at_length(serve: Serve):
    running = serve(strict=True)
    refused(running.post(COMPLETE, prompt="a", **{"x" * 100_000: 1}))
    refused(running.post(COMPLETE, prompt="a", model="m" * 1000), 404)


def test_short_answers_do_not_wait_for_an_acknowledgement():
    """Without TCP_NODELAY every short answer came 40 ms late: its body waited behind its headers."""
    with (
        listen(Settings(served_name="a", port=0)) as listening,
        socket.create_connection(listening.getsockname()),
        listening.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
