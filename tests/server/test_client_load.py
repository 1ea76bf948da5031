"""The load generators `locust` and `guidellm`, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from client_world import ASK, MESSAGES, TIMEOUT, TOKENIZER, VLLM, Served, offline
from server_world import NAME
from transformers import PreTrainedTokenizerFast

LOCUSTFILE = Path(__file__).parent / "clients" / "locustfile.py"
REQUESTS = 6
TOKENS = 8


def run(folder: Path, module: str, *words: str, **env: str) -> None:
    """Run a program of the environment of these tests; it must end well."""
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed here: make test-clients")
    command = [str(Path(sys.executable).parent / module), *words]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env, capture_output=True, text=True, timeout=4 * TIMEOUT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_locust(served: Served, tmp_path: Path):
    words = ["-f", str(LOCUSTFILE), "--headless", "-u", "2", "-r", "2", "-t", "3s", "--host", served.url]
    told = tmp_path / "told.jsonl"
    body = json.dumps(ASK | {"model": NAME})
    run(tmp_path, "locust", *words, "--json-file", "load", LOCUST_BODY=body, LOCUST_TOLD=str(told))
    answers = [json.loads(line) for line in told.read_text().splitlines()]
    assert set(answers) == {offline().text}
    rows = json.loads((tmp_path / "load.json").read_text())
    assert {row["name"] for row in rows} == {"/v1/chat/completions", "stream"}
    assert [row["num_failures"] for row in rows] == [0, 0]
    assert sum(row["num_requests"] for row in rows) >= len(answers) > 2


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(served: Served, tmp_path: Path, route: str):
    """It asks with ignore_eos and continuous_usage_stats, and takes the counts of tokens from the usage."""
    prompt = MESSAGES[1]["content"]
    PreTrainedTokenizerFast(tokenizer_object=TOKENIZER._backend).save_pretrained(tmp_path / "tokenizer")
    row = json.dumps({"prompt": prompt, "output_tokens_count": TOKENS})
    (tmp_path / "data.jsonl").write_text(f"{row}\n" * REQUESTS)
    words = {
        "--backend": f"kind=openai_http,target={served.url},model={NAME},request_format={route}",
        "--profile": "kind=concurrent,streams=2",
        "--constraint": f"kind=max_requests,count={REQUESTS}",
        "--tokenizer": "kind=huggingface_auto,model=tokenizer",
        "--data": "kind=json_file,path=data.jsonl",
        "--output": "kind=json,path=told.json",
    }
    given = [word for pair in words.items() for word in pair]
    home = str(tmp_path / "huggingface")
    run(tmp_path, "guidellm", "run", *given, "--disable-console-interactive", HF_HUB_OFFLINE="1", HF_HOME=home)
    (told,) = json.loads((tmp_path / "told.json").read_text())["benchmarks"]
    assert told["metrics"]["request_totals"] == {
        "successful": REQUESTS,
        "errored": 0,
        "incomplete": 0,
        "total": REQUESTS,
    }
    messages: list[Any] = [{"role": "user", "content": prompt}]
    chat = route == "/v1/chat/completions"
    length = len(TOKENIZER.encode_chat(messages) if chat else TOKENIZER.encode(prompt))
    for each in told["requests"]["successful"]:
        assert (each["prompt_tokens"], each["output_tokens"]) == (length, TOKENS)
        passes = "num_spec_steps" if VLLM else "num_target_passes"
        assert each["response_metrics"]["speculative_decoding"][passes] <= TOKENS
