"""The log: one line a request with its figures, and nowhere a word of what was asked or answered."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
from operation_world import Running, exchange, post, serving, toy_llm

from outrider.server.ops.logs import LOGGER, LineFormatter, log_error, log_event, set_up_logs

CANARY = "kanarienvogel"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with serving() as made:
        yield made


def test_one_line_a_request_with_what_the_answer_says(running: Running):
    with running.client() as client:
        answer = client.post(
            "/v1/completions",
            json={"prompt": "abcabcabc", "max_tokens": 60, "n": 2, "temperature": 0, "ignore_eos": True},
            headers={"x-request-id": "my.own-id_1"},
        )
    told, line = answer.json(), running.heard.of("my.own-id_1")
    spec = told["metrics"]["speculative_decoding"]
    assert answer.headers["x-request-id"] == "my.own-id_1"
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["tokens"] == told["usage"]["completion_tokens"]
    assert line["prompt_tokens"] == 2 * told["usage"]["prompt_tokens"]
    assert sorted(line["finish"].split(",")) == sorted(choice["finish_reason"] for choice in told["choices"])
    assert spec["num_accepted_draft_tokens"] > 10
    assert line["drafters"]["suffix"] == {
        "drafts": spec["num_spec_steps"],
        "drafted": spec["num_draft_tokens"],
        "accepted": spec["num_accepted_draft_tokens"],
    }
    assert 0 <= line["queue_seconds"] < line["first_token_seconds"] < line["seconds"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])
    assert line["level"] == "info"


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "<script>", "ä", "a\tb"])
def test_an_id_that_is_not_sane_is_replaced(running: Running, given: str):
    request = f"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {given}\r\n\r\n".encode("latin-1")
    with running.socket() as sock:
        sock.sendall(request)
        head = sock.recv(65536).decode()
    (made,) = re.findall(r"x-request-id: (\S+)\r\n", head)
    assert re.fullmatch(r"req-[0-9a-f]{24}", made)
    assert running.heard.of(made)["status"] == 200


def test_every_answer_has_safe_headers(running: Running):
    with running.client() as client, running.client(None) as stranger:
        answers = [
            client.get("/v1/models"),
            client.get("/nowhere"),
            stranger.get("/v1/models"),
            stranger.get("/health"),
        ]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def knock(running: Running) -> list[str]:
    """Ask in every way, right and wrong, with the canary in each; the answers' texts."""
    texts: list[str] = []
    with running.client() as client:
        for body in (
            {"prompt": CANARY, "max_tokens": 8, "ignore_eos": True},
            {"prompt": CANARY, "max_tokens": 8, "stream": True},
            {"prompt": CANARY, "max_tokens": CANARY},
            {"prompt": CANARY, "stop": [CANARY * 500]},
            {"prompt": CANARY * 200},
            {"prompt": "a", CANARY: 1, "model": CANARY},
            {"prompt": CANARY, "user": CANARY, "cache_salt": CANARY},
            {"prompt": f"!{CANARY}"},
        ):
            answer = client.post(f"/v1/completions?q={CANARY}", json=body, headers={"User-Agent": CANARY})
            if answer.status_code == 200 and "choices" in answer.text and not body.get("stream"):
                texts.append(answer.json()["choices"][0]["text"])
        client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": CANARY}], "max_tokens": 4})
        client.post("/v1/chat/completions", json={"messages": [{"role": CANARY, "content": CANARY}]})
        client.post("/tokenize", json={"prompt": CANARY})
        client.get(f"/{CANARY}")
    exchange(running, post(b'{"prompt": "' + CANARY.encode() + b'\xff"}'))
    exchange(running, post(CANARY.encode(), f"Content-Type: {CANARY}"))
    exchange(running, f"GET /v1/models HTTP/1.1\r\nHost: {CANARY}.example\r\n\r\n".encode())
    exchange(running, CANARY.encode() + b"\r\n\r\n")
    return texts


def test_nobody_s_words_are_in_the_log():
    with serving() as running:
        texts = [text for text in knock(running) if len(text) >= 4]
        with running.client() as client:
            running.heard.of(client.get("/health").headers["x-request-id"])
    assert texts
    assert any(line.get("route") == "/v1/chat/completions" for line in running.heard.parsed())
    assert CANARY not in running.heard.text
    for text in texts:
        assert json.dumps(text)[1:-1] not in running.heard.text


