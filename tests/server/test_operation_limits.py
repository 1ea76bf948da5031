"""Bodies, headers and Hosts of the kinds that knock servers over, sent as raw bytes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_world import KEY, Running, exchange, post, read_answer, serving

from outrider.core.errors import ConfigError
from outrider.server.http.limits import BodyLimit, HttpLimits, check_origins, nesting_exceeds

PIECE = b"x" * (1 << 16)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    limits = HttpLimits(header_seconds=0.4, body_seconds=0.4)
    with serving(protocol=limits, body_timeout=0.4) as made:
        yield made


def error(body: bytes) -> dict[str, Any]:
    """The error of an answer, which has OpenAI's shape."""
    made = json.loads(body)
    assert set(made) == {"error"}
    assert set(made["error"]) == {"message", "type", "param", "code"}
    return made["error"]


def refused(running: Running, request: bytes | Iterator[bytes], status: int) -> dict[str, Any]:
    got, body = exchange(running, request)
    assert got == status, body
    return error(body)


def alive(running: Running) -> None:
    with running.client() as client:
        assert client.get("/health").status_code == 200


def resident() -> int:
    """Bytes of memory this process, server and all, has in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# how deep


def depth(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


TEXTS = st.text(alphabet='[]{}"\\/ab\n\u00e9\u2028', max_size=12)
VALUES = st.recursive(
    TEXTS | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@settings(max_examples=150, deadline=None)
@given(VALUES, st.integers(0, 6), st.booleans())
def test_the_scan_finds_the_depth_that_a_parser_does(value: Any, limit: int, ascii_only: bool):
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    assert nesting_exceeds(text, limit) == (depth(json.loads(text)) > limit)


def test_depth_is_carried_over_windows_and_strings_across_them():
    brackets = b"[" * 40_000
    assert nesting_exceeds(b'["' + brackets + b'", ' + b"[" * 70 + b"]" * 71, 64)
    assert not nesting_exceeds(b'["' + brackets + b'\\"' + brackets + b'"' + b", []" * 40_000 + b"]", 64)
    assert nesting_exceeds(b'["' + brackets + b'\\\\"' + b", []" * 40_000 + b", " + b"[" * 64 + b"]" * 65, 64)


def test_deep_json_is_refused_before_it_is_parsed(running: Running):
    for body in (b"[" * 10_000 + b"]" * 10_000, b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b"[" * (4 << 20)):
        assert refused(running, post(body), 400)["code"] == "json_too_deep"
    brackets = json.dumps({"prompt": "[" * 200, "max_tokens": 1}).encode()
    assert exchange(running, post(brackets))[0] == 200  # in a string they are no depth


# how much


def test_a_body_of_100_megabytes_is_refused_unread(running: Running):
    before = resident()
    sent = 0

    def lazily() -> Iterator[bytes]:
        nonlocal sent
        yield post(b"", f"Content-Length: {100 << 20}")
        for _ in range(1600):
            yield PIECE
            sent += len(PIECE)

    assert refused(running, lazily(), 413)["code"] == "body_too_large"
    assert sent < 100 << 20  # closed on before all was read
    assert resident() - before < 50 << 20
    alive(running)


def test_so_is_one_that_does_not_say_how_long_it_is(running: Running):
    before = resident()

    def lazily() -> Iterator[bytes]:
        yield post(b"", "Transfer-Encoding: chunked")
        for _ in range(1600):
            yield b"10000\r\n" + PIECE + b"\r\n"

    assert refused(running, lazily(), 413)["code"] == "body_too_large"
    assert resident() - before < 50 << 20
    alive(running)


def test_a_body_without_end_from_someone_without_a_key(running: Running):
    """Whoever has no key may not make the server read on either."""

    def endless() -> Iterator[bytes]:
        yield post(b"", "Transfer-Encoding: chunked", key="wrong-key")
        for _ in range(1600):
            yield b"10000\r\n" + PIECE + b"\r\n"

    assert refused(running, endless(), 401)["code"] == "invalid_api_key"


def test_the_largest_body_that_may_be_is_read_whole_in_chunks():
    with serving(max_body=20_000) as running:
        body = json.dumps({"prompt": "a", "max_tokens": 1, "stop": "b", "user": "u" * 19_000}).encode()
        chunks = b"".join(
            b"%x\r\n%s\r\n" % (len(body[i : i + 100]), body[i : i + 100]) for i in range(0, len(body), 100)
        )
        status, answer = exchange(running, post(b"", "Transfer-Encoding: chunked") + chunks + b"0\r\n\r\n")
        assert status in (200, 400), answer  # read and parsed: whatever the schema makes of it
        assert b"body_too_large" not in answer
        over = body[:-1] + b" " * (20_001 - len(body)) + b"}"
        assert refused(running, post(over), 413)["message"].startswith("the body is larger than 20000 bytes")
        assert exchange(running, post(over[:-2] + b"}"))[0] != 413


def test_the_work_of_refusing_takes_no_time():
    """A 100 MB body and JSON 10,000 deep: less than 100 ms of work each, as the issue asks."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("let through")

    async def refuse(body: bytes, times: int) -> tuple[int, float]:
        left, statuses = times, []

        async def receive() -> dict[str, Any]:
            nonlocal left
            left -= 1
            return {"type": "http.request", "body": body, "more_body": left > 0}

        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        headers = [(b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        began = time.process_time()
        await BodyLimit(app, HttpLimits())(scope, receive, send)
        return statuses[0], time.process_time() - began

    for body, times, status in ((PIECE, 1600, 413), (b"[" * 10_000, 1, 400)):
        tries = [asyncio.run(refuse(body, times)) for _ in range(3)]
        assert {got for got, _ in tries} == {status}
        assert min(seconds for _, seconds in tries) < 0.1


# how slow


def test_a_body_that_does_not_come_is_answered(running: Running):
    with running.socket() as sock:
        sock.sendall(post(b'{"prompt"', "Content-Length: 100"))
        status, body = read_answer(sock)
    assert (status, error(body)["code"]) == (408, "body_timeout")


def test_headers_that_do_not_come_are_answered(running: Running):
    with running.socket() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        status, body = read_answer(sock)
        assert (status, error(body)["code"]) == (408, "head_timeout")
    with running.socket() as sock:  # who has said nothing is told nothing
        assert sock.recv(100) == b""
    with running.socket() as sock:  # a second request on the same connection
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert read_answer(sock)[0] == 200
        sock.sendall(b"GET /health HTT")
        assert read_answer(sock)[0] == 408


# what kind


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", ""],
)
def test_only_json_is_taken(running: Running, kind: str):
    assert refused(running, post(b"{}", f"Content-Type: {kind}"), 415)["code"] == "not_json"


def test_json_may_say_its_charset_but_not_be_compressed(running: Running):
    body = b'{"prompt": "a", "max_tokens": 1}'
    assert exchange(running, post(body, "Content-Type: application/json; charset=utf-8"))[0] == 200
    assert refused(running, post(body, "Content-Encoding: gzip"), 415)["code"] == "not_json"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b"\x00",
        b"",
        b"{",
        b"null",
        b"[]",
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "n": 1e999}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "n": 100000000}',
        b'{"prompt": "a", "chat_template": "{{ 1 }}", "model": ' + b'"m' * 3 + b"}",
    ],
)
def test_a_body_that_cannot_be_read_is_one_client_s_mistake(running: Running, body: bytes):
    assert refused(running, post(body), 400)["type"] == "invalid_request_error"


