"""Before the queue: who may have prompts tokenized and grammars compiled, in which turn, until when; and what is told
of texts that were refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from server_world import Running, ToyWriter, make_llm, make_tokenizer, until

from outrider.core.errors import RequestError
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.server import service
from outrider.server.queue.jobs import QueueFull
from outrider.server.queue.local_engine import LocalEngine
from outrider.server.queue.observers import SequenceFinished

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OF_ONE_CLIENT = 3  # of the four threads that tokenize, and of the four that compile


class Slow:
    """Stands for a function that takes long: holds everyone who calls it until `gate` opens."""

    def __init__(self, real: Any) -> None:
        self.real, self.gate = real, threading.Event()
        self.calls: list[Any] = []
        self.threads: list[str] = []
        self.left = 0

    def __call__(self, body: Any, *rest: Any) -> Any:
        self.calls.append(body)
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(20)
        self.left += 1
        return self.real(body, *rest)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Slow]]:
    """slow(name) puts a Slow in the place of a function the service calls."""
    made: list[Slow] = []

    def call(name: str) -> Slow:
        made.append(Slow(getattr(service, name)))
        monkeypatch.setattr(service, name, made[-1])
        return made[-1]

    yield call
    for each in made:
        each.gate.set()


def structured(regex: str) -> dict[str, Any]:
    content = [{"role": "user", "content": "x"}]
    return {"messages": content, "max_tokens": 4, "response_format": {"type": "regex", "regex": regex}}


def ask(running: Running, path: str, body: dict[str, Any]) -> HTTPConnection:
    """Ask and do not wait; closing the connection is hanging up."""
    connection = HTTPConnection(running.url.removeprefix("http://"), timeout=20)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def test_a_full_queue_refuses_before_anything_is_tokenized_or_compiled(
    serve: Callable[..., Running], slow: Callable[[str], Slow]
):
    running = serve(max_batch=1, max_queue=0)
    running.target.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(running.post, COMPLETIONS, prompt="a", max_tokens=2)
        until(running.target.entered.is_set)
        spies = [slow(name) for name in ("translate_completion", "translate_chat", "compile_structured_output")]
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, structured("ab"))):
            refused = running.post(path, **body)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert [spy.calls for spy in spies] == [[], [], []]
        running.target.gate.set()
        assert first.result().status_code == 200


def test_prompts_are_tokenized_by_a_few_threads_of_their_own(
    serve: Callable[..., Running], slow: Callable[[str], Slow]
):
    running = serve()
    translating = slow("translate_completion")
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(running.post, COMPLETIONS, prompt="a", max_tokens=1) for _ in range(10)]
        until(lambda: len(translating.calls) == OF_ONE_CLIENT)
        until(lambda: running.engine_thread._reserved.total() == 10)
        assert len(translating.calls) == OF_ONE_CLIENT
        assert all(name.startswith("outrider-tokenize") for name in translating.threads)
        translating.gate.set()
        assert {each.result().status_code for each in asked} == {200}
    assert len(translating.calls) == 10


def test_grammars_that_wait_count_as_texts_that_wait(serve: Callable[..., Running], slow: Callable[[str], Slow]):
    running = serve(max_batch=1, max_queue=5)
    compiling = slow("compile_structured_output")
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(running.post, CHAT, **structured(f"a{{{i}}}")) for i in range(1, 7)]
        until(lambda: running.engine_thread._reserved.total() == 6)
        refused = running.post(CHAT, **structured("b"))
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert running.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 429
        compiling.gate.set()
        assert [each.result().status_code for each in asked] == [200] * 6
    assert len(compiling.calls) == 6
    assert not running.engine_thread._reserved
    assert running.post(COMPLETIONS, prompt="a", max_tokens=1).status_code == 200


def test_nothing_is_compiled_for_clients_that_left(serve: Callable[..., Running], slow: Callable[[str], Slow]):
    running = serve()
    compiling = slow("compile_structured_output")
    asked = [ask(running, CHAT, structured(f"a{{{i}}}")) for i in range(1, 13)]
    until(lambda: running.engine_thread._reserved.total() == 12)
    for connection in asked:
        connection.close()
    until(lambda: not running.engine_thread._reserved)
    assert len(compiling.calls) == OF_ONE_CLIENT
    compiling.gate.set()
    answer = running.post(CHAT, **structured("ab"))
    assert answer.json()["choices"][0]["message"]["content"] == "ab"
    assert len(compiling.calls) == OF_ONE_CLIENT + 1  # those that had begun, and this one


@pytest.mark.parametrize(
    ("name", "path", "body"),
    [
        ("compile_structured_output", CHAT, structured("ab")),
        ("translate_chat", CHAT, {"messages": structured("ab")["messages"]}),
        ("translate_completion", COMPLETIONS, {"prompt": "a", "stream": True}),
    ],
)
def test_the_deadline_counts_what_comes_before_the_queue(
    serve: Callable[..., Running], slow: Callable[[str], Slow], name: str, path: str, body: dict[str, Any]
):
    running = serve(deadline=0.2)
    held = slow(name)
    late = running.post(path, **body)
    assert held.left == 0  # told while the work still went on
    assert late.status_code == 503
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert not running.engine_thread._reserved


def test_an_echo_and_its_choices_have_one_deadline(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch):
    running = serve()
    jobs: list[Any] = []
    real = running.engine_thread.submit
    monkeypatch.setattr(
        running.engine_thread, "submit", lambda *args, **named: jobs.append(real(*args, **named)) or jobs[-1]
    )
    assert running.post(COMPLETIONS, prompt="ab", echo=True, logprobs=0, max_tokens=2).status_code == 200
    assert len(jobs) == 2  # one scores the prompt, one writes
    assert jobs[0].owner.deadline == jobs[1].owner.deadline


def test_a_text_refused_when_it_is_admitted_is_told_of(serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch):
    running = serve()
    ended: list[SequenceFinished] = []
    running.engine_thread.observers.append(
        lambda what: ended.append(what) if isinstance(what, SequenceFinished) else None
    )

    def refuse(_: Any) -> list[int]:
        raise RequestError("this text is refused here")

    with monkeypatch.context() as patched:
        patched.setattr(running.llm.engine, "submit", refuse)
        answer = running.post(COMPLETIONS, prompt="ab", n=3, max_tokens=2)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "this text is refused here"
        until(lambda: len(ended) == 3)
    assert [what.event.finish for what in ended] == ["error", "cancelled", "cancelled"]
    assert ended[0].event.error == "this text is refused here"
    assert [what.admitted for what in ended] == [None] * 3
    assert 'outrider_requests_total{finish_reason="error"} 1.0' in running.http.get("/metrics").text
    assert running.post(COMPLETIONS, prompt="ab", max_tokens=2).status_code == 200


def fingerprint(loaded: LoadedModel, **options: Any) -> str:
    given: dict[str, Any] = {"drafter": "suffix"} | options
    llm = LLM(loaded, **given)
    return service.Service(SimpleNamespace(engine=LocalEngine(llm)), None).fingerprint  # pyright: ignore[reportArgumentType]


def test_the_fingerprint_changes_with_whatever_may_change_a_text():
    plain = LoadedModel("toy", Path("toy"), ToyWriter(), make_tokenizer(), "float32")
    elsewhere = ToyWriter()
    elsewhere.device = torch.device("meta")
    prints = {
        "plain": fingerprint(plain),
        "format": fingerprint(replace(plain, format="int8")),
        "commit": fingerprint(replace(plain, folder=Path("models") / "0123abc")),
        "pinned": fingerprint(replace(plain, pinned=True)),
        "context": fingerprint(replace(plain, target=ToyWriter(context=128))),
        "device": fingerprint(replace(plain, target=elsewhere)),
        "block": fingerprint(plain, mode="distribution", rule="block"),
        "token": fingerprint(plain, mode="distribution", rule="token"),
        "drafter": fingerprint(plain, drafter="none"),
    }
    assert len(set(prints.values())) == len(prints)
    assert fingerprint(replace(plain, target=ToyWriter())) == prints["plain"]


def test_clients_take_turns_at_a_thread():
    async def run() -> list[str]:
        pool, gate, order = service.FairThreadPool("test", 1), threading.Event(), []
        first = asyncio.create_task(pool.run("a", lambda: gate.wait(10)))
        await asyncio.sleep(0)
        names = ["a1", "a2", "a3", "b1", "a4", "c1"]
        rest = [asyncio.create_task(pool.run(name[0], lambda name=name: order.append(name))) for name in names]
        await asyncio.sleep(0)
        rest[1].cancel()  # a2 leaves
        gate.set()
        await asyncio.gather(first, *rest, return_exceptions=True)
        assert rest[1].cancelled()
        return order

    order = asyncio.run(run())
    assert sorted(order) == ["a1", "a3", "a4", "b1", "c1"]
    assert order[0] == "a1"
    assert set(order[1:3]) == {"b1", "c1"}  # before a's others
    assert order[3:] == ["a3", "a4"]


def test_no_client_has_all_threads():
    async def run() -> list[str]:
        pool, gate, began = service.FairThreadPool("test", 3), threading.Event(), []

        def hold(name: str) -> None:
            began.append(name)
            gate.wait(10)

        held = [asyncio.create_task(pool.run("a", lambda name=name: hold(name))) for name in ("a1", "a2", "a3")]
        while len(began) < 2:
            await asyncio.sleep(0)
        assert await asyncio.wait_for(pool.run("b", lambda: "b1"), 5) == "b1"  # while a waits for a turn
        seen = sorted(began)
        gate.set()
        await asyncio.gather(*held)
        assert await pool.run("a", lambda: "again") == "again"
        assert sorted(began) == ["a1", "a2", "a3"]
        return seen

    assert asyncio.run(run()) == ["a1", "a2"]


def test_a_place_that_was_kept_is_there_to_be_taken():
    engine_thread = service.EngineThread(lambda: LocalEngine(make_llm(ToyWriter(), max_batch=1)), 1)
    engine_thread.start()
    assert engine_thread.loaded.wait(10)
    with engine_thread.reserve(2, "a"), pytest.raises(QueueFull), engine_thread.reserve(1, "a"):
        pass
    with (
        engine_thread.reserve(2, "a"),
        engine_thread.reserve(1, "b"),
    ):  # given back; and b has a share that a cannot take
        pass
    engine_thread.drain(0)
