"""Greedy texts of vLLM and of this package, and what happens when vLLM is killed."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from client_vllm import START_SECONDS
from process_world import Process
from server_world import until
from vllm_world import NAME

from outrider.core.sampling import SamplingParams
from outrider.llm import LLM

pytestmark = pytest.mark.vllm

TOKENS = 48
NEAR_TIE = 1e-3
"""Nats between the two likeliest tokens, below which float32 sums of another order may choose the other."""
PROMPTS = (
    "The outrider rode ahead of the",
    "Name three rivers of Europe:",
    "def add(a, b):\n    return",
    "Once upon a time",
    "The capital of France is",
    "Water boils at",
    "import os\nimport",
    "A list of colours: red, green,",
    "The quick brown fox",
    "In 1969, men",
    "To make bread, first",
    "SELECT name FROM",
    "Dear Sir or Madam,",
    "1, 1, 2, 3, 5, 8,",
    "The mitochondria is",
    "She opened the door and",
    "<html><head>",
    "My favourite season is",
    "Speculative decoding is",
    "The sea, the sea, the sea,",
)


def test_greedy_texts_are_ours(vllm: Process, ours: LLM):
    """Where one differs, the two likeliest tokens were a near-tie by our own logits."""

    def theirs(prompt: str) -> str:
        body = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
        return vllm.http.post("/v1/completions", json=body).json()["choices"][0]["text"]

    with ThreadPoolExecutor(8) as pool:
        told = list(pool.map(theirs, PROMPTS))
    results = ours.generate(list(PROMPTS), SamplingParams(max_tokens=TOKENS, logprobs=2))
    differing = 0
    for text, result in zip(told, results, strict=True):
        if text != result.text:
            differing += 1
            gaps = [each.top[0][1] - each.top[1][1] for each in result.logprobs]
            pieces = [ours.tokenizer.decode_all(result.tokens[: i + 1]) for i in range(len(result.tokens))]
            first = next(i for i, piece in enumerate(pieces) if not text.startswith(piece))
            assert gaps[first] < NEAR_TIE, (text, result.text, gaps[first])
    assert differing <= len(PROMPTS) // 4
    print(f"{len(PROMPTS) - differing} of {len(PROMPTS)} texts equal, {differing} differ at near-ties")


def test_killed_and_started_again(vllm: Process):
    (pid,) = Path(f"/proc/{vllm.popen.pid}/task/{vllm.popen.pid}/children").read_text().split()
    body = {"prompt": "a", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with vllm.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(int(pid), signal.SIGKILL)
        last = [line for line in lines if line][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    until(lambda: vllm.http.get("/health").status_code == 503, 1.0)  # the promise: within a second
    until(lambda: vllm.http.get("/health").status_code == 200, START_SECONDS)
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    assert vllm.http.post("/v1/completions", json=body).status_code == 200
    assert vllm.metric("outrider_engine_restarts_total") == 1
