"""`outrider serve --engine vllm` as a process, with a script in vLLM's place."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from process_world import Process, write_tiny_model
from remote_world import FakeServer
from server_world import until

FAKE = f"{sys.executable} {Path(__file__).parent / 'fake_vllm.py'}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@contextmanager
def serving(model: Path, *words: str) -> Iterator[Process]:
    made = Process(str(model), "--engine", "vllm", "--engine-command", FAKE, *words)
    try:
        made.until_ready()
        yield made
    finally:
        made.popen.terminate()
        made.popen.wait(20)
        made.end()


def child_of(server: Process) -> int:
    """The process id of the engine."""
    (pid,) = Path(f"/proc/{server.popen.pid}/task/{server.popen.pid}/children").read_text().split()
    return int(pid)


def words_given(server: Process) -> list[str]:
    (line,) = [line for line in server.said if " engine line=" in line and "words [" in line]
    return json.loads(json.loads(line[line.index('"words') :]).removeprefix("words "))


def test_killed_and_started_again(tiny: Path, monkeypatch):
    monkeypatch.setenv("FAKE_HOLD", "2")  # streams stop after two tokens
    monkeypatch.setenv("FAKE_WORKER", "1")
    with serving(tiny) as server:
        first = child_of(server)
        assert server.http.get("/v1/models").json()["data"][0]["engine"] == "vllm 0.32.0"
        body = {"prompt": "a", "max_tokens": 4, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(first, signal.SIGKILL)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
        until(lambda: server.http.get("/health").status_code == 503)
        until(lambda: server.http.get("/health").status_code == 200, 30)
        assert child_of(server) != first
        workers = [line.split("worker ")[1].strip('"\n') for line in server.said if '"worker ' in line]
        assert len(workers) == 2
        until(lambda: not Path(f"/proc/{workers[0]}").exists())
        assert server.http.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert server.metric("outrider_engine_restarts_total") == 1
        last_child = child_of(server)
    until(lambda: not Path(f"/proc/{last_child}").exists())
    assert server.popen.returncode == 0


def test_options_become_vllm_s(tiny: Path):
    more = ("--drafter", "prompt-lookup:k=3", "--dtype", "float32", "--context", "128", "--max-running", "4")
    parallel = ("--tensor-parallel-size", "2", "--engine-arg=--enforce-eager", "--api-key", "a-long-key")
    with serving(tiny, *more, *parallel) as server:
        words = words_given(server)
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 3)
        for name, value in (
            ("--dtype", "float32"),
            ("--max-model-len", "128"),
            ("--max-num-seqs", "4"),
            ("--tensor-parallel-size", "2"),
            ("--per-request-spec-decode-metrics", "summary"),
        ):
            assert words[words.index(name) + 1] == value
        assert words[-1] == "--enforce-eager"
        assert server.http.get("/v1/models").status_code == 401
        card = server.http.get("/v1/models", headers={"Authorization": "Bearer a-long-key"}).json()["data"][0]
        assert (card["drafter"], card["max_draft_tokens"]) == ("ngram", 3)
        assert any(line.startswith("plan ") for line in server.said)
        assert not any("a-long-key" in line for line in server.said)


def test_an_engine_that_ends_at_once_ends_the_server(tiny: Path):
    made = Process(str(tiny), "--engine", "vllm", "--engine-command", FAKE, "--engine-arg=--fail")
    assert made.popen.wait(60) == 2
    until(lambda: "no device is large enough" in "".join(made.said))
    made.end()


def test_an_engine_that_is_not_installed(tiny: Path):
    made = Process(str(tiny), "--engine", "vllm", "--engine-command", "no-such-command")
    assert made.popen.wait(60) == 2
    until(lambda: "is vLLM installed" in "".join(made.said))
    made.end()


def test_servers_that_run_already():
    """Without a model's name: it is the first server's."""
    fakes = [FakeServer(), FakeServer()]
    words = [word for fake in fakes for word in ("--engine-url", fake.url + "/v1")]
    server = Process.__new__(Process)
    server._start([sys.executable, "-m", "outrider", "serve", "--port", "0", *words])
    try:
        server.until_ready()
        until(lambda: server.metric("outrider_replica_ready") == 2)
        (card,) = server.http.get("/v1/models").json()["data"]
        assert (card["id"], card["replicas"]) == ("fake", {"all": 2, "usable": 2})
        answer = server.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
        server.popen.terminate()
        assert server.popen.wait(20) == 0
    finally:
        server.end()
        for fake in fakes:
            fake.stop()


def test_an_outrider_behind_an_outrider(tiny: Path):
    """Nothing is missing: provenance and predictions pass."""
    behind = Process(str(tiny), "--drafter", "suffix+prediction")
    try:
        behind.until_ready()
        front = Process(str(tiny), "--engine-url", behind.url, name="front")
        try:
            front.until_ready()
            (card,) = front.http.get("/v1/models").json()["data"]
            assert (card["missing"], card["drafter"]) == ({}, "suffix+prediction")
            body = {"prompt": "abcabcabc", "max_tokens": 5, "temperature": 0, "include_provenance": True}
            direct, through = (
                httpx.post(f"{url}/v1/completions", json=body, timeout=60).json() for url in (behind.url, front.url)
            )
            direct_tokens, tokens = (
                [each["token_id"] for each in answer["choices"][0]["provenance"]] for answer in (direct, through)
            )
            assert tokens == direct_tokens
            assert len(tokens) == 5
            assert (through["model"], direct["model"]) == ("front", "tiny")
        finally:
            front.end()
    finally:
        behind.end()
