"""`outrider serve --engine vllm` with the real vLLM, for the tests of clients: a small model, and its judge."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from process_world import Process
from server_world import END, LIKELY, NAME, TEMPLATE, VOCAB, make_tokenizer, until
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.llm import LLM

CONTEXT = 16384
START_SECONDS = 1200
WORDS = (
    *("--engine", "vllm", "--drafter", "prompt-lookup:k=3", "--dtype", "float32", "--max-running", "16"),
    *("--engine-arg=--enforce-eager", "--engine-arg=--enable-auto-tool-choice"),
    *("--engine-arg=--tool-call-parser=hermes", "--engine-arg=--tool-strict-level=parameter"),
)
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
MODEL_SEED = 5  # its greedy text has many letters, none of them near another in likelihood


@cache
def model_folder(layers: int = 2) -> Path:
    """A Llama with the toy's tokenizer, which vLLM can run: after each letter it likes one other, and context stirs."""
    folder = Path(tempfile.mkdtemp(prefix="outrider-clients-"))
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the least of vLLM's attention on the CPU
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=END,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    torch.manual_seed(MODEL_SEED)
    model = LlamaForCausalLM(config)
    letters = sorted(token for token in LIKELY if 32 < token < 128)
    with torch.no_grad():
        embed, head = model.model.embed_tokens.weight, model.lm_head.weight  # [VOCAB, hidden] each
        embed.copy_(torch.randn_like(embed))
        head.copy_(0.05 * torch.randn_like(head))
        order = [letters[i] for i in torch.randperm(len(letters))]
        for token in range(VOCAB):
            after = order.index(token) + 1 if token in order else token
            head[order[after % len(order)]] += 0.15 * embed[token]
        embed[:, 0] = 3.0  # the first coordinate is a bias: letters, before what JSON is made of, its end, and spaces
        head[:, 0] = -4.0
        head[list(b'{}[]":123'), 0] = -2.0
        head[END, 0] = -3.0
        head[letters, 0] = 0.5
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(make_tokenizer().to_json())
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@cache
def judge() -> LLM:
    """The same model in this package, which drafts nothing."""
    return LLM(
        str(model_folder()), drafter="none", dtype="float32", quantize="none", device="cpu", cache_tokens=4 * CONTEXT
    )


@contextmanager
def ready(server: Process, seconds: float = START_SECONDS) -> Iterator[Process]:
    """The server once it is ready; stopped at the end, with what it started."""
    try:
        server.until_ready(seconds)
        yield server
    finally:
        server.popen.terminate()
        server.popen.wait(30)
        server.end()


@contextmanager
def serve_vllm(model: str, *words: str, name: str) -> Iterator[Process]:
    """Such a server with vLLM behind it; `make test-vllm` says where vLLM is."""
    command = os.environ.get("OUTRIDER_TEST_VLLM")
    if not command:
        raise RuntimeError("set OUTRIDER_TEST_VLLM to the vllm command, or run make test-vllm")
    os.environ |= ENVIRONMENT
    with ready(Process(model, *WORDS, *words, "--engine-command", command, name=name)) as server:
        yield server


class RemoteServer(Process):
    """A server of its own before one that is ready, so that its settings and figures are its own."""

    def __init__(self, behind: Process, *, api_keys: tuple[str, ...] = ()) -> None:
        self.behind = behind
        super().__init__(NAME, "--engine-url", behind.url, *(f"--api-key={key}" for key in api_keys), name=NAME)

    def wait_begun(self) -> None:
        until(lambda: self.behind.metric("outrider_requests_running") == 1)

    def expect_cancelled(self) -> None:
        """The one text asked of it was given up before its end, and nothing of it is left."""
        until(lambda: self.metric("outrider_requests_total", finish_reason="cancelled") == 1)
        until(lambda: self.behind.metric("outrider_requests_running") == 0)
        assert self.metric("outrider_requests_running") == 0
        answer = self.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