# headers


def test_large_and_many_headers(running: Running):
    huge = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Large: " + b"a" * (64 << 10) + b"\r\n\r\n"
    many = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(150)) + b"\r\n"
    long = b"GET /health?" + b"a" * (64 << 10) + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for request in (huge, many, long):
        assert refused(running, request, 431)["code"] == "headers_too_large"
    few = b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(90)) + b"\r\n"
    assert exchange(running, few)[0] == 200


def test_headers_without_end_are_cut_off(running: Running):
    before = resident()

    def one() -> Iterator[bytes]:
        yield b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Endless: "
        for _ in range(1600):
            yield PIECE

    def many() -> Iterator[bytes]:
        yield b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
        for _ in range(1600):
            yield b"X-More: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 1000

    def trailers() -> Iterator[bytes]:
        yield post(b"", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n"
        for _ in range(1600):
            yield b"X-More: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 1000

    for endless in (one, many, trailers):
        assert refused(running, endless(), 431)["code"] == "headers_too_large"
    told = [line for line in running.heard.parsed() if line["event"] == "refused"]
    assert len([line for line in told if line["status"] == 431]) >= 3  # no app was asked, and the log says so
    assert resident() - before < 50 << 20
    alive(running)


@pytest.mark.parametrize(
    "request_",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
        b"POST /tokenize HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Bad\x00: a\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_not_http_gets_a_400(running: Running, request_: bytes):
    assert refused(running, request_, 400)["type"] == "invalid_request_error"
    alive(running)


# Host and origin


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("api.example.org", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.7", 403),
        ("localhost:x", 400),
        ("local host", 400),
        ("[::1", 400),
        ("", 400),
    ],
)
def test_the_server_answers_to_its_own_names(host: str, status: int, named: Running):
    got, body = exchange(named, f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    assert got == status, body


@pytest.fixture(scope="module")
def named() -> Iterator[Running]:
    with serving(allow_hosts=("api.example.org",), cors_origins=("https://chat.example.org",)) as made:
        yield made


def test_host_comes_once(named: Running):
    for request in (
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
    ):
        assert exchange(named, request)[0] == 400


def test_pages_of_other_origins_may_ask_only_where_the_operator_says(named: Running, running: Running):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for made, origin, allowed in (
        (named, "https://chat.example.org", True),
        (named, "https://chat.example.org.evil.example", False),
        (named, "null", False),
        (running, "https://chat.example.org", False),
    ):
        with made.client(None) as client:
            before = client.options("/v1/chat/completions", headers={"Origin": origin, **asked})
            assert ("access-control-allow-origin" in before.headers) == allowed
            assert (before.status_code == 200) == allowed
            assert "access-control-allow-credentials" not in before.headers
        with made.client(KEY) as client:
            answer = client.get("/v1/models", headers={"Origin": origin})
            assert answer.headers.get("access-control-allow-origin") == (origin if allowed else None)


@pytest.mark.parametrize("origin", ["*", "https://*.example.org", "example.org", "https://example.org/", "null"])
def test_only_exact_origins_can_be_let_in(origin: str):
    with pytest.raises(ConfigError, match="exact origin"):
        check_origins([origin])


@pytest.mark.parametrize("options", [{"max_body": 0}, {"max_depth": -1}, {"body_seconds": 0}])
def test_limits_are_above_nought(options: dict[str, Any]):
    with pytest.raises(ConfigError, match="must be above 0"):
        HttpLimits(**options)
