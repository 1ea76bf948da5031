"""The server and `EngineClient`: another engine, whose fault an error is, and what reaches the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_world import END, VOCAB, Running, make_llm, make_tokenizer

from outrider.core.outputs import TokenLogprob
from outrider.engine.client import EngineClient, EngineFacts
from outrider.engine.events import Event
from outrider.engine.judged import JudgedDraft
from outrider.engine.prepare import LateWork
from outrider.engine.request import CheckedRequest, Request, validate_request
from outrider.engine.stats import Stats
from outrider.server.app import create_app
from outrider.server.queue.engine_thread import EngineThread
from outrider.server.queue.local_engine import LocalEngine
from outrider.server.run import listen, make_server
from outrider.server.settings import Settings

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
SERVER = Path(__file__).parents[2] / "outrider" / "server"


class EchoScoring:
    """Gives every token the same log-probability."""

    def __init__(self, request: CheckedRequest) -> None:
        self.logprobs = [TokenLogprob(token, -1.0, rank=1) for token in request.request.prompt[1:]]
        self.done = True

    def step(self) -> bool:
        return True

    def close(self) -> None:
        pass


class EchoEngine:
    """An engine without a model: repeats the prompt, a token a round. `error` fails the next request."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        self.facts = EngineFacts(
            model="echo",
            revision="1",
            number_format="float32",
            device="cpu",
            pinned=False,
            weight_bytes=0,
            memory="",
            vocab_size=VOCAB,
            context=64,
            page_count=4,
            page_size=16,
            max_batch=2,
            mode="seeded",
            rule="block",
            drafter="none",
            drafter_aliases=(),
            max_draft_tokens=0,
            uses_prediction=False,
        )
        self.pages_used, self.late_work = 0, LateWork(3, 2, ("a kernel",))
        self.submitted: list[CheckedRequest] = []
        self.error: Event | None = None
        self._running: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def validate(self, request: Request) -> CheckedRequest:
        return CheckedRequest(request, len(request.prompt) + request.params.max_tokens)

    def submit(self, request: CheckedRequest) -> int:
        self.submitted.append(request)
        seq_id = len(self.submitted) - 1
        self._running[seq_id] = 0
        return seq_id

    def step(self) -> list[Event]:
        return [self._next(seq_id) for seq_id in list(self._running)]

    def _next(self, seq_id: int) -> Event:
        if self.error is not None:
            del self._running[seq_id]
            return self.error._replace(seq_id=seq_id, finish="error")
        request, done = self.submitted[seq_id].request, self._running[seq_id]
        token, last = request.prompt[done % len(request.prompt)], done + 1 == request.params.max_tokens
        piece = self.tokenizer.decode([token])
        self._running[seq_id] += 1
        if last:
            del self._running[seq_id]
        judged = JudgedDraft("", 0, 0, 0, 1, rejected=False, round=done)
        finish, stats = ("length", Stats(tokens=done + 1)) if last else (None, None)
        return Event(seq_id, (token,), (piece,), piece, judged=judged, finish=finish, stats=stats)

    def cancel(self, seq_id: int) -> Event | None:
        return Event(seq_id, finish="cancelled") if self._running.pop(seq_id, None) is not None else None

    def score_prompt(self, request: CheckedRequest) -> EchoScoring:
        return EchoScoring(request)

    def stats_of(self, seq_id: int) -> Stats | None:
        return Stats() if seq_id in self._running else None


@pytest.fixture
def echo() -> Iterator[tuple[EchoEngine, httpx.Client]]:
    engine, settings = EchoEngine(), Settings(served_name="echo", port=0)
    client: EngineClient = engine  # the type checker holds it to the protocol
    thread = EngineThread(lambda: client, 4)
    listening = listen(settings)
    server = make_server(create_app(thread, settings), thread, settings)
    thread.start()
    running = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    running.start()
    assert thread.loaded.wait(10)
    with httpx.Client(base_url=f"http://127.0.0.1:{listening.getsockname()[1]}", timeout=20) as http:
        yield engine, http
    thread.drain(0)
    server.should_exit = True
    running.join(10)


