"""A real server process: clients that leave or are killed, and SIGTERM while much is in flight."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_world import Process, process, write_tiny_model
from server_world import until

from outrider import LLM, SamplingParams

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into the process as Linux does")
URL = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "the outrider", "max_tokens": 1500, "ignore_eos": True}
BUDGET = ("--context", "2048", "--cache-tokens", "16384")

CLIENT = """
import http.client, json, sys
connection = http.client.HTTPConnection(sys.argv[1])
connection.request("POST", "/v1/completions", sys.argv[2], {"content-type": "application/json"})
answer = connection.getresponse()
while line := answer.readline():
    print(line.decode(), end="", flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Process]:
    with process(folder, *BUDGET, "--max-queue", "1024") as made:
        yield made


def idle(server: Process) -> bool:
    names = ("outrider_requests_running", "outrider_requests_waiting", "outrider_pages_used")
    return all(server.metric(name) == 0 for name in names)


def test_two_hundred_that_leave_after_half_a_second(server: Process):
    server.http.post(URL, json=LONG | {"max_tokens": 2})
    files, before = server.open_files, server.metric("outrider_requests_total", finish_reason="cancelled")

    def ask(i: int) -> HTTPConnection:
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        body = json.dumps(LONG | {"stream": i % 2 == 0, "seed": i})
        connection.request("POST", URL, body, {"content-type": "application/json"})
        return connection

    def taken() -> float:
        there = server.metric("outrider_requests_running") + server.metric("outrider_requests_waiting")
        return there + server.metric("outrider_requests_total", finish_reason="cancelled") - before

    def leave(connection: HTTPConnection) -> None:
        connection.sock.settimeout(0.5)
        until_ = time.monotonic() + 0.5
        with closing(connection), suppress(TimeoutError):
            answer = connection.getresponse()
            while time.monotonic() < until_ and answer.read1(65536):
                pass

    with ThreadPoolExecutor(40) as pool:
        for first in range(0, 200, 40):
            asked = list(pool.map(ask, range(first, first + 40)))
            until(lambda first=first: taken() >= first + 40)  # a busy machine may take longer than they stay
            list(pool.map(leave, asked))
    began = time.monotonic()
    assert server.http.post(URL, json=LONG | {"max_tokens": 8}).status_code == 200
    assert time.monotonic() - began < 2
    until(lambda: idle(server))
    assert server.metric("outrider_requests_total", finish_reason="cancelled") - before == 200
    until(lambda: server.open_files <= files)


def test_a_client_killed_in_the_middle_of_its_stream(server: Process):
    before = server.metric("outrider_requests_total", finish_reason="cancelled")
    body = json.dumps(LONG | {"stream": True, "n": 8})
    command = [sys.executable, "-c", CLIENT, server.url.removeprefix("http://"), body]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert client.stdout
    assert client.stdout.readline().startswith("data: ")
    assert server.metric("outrider_requests_running") > 0
    client.kill()  # SIGKILL: it says no goodbye
    client.wait(10)
    client.stdout.close()
    until(lambda: idle(server))
    assert server.metric("outrider_requests_total", finish_reason="cancelled") - before == 8
    assert server.http.post(URL, json=LONG | {"max_tokens": 8}).status_code == 200


def test_sigterm_lets_all_that_was_taken_finish(folder: Path):
    """More is in flight than fits in a batch, streamed and whole: every text is the one the offline engine writes."""
    offline = LLM(str(folder), drafter="none", context=2048)
    with process(folder, *BUDGET, "--max-batch", "4") as server, ThreadPoolExecutor(12) as pool:
        asked = {seed: pool.submit(_text, server, seed, stream=seed % 2 == 0) for seed in range(12)}
        until(lambda: server.metric("outrider_requests_waiting") == 8)
        server.popen.send_signal(signal.SIGTERM)
        until(lambda: server.http.get("/health").status_code == 503)
        for stream in (True, False):
            refused = httpx.post(f"{server.url}{URL}", json=LONG | {"stream": stream})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert int(refused.headers["retry-after"]) > 0
        for seed, text in asked.items():
            params = SamplingParams(temperature=1, seed=seed, max_tokens=100, ignore_eos=True)
            assert text.result() == offline.generate(LONG["prompt"], params).text
        assert server.popen.wait(20) == 0


def test_sigterm_when_the_time_to_drain_runs_out(folder: Path):
    with process(folder, *BUDGET, "--drain-timeout", "0.3") as server, ThreadPoolExecutor(20) as pool:
        asked: list[Future[httpx.Response]] = [
            pool.submit(httpx.post, f"{server.url}{URL}", json=LONG | {"stream": i % 2 == 0}, timeout=30)
            for i in range(20)
        ]
        until(lambda: server.metric("outrider_requests_running") + server.metric("outrider_requests_waiting") == 20)
        server.popen.send_signal(signal.SIGTERM)
        for i, each in enumerate(asked):
            answer = each.result()
            if i % 2 == 0:
                last = answer.text.strip().split("\n\n")[-1]
                assert json.loads(last.removeprefix("data: "))["error"]["code"] == "shutting_down"
            else:
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "shutting_down"
        assert server.popen.wait(20) == 0


def _text(server: Process, seed: int, *, stream: bool) -> str:
    body = LONG | {"seed": seed, "max_tokens": 100, "stream": stream}
    answer = httpx.post(f"{server.url}{URL}", json=body, timeout=60)
    if not stream:
        return answer.json()["choices"][0]["text"]
    *chunks, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    return "".join(choice["text"] for chunk in told for choice in chunk["choices"])
