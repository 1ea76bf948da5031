"""`outrider serve` as a process: what it says, what it answers, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from process_world import write_tiny_model
from server_world import until
from transformers import LlamaForCausalLM

from outrider.cli.main import main
from outrider.server.ops import logs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a byte tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Process:
    """A server of its own process; `said` is what it wrote to the terminal."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "outrider", "serve", *words, "--port", "0"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        self.popen = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        self.said = [self._line()]
        found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", self.said[0])
        assert found, self.said
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=30)

    def _line(self) -> str:
        assert self.popen.stderr
        return self.popen.stderr.readline()

    def until_ready(self) -> None:
        while not self.said[-1].startswith("ready"):
            self.said.append(self._line())
            assert self.said[-1], self.said

    def end(self) -> int:
        self.http.close()
        if self.popen.poll() is None:
            self.popen.kill()
        return self.popen.wait(20)


@pytest.fixture
def process(folder: Path) -> Iterator[Process]:
    made = Process(str(folder), "--served-model-name", "tiny", "--context", "512", "--cache-tokens", "2048")
    yield made
    made.end()


def test_from_loading_to_sigterm(process: Process, folder: Path):
    first = process.http.get("/health")  # it listens before the model is there
    assert first.status_code in (200, 503)
    process.until_ready()
    said = "".join(process.said)
    parts = "tiny, float32 on cpu", "drafter", "weights", "2048 tokens in 128 pages, context 512", "threads  1\n", "/v1"
    for part in parts:
        assert part in said, said
    assert process.http.get("/v1/models").json()["data"][0]["id"] == "tiny"

    text = "the outrider rides ahead of the column and comes back with news " * 4
    body = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 0}
    scores = process.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    ids = torch.tensor([list(text.encode())])
    with torch.inference_mode():
        log_probs = LlamaForCausalLM.from_pretrained(folder)(input_ids=ids).logits[0].double().log_softmax(-1)
    assert scores[1:] == pytest.approx(log_probs[torch.arange(len(text) - 1), ids[0, 1:]].tolist(), abs=1e-4)

    ask: dict[str, Any] = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True, "seed": 1}
    with process.http.stream("POST", "/v1/completions", json=ask) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: _health(process) == 503)
        refused = httpx.post(f"{process.url}/v1/completions", json=ask)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""] or rest[-1] == "data: [DONE]"
    assert process.popen.wait(20) == 0


def _health(process: Process) -> int:
    with httpx.Client() as fresh:
        return fresh.get(f"{process.url}/health").status_code


def test_a_second_signal_does_not_wait(process: Process):
    process.until_ready()
    ask: dict[str, Any] = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 8, "stream": True}
    with process.http.stream("POST", "/v1/completions", json=ask) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: _health(process) == 503)
        process.popen.send_signal(signal.SIGTERM)
        assert '"code": "shutting_down"' in "".join(lines)
    assert process.popen.wait(20) == 0


def test_a_model_that_is_not_there_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(logs, "set_up_logs", lambda *args, **options: None)
    with pytest.raises(SystemExit) as left:
        main(["serve", str(tmp_path / "nothing"), "--port", "0"])
    assert left.value.code == 2
    assert "nothing" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--host", "0.0.0.0"], "--api-key"),  # noqa: S104 - refused, which is the point
        (["--host", "::"], "--api-key"),
        (["--max-queue", "-1"], "max_queue"),
        (["--drafter", "nobody"], "nobody"),
        (["--log-format", "xml"], "json"),
        (["other", "--model", "another"], "one of them"),
    ],
)
def test_what_cannot_be_is_reported_before_anything_listens(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    with pytest.raises(SystemExit) as left:
        main(["serve", *words])
    assert left.value.code == 2
    assert says in capsys.readouterr().err
