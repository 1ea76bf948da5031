"""What an attacker, or a demanding client, tried on the finished server; each of these once went wrong."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from operation_world import KEY, exchange, post, read_answer, serving
from server_world import Running, ToyWriter, make_tokenizer, until

from outrider.core.errors import ConfigError
from outrider.grammar import GrammarSpec, compile_constraint
from outrider.server import app, run
from outrider.server.http import protocol
from outrider.server.http.body import MAX_JSON_VALUES, parse_json
from outrider.server.http.errors import APIError
from outrider.server.http.limits import MAX_BRACKETS, SMALL_BODY, BodyLimit, HttpLimits, nesting_exceeds
from outrider.server.run import MIN_OPEN_FILES, raise_file_limit
from outrider.server.settings import Settings

Serve = Callable[..., Running]
CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


# how many at once


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> Running:
    """A server that answers two requests at a time, and has its model's gate closed."""
    for module in (app, run):
        monkeypatch.setattr(module, "http_limits", lambda _: HttpLimits(max_concurrent=2))
    target = ToyWriter()
    running = serve(target)
    target.gate.clear()
    return running


def test_open_requests_are_bounded_and_health_is_not(two_at_once: Running):
    running = two_at_once
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(running.post, COMPLETE, prompt="a", max_tokens=2, seed=i) for i in range(2)]
        until(lambda: len(running.engine_thread._jobs) == 2)
        refused = running.post(COMPLETE, prompt="a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_busy")
        assert int(refused.headers["retry-after"]) > 0
        assert running.http.get("/v1/models").status_code == 503
        assert running.http.get("/health").json() == {"status": "ready"}
        running.target.gate.set()
        assert [each.result().status_code for each in first] == [200, 200]
    assert running.post(COMPLETE, prompt="a", max_tokens=2).status_code == 200


def test_an_idle_connection_gives_way_to_a_new_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 0.0)
    with serving(protocol=HttpLimits(max_concurrent=3)) as running:
        idle = [running.socket() for _ in range(3)]
        for sock in idle:  # each is known to the server before the next comes
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_answer(sock)[0] == 200
        with running.client() as client:
            assert client.get("/v1/models").status_code == 200
            assert gone(idle[0])
            for sock in idle[1:]:
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert read_answer(sock)[0] == 200
        for sock in idle:
            sock.close()


def gone(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_in_use_are_kept_and_those_beyond_twice_as_many_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "IDLE_SECONDS", 1000.0)
    with serving(protocol=HttpLimits(max_concurrent=2, header_seconds=1000)) as running:
        kept: list[socket.socket] = []
        for _ in range(4):
            kept.append(running.socket())
            kept[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_answer(kept[-1])[0] == 200
        with running.socket() as fifth:
            assert gone(fifth)
        kept[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(kept[0])[0] == 200
        for sock in kept:
            sock.close()


def test_open_files_are_allowed_for_as_many_connections():
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < MIN_OPEN_FILES:
        pytest.skip("this machine allows no more files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (MIN_OPEN_FILES // 2, before[1]))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == MIN_OPEN_FILES
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_large_bodies_share_a_bounded_room_and_small_ones_need_none():
    limits = HttpLimits(max_buffered=3 * SMALL_BODY)
    holding, release = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        holding.set()
        await release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    limit = BodyLimit(app, limits)

    async def ask(size: int) -> int:
        statuses: list[int] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"1" * size, "more_body": False}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % size)]
        await limit({"type": "http", "method": "POST", "headers": headers}, receive, send)
        return statuses[0]

    async def all_of_it() -> None:
        first = asyncio.create_task(ask(2 * SMALL_BODY))
        await holding.wait()
        assert limit.buffered == 2 * SMALL_BODY
        assert await ask(2 * SMALL_BODY) == 503
        assert limit.buffered == 2 * SMALL_BODY
        small = asyncio.create_task(ask(SMALL_BODY))
        release.set()
        assert (await first, await small) == (200, 200)
        assert limit.buffered == 0
        assert await ask(2 * SMALL_BODY) == 200

    asyncio.run(all_of_it())


def test_one_client_cannot_fill_the_queue_for_another(serve: Serve):
    target = ToyWriter()
    running = serve(target, max_batch=1, max_queue=3, api_keys=("first-key", "second-key"))
    target.gate.clear()

    def ask(key: str, n: int) -> httpx.Response:
        body = {"prompt": "a", "max_tokens": 2, "n": n}
        return httpx.post(running.url + COMPLETE, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=20)

    with ThreadPoolExecutor(4) as pool:
        greedy = pool.submit(ask, "first-key", 4)
        until(lambda: running.engine_thread.snapshot().waiting == 3)
        assert ask("first-key", 1).status_code == 429
        assert ask("second-key", 3).status_code == 429  # more than its share, which is two
        modest = pool.submit(ask, "second-key", 2)
        until(lambda: running.engine_thread.snapshot().waiting == 5)
        assert ask("second-key", 1).status_code == 429
        target.gate.set()
        assert [each.result().status_code for each in (greedy, modest)] == [200, 200]


