"""`outrider serve` as a process of its own, on a tiny random model with a byte tokenizer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families
from server_world import END, PATIENCE, TEMPLATE, VOCAB, make_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "tiny"
START_SECONDS = 300.0
"""Until a process that imports torch and loads a model is said never to be ready."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def write_tiny_model(folder: Path, context: int = 2048) -> Path:
    """A random Llama of a few thousand weights; the same every time."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=END,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(make_tokenizer().to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return folder


class Process:
    """A server of its own process; `said` is what it wrote to the terminal."""

    def __init__(self, model: str, *words: str, name: str = NAME) -> None:
        self._start(
            [sys.executable, "-m", "outrider", "serve", model, "--served-model-name", name, "--port", "0", *words]
        )

    def _start(self, command: list[str], stdout: int | None = None) -> None:
        env = os.environ | ENVIRONMENT
        self.popen = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)
        self.said: list[str] = []
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stderr
        for line in self.popen.stderr:
            self.said.append(line)
            if line.startswith("ready"):
                self._ready.set()
        self._ready.set()

    def until_ready(self, seconds: float = START_SECONDS) -> None:
        assert self._ready.wait(seconds), self.said
        found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", "".join(self.said))
        assert found, self.said
        assert self.popen.poll() is None, self.said
        self.url = found[1]
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        families = text_string_to_metric_families(self.http.get("/metrics").text)
        samples = [each for family in families for each in family.samples if each.name == name]
        assert samples, name
        return sum(each.value for each in samples if labels.items() <= each.labels.items())

    @property
    def resident(self) -> int:
        """Bytes of memory it holds, as the system counts them."""
        return int(Path(f"/proc/{self.popen.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @property
    def open_files(self) -> int:
        return len(list(Path(f"/proc/{self.popen.pid}/fd").iterdir()))

    def end(self) -> int:
        if hasattr(self, "http"):
            self.http.close()
        if self.popen.poll() is None:
            self.popen.kill()
        return self.popen.wait(PATIENCE)


@contextmanager
def process(model: Path | str, *words: str, name: str = NAME) -> Iterator[Process]:
    """A server that is ready, and ended whatever happens."""
    made = Process(str(model), *words, name=name)
    try:
        made.until_ready()
        yield made
    finally:
        made.end()
