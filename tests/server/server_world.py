"""A server in a test: a toy model with a real tokenizer, the engine on its thread, a real uvicorn on a free port."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers
import torch
import uvicorn
from torch import Tensor

from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.models.tokenizer import Tokenizer
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState
from outrider.server.app import create_app
from outrider.server.openai.token_texts import byte_alphabet
from outrider.server.queue.engine_thread import EngineThread
from outrider.server.queue.local_engine import LocalEngine
from outrider.server.run import DrainingServer, listen, make_server
from outrider.server.settings import Settings
from outrider.testing.toy import ToyRunner

NAME = "toy"
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PATIENCE = 60.0
"""Seconds until something is said never to come, however busy the machine is; nothing here takes near that."""
END = 257
VOCAB = 258
LIKELY = frozenset(b"etaoin srhldcum\n.,") | {0xC3, 0xA9, END}

BIAS = torch.full((VOCAB,), -12.0)
BIAS[sorted(LIKELY)] = 0.0
BIAS[END] = -4.0


def make_tokenizer() -> Tokenizer:
    """One token a byte, and two special ones; a chat template."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|end|>"])
    return Tokenizer(backend, named={"eos_token": "<|end|>"}, templates={"default": TEMPLATE})


class ToyWriter(ToyRunner):
    """Writes letters for the most part, and now and then an é. Reading `poison` makes it say NaN.

    While `gate` is closed no pass begins; it closes itself after `last_pass` of them. `crash` ends the next one with an
    exception.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(VOCAB, **{"context": 256, "cache_tokens": 4096} | options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.poison: Token | None = None
        self.crash = False
        self.passes = 0
        self.last_pass: int | None = None

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self.entered.set()
        if not self.gate.wait(PATIENCE):
            raise RuntimeError("the gate was never opened")
        if self.crash:
            raise RuntimeError("a fault at 0x7f00dead in /some/secret/path")
        self.passes += 1
        if self.passes == self.last_pass:
            self.gate.clear()
        scores = super().score(spans, after)
        if self.poison is not None:
            rows = iter(range(len(scores.logits)))
            for span in scores.spans:
                for row in [next(rows) for _ in range(span.rows)]:
                    if self.poison in (*span.tokens, *span.draft.tokens):
                        scores.logits[row] = float("nan")
        return scores

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        return super()._make_row(tail) + BIAS


@dataclass
class Running:
    """A server that answers."""

    llm: LLM
    target: ToyWriter
    engine_thread: EngineThread
    settings: Settings
    server: DrainingServer
    thread: threading.Thread
    url: str
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def stop(self) -> None:
        self.http.close()
        self.target.gate.set()
        self.engine_thread.drain(0)
        self.server.should_exit = True
        self.thread.join(PATIENCE)


def make_llm(target: ToyWriter | None = None, *, drafter: str = "suffix+prediction", max_batch: int = 4) -> LLM:
    loaded = LoadedModel(NAME, Path(NAME), target or ToyWriter(), make_tokenizer(), "float32")
    return LLM(loaded, drafter=drafter, max_batch=max_batch, adaptive=False)


def start(
    target: ToyWriter | None = None,
    *,
    max_batch: int = 4,
    drafter: str = "suffix+prediction",
    load: Callable[[], LLM] | None = None,
    wait: bool = True,
    **options: Any,
) -> Running:
    """Run a server in a thread; `options` are those of Settings."""
    target = target or ToyWriter()
    llm = make_llm(target, drafter=drafter, max_batch=max_batch)
    settings = Settings(served_name=NAME, port=0, **options)
    engine_thread = EngineThread(lambda: LocalEngine(load() if load else llm), settings.max_queue)
    listening = listen(settings)
    running = make_server(create_app(engine_thread, settings), engine_thread, settings)
    engine_thread.start()
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    if wait and not engine_thread.loaded.wait(PATIENCE):
        raise RuntimeError("the toy was not loaded")
    return Running(llm, target, engine_thread, settings, running, thread, url)


def until(true: Callable[[], Any], seconds: float = PATIENCE) -> None:
    """Wait for another thread to have done something."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.002)


def soon(true: Callable[[], Any], looks: int = 300) -> None:
    """Wait for another thread to do something at once: within so many looks, the default about a second's.

    Looks and not seconds, since a busy machine slows down both threads.
    """
    for _ in range(looks):
        if true():
            return
        time.sleep(0.002)
    raise AssertionError(f"it had not come after {looks} looks")


class LoopClock:
    """The clock of a server's event loop, which a test moves on.

    A limit that innocent requests never come near is passed so when the test says, however slow the machine is.
    """

    def __init__(self, server: uvicorn.Server) -> None:
        until(lambda: server.started)
        self.loop = server.servers[0].get_loop()
        self.ahead = 0.0
        real = self.loop.time
        self.loop.time = lambda: real() + self.ahead

    def move_on(self, seconds: float) -> None:
        """Returns when the loop has the new time; a timer set after that counts from it."""
        moved = threading.Event()

        def move() -> None:
            self.ahead += seconds
            moved.set()

        self.loop.call_soon_threadsafe(move)
        assert moved.wait(PATIENCE)


def lines_of(served: Running, path: str, body: dict[str, Any]) -> list[str]:
    with served.http.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = answer.read()
    assert raw.endswith(b"\n\n")
    return raw.decode().removesuffix("\n\n").split("\n\n")


def chunks_of(served: Running, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    *told, done = lines_of(served, path, body)
    assert done == "data: [DONE]"
    for line in told:
        yield json.loads(line.removeprefix("data: "))
