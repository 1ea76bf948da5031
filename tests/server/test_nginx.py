"""Two servers behind nginx, by the configuration in deploy/."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from process_world import Process, process, write_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed: apt-get install nginx-light"),
]
CONFIG = (Path(__file__).parents[2] / "deploy" / "nginx.conf").read_text()
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 40,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory) -> Iterator[list[Process]]:
    model = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    with process(model) as first, process(model) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def client(servers, tmp_path_factory) -> Iterator[httpx.Client]:
    """nginx on a free port, its configuration changed in addresses alone."""
    folder = tmp_path_factory.mktemp("nginx")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    text = CONFIG.replace("listen 8080;", f"listen 127.0.0.1:{port};")
    for number, server in enumerate(servers, 1):
        text = text.replace(f"outrider-{number}:8000", server.url.removeprefix("http://"))
    assert "outrider-1:" not in text
    file = folder / "nginx.conf"
    file.write_text(text)
    words = ["nginx", "-p", str(folder), "-c", str(file), "-e", "stderr"]
    tested = subprocess.run([*words, "-t"], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr
    running = subprocess.Popen([*words, "-g", "daemon off;"], stderr=subprocess.PIPE, text=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as made:
            for _ in range(100):
                try:
                    made.get("/health")
                    break
                except httpx.ConnectError:
                    assert running.poll() is None
                    time.sleep(0.05)
            yield made
    finally:
        running.terminate()
        running.wait(10)


def answered(servers: list[Process]) -> list[float]:
    return [each.metric("outrider_requests_total") for each in servers]


def test_both_replicas_answer_and_a_session_stays_with_one(servers, client):
    assert client.get("/health").status_code == 200
    before = answered(servers)
    texts = {
        client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"] for _ in range(6)
    }
    assert len(texts) == 1
    some = [now - then for now, then in zip(answered(servers), before, strict=True)]
    assert sum(some) == 6
    assert min(some) >= 1
    before = answered(servers)
    for _ in range(4):
        assert client.post("/v1/chat/completions", json=CHAT, headers={"X-Session-Id": "a"}).status_code == 200
    assert sorted(now - then for now, then in zip(answered(servers), before, strict=True)) == [0, 4]


def test_a_stream_comes_piece_by_piece(client):
    asked = CHAT | {"max_tokens": 200, "speculation": {"off": True}}
    with client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        pieces = list(response.iter_raw())
    whole = b"".join(pieces).decode()
    assert whole.rstrip().endswith("data: [DONE]")
    texts = [json.loads(line)["choices"] for line in re.findall(r"^data: (\{.*)$", whole, re.MULTILINE)]
    assert len(texts) > 10
    assert len(pieces) > 5, "nothing is held back until the end"
    plain = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert "".join(each[0]["delta"].get("content") or "" for each in texts if each) == plain


def test_figures_are_not_shown_and_a_dead_replica_is_left_out(servers, client):
    assert client.get("/metrics").status_code == 404
    servers[0].popen.kill()
    servers[0].popen.wait(20)
    codes = [client.post("/v1/chat/completions", json=CHAT).status_code for _ in range(6)]
    assert codes == [200] * 6