# bodies that take long to read


def test_a_body_of_many_brackets_is_refused_unread():
    assert nesting_exceeds(b"[" + b"[]," * MAX_BRACKETS + b"[]]", 64)
    assert not nesting_exceeds(b"[" + b"[]," * (MAX_BRACKETS - 2) + b"[]]", 64)
    assert not nesting_exceeds(b'{"a": "' + b"[{" * MAX_BRACKETS + b'"}', 64)


def test_a_body_of_too_many_values_is_refused():
    with pytest.raises(APIError, match=str(MAX_JSON_VALUES)):
        parse_json(b"[" + b"1," * MAX_JSON_VALUES + b"1]")
    assert len(parse_json(b"[" + b"1," * (MAX_JSON_VALUES - 2) + b"1]")) == MAX_JSON_VALUES - 1


def test_a_large_body_is_read_beside_the_event_loop(served: Running, monkeypatch: pytest.MonkeyPatch):
    threads: list[str] = []

    def noting(raw: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return parse_json(raw)

    monkeypatch.setattr("outrider.server.http.body.parse_json", noting)
    for size in (10, 200_000):
        assert served.post("/tokenize", prompt="a" * size).json()["count"] == size
    assert threads[0] == served.thread.name
    assert threads[1] != served.thread.name


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "logit_bias": {str(i): 1000 for i in range(5000)}}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "x"}] * 5000}]}),
        (CHAT, {"messages": [{"role": "x"}] * 4000}),
    ],
)
def test_a_wrong_list_is_not_gone_through_to_its_end(
    served: Running, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
):
    """An error for each of half a million entries took the event loop five seconds."""
    found: list[int] = []
    known = "outrider.server.http.errors._validation_error"
    from outrider.server.http.errors import _validation_error

    def counting(error: Any) -> APIError:
        found.append(len(error.errors()))
        return _validation_error(error)

    monkeypatch.setattr(known, counting)
    assert served.post(path, **body).status_code == 400
    assert found[0] < 10


# grammars that take for ever


def abc(count: int) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": f"^(a|b|c)*[a-z]{{{i}}}"} for i in range(1, count + 1)]


def ref_chain(count: int) -> dict[str, Any]:
    parts = {f"s{i}": {"$ref": f"#/far/away/s{i + 1}"} | each for i, each in enumerate(abc(count))}
    return {"$ref": "#/far/away/s0", "far": {"away": parts | {f"s{count}": {"type": "string"}}}}