def test_another_engine_can_stand_behind_the_server(echo: tuple[EchoEngine, httpx.Client]):
    _, http = echo
    body = {"prompt": "abc", "max_tokens": 3, "echo": True, "logprobs": 0, "n": 2}
    choices = http.post(COMPLETIONS, json=body | {"logprobs": None}).json()["choices"]
    assert [choice["text"] for choice in choices] == ["abcabc", "abcabc"]
    assert http.post(COMPLETIONS, json=body | {"max_tokens": 0, "n": 1}).json()["choices"][0]["logprobs"][
        "token_logprobs"
    ] == [None, -1.0, -1.0]
    assert http.post(CHAT, json={"messages": MESSAGES, "max_tokens": 2, "stream": True}).text.endswith("[DONE]\n\n")
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 64
    metrics = http.get("/metrics").text
    assert "outrider_pages_total 4.0" in metrics
    assert "outrider_compilations_since_ready_total 3.0" in metrics
    assert "outrider_device_allocations_since_ready_total 2.0" in metrics


def test_the_server_knows_no_engine_but_through_its_client():
    for file in SERVER.rglob("*.py"):
        if file.name != "local_engine.py":
            text = file.read_text()
            assert "outrider.llm" not in text, file
            assert "engine.target" not in text, file


@pytest.mark.parametrize(
    ("at_fault", "status", "code"), [("request", 400, "invalid_value"), ("model", 500, "model_error")]
)
@pytest.mark.parametrize("message", ["NaN or infinite is what this request asked for", "nothing can follow"])
def test_an_error_is_the_clients_or_the_servers_by_its_type(
    echo: tuple[EchoEngine, httpx.Client], at_fault: Any, status: int, code: str, message: str
):
    engine, http = echo
    engine.error = Event(0, error=message, at_fault=at_fault)
    answer = http.post(COMPLETIONS, json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert message in answer.json()["error"]["message"]
    corrupted = f"outrider_corrupted_requests_total {float(at_fault == 'model')}"
    assert corrupted in http.get("/metrics").text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_provenance_asks_the_engine_for_no_logprobs(echo: tuple[EchoEngine, httpx.Client], path: str):
    engine, http = echo
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "ab"}
    answer = http.post(path, json=prompt | {"max_tokens": 2, "include_provenance": True})
    assert engine.submitted[-1].request.params.logprobs is None
    assert [each["target_prob"] for each in answer.json()["choices"][0]["provenance"]] == [None, None]


@pytest.mark.parametrize(
    ("path", "body", "calls"),
    [
        (CHAT, {"messages": MESSAGES}, 1),
        (CHAT, {"messages": MESSAGES, "n": 3}, 1),
        (CHAT, {"messages": MESSAGES, "response_format": {"type": "regex", "regex": "ab*"}}, 1),
        (COMPLETIONS, {"prompt": "ab", "echo": True, "logprobs": 1}, 1),
        (COMPLETIONS, {"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0}, 1),
        (COMPLETIONS, {"prompt": ["ab", "cd"], "n": 2}, 2),
    ],
)
def test_each_prompt_is_validated_once_and_not_on_the_engines_thread(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], calls: int
):
    threads: list[str] = []

    def counted(*args: Any) -> CheckedRequest:
        threads.append(threading.current_thread().name)
        return validate_request(*args)

    for module in ("engine.engine", "llm", "server.queue.local_engine"):
        monkeypatch.setattr(f"outrider.{module}.validate_request", counted)
    answer = serve().post(path, **{"max_tokens": 3} | body)
    assert answer.status_code == 200, answer.text
    assert len(threads) == calls
    assert all(name.startswith("outrider-tokenize") for name in threads)


def test_the_local_engine_states_its_facts():
    facts = LocalEngine(make_llm(drafter="suffix+prediction", max_batch=3)).facts
    assert (facts.model, facts.vocab_size, facts.context, facts.max_batch) == ("toy", VOCAB, 256, 3)
    assert facts.max_length == min(256, facts.page_count * facts.page_size) == 256
    assert (facts.drafter, facts.uses_prediction) == ("suffix+prediction", True)
    assert facts.vocab_size > END