def test_prompts_are_logged_where_the_operator_says_so():
    with serving(log_prompts=True) as running, running.client() as client:
        answer = client.post("/v1/completions", json={"prompt": CANARY, "max_tokens": 1})
        assert CANARY in running.heard.of(answer.headers["x-request-id"])["body"]


def test_a_fault_is_logged_by_its_place_and_told_to_the_client_by_its_id(monkeypatch: pytest.MonkeyPatch):
    with serving() as running, running.client() as client:

        def broken(*_: Any) -> Any:
            raise ZeroDivisionError(CANARY)

        monkeypatch.setattr("outrider.server.service.Service.client", broken)
        answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        asked = answer.headers["x-request-id"]
        assert running.heard.of(asked)["status"] == 500
        faults = [line for line in running.heard.parsed() if "error" in line]
        assert any("ZeroDivisionError" in line["error"] and "broken" in line["error"] for line in faults)
        assert CANARY not in running.heard.text
        assert CANARY not in answer.text


def test_a_crash_of_the_engine_is_logged_and_health_says_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "outrider.server.ops.request_record.STATS_GRACE_SECONDS", 0.01
    )  # a dead engine tells no figures to wait for
    llm = toy_llm()
    with serving(llm) as running, running.client() as client:

        def crash(*_: Any) -> Any:
            raise MemoryError(CANARY)

        llm.engine.step = crash
        answer = client.post("/v1/completions", json={"prompt": CANARY, "max_tokens": 1})
        assert answer.status_code == 503
        assert client.get("/health").status_code == 503
        asked = answer.headers["x-request-id"]
        assert running.heard.of(asked)["status"] == 503
        (line,) = [line for line in running.heard.parsed() if line["level"] == "critical"]
        assert "MemoryError" in line["error"]
        assert CANARY not in running.heard.text


def test_the_server_s_start_and_stop_are_logged():
    with serving() as running:
        pass
    events = [line["event"] for line in running.heard.parsed() if "logger" not in line]
    assert events[0] == "start"
    assert events[-1] == "stop"


def test_lines_to_read_and_lines_to_parse(capsys: pytest.CaptureFixture[str]):
    before = {
        name: vars(logging.getLogger(name)).copy()
        for name in (LOGGER.name, "uvicorn", "uvicorn.error", "opentelemetry")
    }
    try:
        for form in ("json", "text"):
            stream = io.StringIO()
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # as another server in the process may have
            set_up_logs(form, stream=stream)
            log_event(
                "request", id="a", seconds=0.25, drafters={"suffix": {"drafts": 1}}, note='two "words"\nand a line'
            )
            try:
                raise ValueError(CANARY)
            except ValueError as error:
                log_error("fault", error, id="b")
            logging.getLogger("uvicorn.error").error("said by uvicorn")
            logging.getLogger("uvicorn.access").info("GET /%s", CANARY)
            lines = stream.getvalue().splitlines()
            assert len(lines) == 3
            assert CANARY not in stream.getvalue()
            assert "ValueError" in lines[1]
            if form == "json":
                first = json.loads(lines[0])
                assert (first["event"], first["seconds"], first["drafters"]) == (
                    "request",
                    0.25,
                    {"suffix": {"drafts": 1}},
                )
                assert json.loads(lines[2])["logger"] == "uvicorn.error"
            else:
                assert re.match(r"\S+ INFO request id=a seconds=0\.25 ", lines[0])
                assert r'note="two \"words\"\nand a line"' in lines[0]
    finally:
        for name, state in before.items():
            vars(logging.getLogger(name)).update(state)
        logging.getLogger("uvicorn.access").disabled = False
    assert capsys.readouterr().err == ""


def test_the_words_of_an_exception_are_reported_only_where_asked_for():
    error = ValueError(CANARY)
    told = {
        texts: LineFormatter("json", with_text=texts).formatException((ValueError, error, None))
        for texts in (False, True)
    }
    assert CANARY not in told[False]
    assert CANARY in told[True]