def nested(count: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    for each in abc(count):
        made = each | {"anyOf": [made]}
    return made


LARK_AND = "start: X\nX: " + " & ".join(f"/{each['pattern'].strip('^')}/" for each in abc(30))
LARK_JSON = "start: %json " + json.dumps({"allOf": abc(30)}).replace("allOf", "all\\u004ff")


@pytest.mark.parametrize(
    "given",
    [
        *(
            {"type": "json_schema", "json_schema": {"schema": s}}
            for s in ({"allOf": abc(30)}, ref_chain(30), nested(30))
        ),
        {"type": "grammar", "grammar": LARK_AND},
        {"type": "grammar", "grammar": LARK_JSON},
    ],
)
def test_patterns_combined_by_the_dozen_are_refused_before_compiling(
    served: Running, monkeypatch: pytest.MonkeyPatch, given: Any
):
    """Thirty of them, in 2 KB, took gigabytes and minutes in each of the four threads there are for all clients."""
    monkeypatch.setattr("outrider.grammar.compile._compile", lambda *_: pytest.fail("it was compiled"))
    answer = served.post(CHAT, messages=HELLO, max_tokens=2, response_format=given)
    assert answer.status_code == 400
    assert "at most 12" in answer.json()["error"]["message"]


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_short_pattern_cannot_take_much_memory():
    """These 15 characters took 165 MB for as long as the grammar was kept."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    tokenizer = make_tokenizer()
    kept = [compile_constraint(GrammarSpec.regex("b"), tokenizer)]
    before = resident()
    kept.append(compile_constraint(GrammarSpec.regex("(a{1000}){1000}"), tokenizer))
    assert resident() - before < 90 << 20


def test_patterns_that_each_stand_alone_are_not_counted(served: Running):
    properties = {f"p{i}": {"type": "string", "pattern": "^[ab]{2}$"} for i in range(30)} | {
        "pattern": {"type": "null"}
    }
    schema = {"type": "object", "properties": properties, "required": ["p7"], "additionalProperties": False}
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert served.post(CHAT, messages=HELLO, max_tokens=2, response_format=given).status_code == 200
    both = {"type": "json_schema", "json_schema": {"schema": {"allOf": [properties["p1"], {"pattern": "^a"}]}}}
    answer = served.post(CHAT, messages=HELLO, max_tokens=20, response_format=both).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("aa", "ab")


# fields that were taken and did nothing


def test_stream_options_without_a_stream_are_named(serve: Serve):
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 2, "stream_options": {"include_usage": True}}
    answer = serve().post(CHAT, **body)
    assert (answer.status_code, answer.headers["x-outrider-ignored"]) == (200, "stream_options")
    strict = serve(strict=True)
    assert strict.post(CHAT, **body).status_code == 400
    assert "x-outrider-ignored" not in strict.post(CHAT, **body, stream=True).headers


@pytest.mark.parametrize(
    "given",
    [
        {"type": "text", "regex": "a+"},
        {"type": "json_object", "json_schema": {"schema": {"type": "object"}}},
        {"type": "regex", "regex": "a", "choice": ["b"]},
        {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "bogus": 1}},
    ],
)
def test_what_a_response_format_does_not_use_is_refused(served: Running, given: Any):
    answer = served.post(CHAT, messages=HELLO, max_tokens=2, response_format=given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize(("newer", "older"), [(2, 9), (9, 2)])
def test_of_two_limits_the_smaller_holds(served: Running, newer: int, older: int):
    body: dict[str, Any] = {"max_completion_tokens": newer, "max_tokens": older, "ignore_eos": True}
    assert served.post(CHAT, messages=HELLO, **body).json()["usage"]["completion_tokens"] == 2


def test_a_bias_is_given_once_a_token(served: Running):
    answer = served.post(COMPLETE, prompt="a", max_tokens=2, logit_bias={"1": 1, "01": -100})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


def test_the_drafter_can_be_named_as_it_was_given(served: Running):
    for name, status in (("suffix+prediction", 200), ("mix", 200), ("suffix", 400), ("suffix+", 400)):
        answer = served.post(COMPLETE, prompt="a", max_tokens=2, speculation={"drafter": name})
        assert answer.status_code == status, name


def test_ids_that_are_no_tokens_are_not_turned_into_nothing(served: Running):
    answer = served.post("/detokenize", tokens=[104, 258])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
    assert "257" in answer.json()["error"]["message"]


# what a connection may say


@pytest.mark.parametrize("wish", ["Upgrade: h2c", "upgrade: websocket"])
def test_a_wish_for_another_protocol_does_not_cost_the_body(wish: str):
    """Java's client asks for HTTP/2 with its first request, whatever that is."""
    with serving() as running:
        body = b'{"prompt": "hi", "max_tokens": 3, "seed": 1}'
        plain = json.loads(exchange(running, post(body))[1])["choices"]
        status, answer = exchange(running, post(body, "Connection: Upgrade, HTTP2-Settings", wish))
        assert (status, json.loads(answer)["choices"]) == (200, plain)
        with running.socket() as sock:  # and the connection goes on
            for _ in range(2):
                sock.sendall(post(body, "Connection: Upgrade", wish))
                assert read_answer(sock)[0] == 200


def test_health_answers_head(served: Running):
    answer = served.http.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")


def test_nobody_is_sent_elsewhere(served: Running):
    answer = served.post(COMPLETE + "/", prompt="a")
    assert answer.status_code == 404
    assert "location" not in answer.headers


def test_a_failed_request_does_not_tell_how_many_came_before(served: Running):
    options: dict[str, Any] = {"allowed_token_ids": [5], "banned_token_ids": [5]}
    answer = served.post(COMPLETE, prompt="a", **options)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("this request cannot go on")


def test_an_empty_body_is_told_as_one(served: Running):
    answer = served.http.post(COMPLETE, content=b"", headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "the body: Field required")


# settings


@pytest.mark.parametrize("key", ["", "a", "1234567", "with space", "schlüssel"])
def test_a_key_that_could_be_guessed_is_refused(key: str):
    with pytest.raises(ConfigError, match="8 or more"):
        Settings(served_name="toy", api_keys=("long-enough", key))


@pytest.fixture
def page_elsewhere() -> Iterator[Any]:
    with serving(cors_origins=("https://chat.example.org",)) as running:
        yield running


def test_a_page_elsewhere_can_read_what_was_ignored(page_elsewhere: Any):
    headers = {"Authorization": f"Bearer {KEY}", "Origin": "https://chat.example.org"}
    body = {"prompt": "a", "max_tokens": 2, "bogus": 1}
    answer = httpx.post(page_elsewhere.url + COMPLETE, json=body, headers=headers)
    assert answer.headers["x-outrider-ignored"] == "bogus"
    assert "x-outrider-ignored" in answer.headers["access-control-expose-headers"].lower()
