"""The queue and the end of things: full, fair, late, hung up, drained, crashed. Rounds wait at a gate, so nothing is
left to chance."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server_world import PATIENCE, Running, ToyWriter, make_llm, soon, start, until

from outrider.server.queue import engine_thread
from outrider.server.queue.observers import RoundFinished, SequenceFinished

URL = "/v1/completions"
LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}


def hold(running: Running) -> None:
    """Close the gate and wait until no pass is under way."""
    running.target.gate.clear()


def in_background(pool: ThreadPoolExecutor, running: Running, **body: Any):
    return pool.submit(running.post, URL, **LONG | body)


def test_a_full_queue_is_a_429_and_those_admitted_finish(serve):
    running = serve(max_batch=2, max_queue=3)
    hold(running)
    with ThreadPoolExecutor(8) as pool:
        asked = [in_background(pool, running, seed=i, max_tokens=5) for i in range(5)]
        until(lambda: running.engine_thread.snapshot().running + running.engine_thread.snapshot().waiting == 5)
        refused = [running.post(URL, **LONG) for _ in range(10)]
        assert {answer.status_code for answer in refused} == {429}
        assert all(1 <= int(answer.headers["retry-after"]) <= 60 for answer in refused)
        assert refused[0].json()["error"]["code"] == "queue_full"
        assert refused[0].json()["error"]["type"] == "rate_limit_error"
        running.target.gate.set()
        assert [each.result().status_code for each in asked] == [200] * 5
    assert running.post(URL, **LONG | {"n": 6}).status_code == 400  # would never fit
    running.llm.engine.check()


def test_each_client_gets_its_turn(serve):
    running = serve(max_batch=1, api_keys=("first-key-1", "second-key-2"))
    order: list[str] = []
    running.engine_thread.observers.append(
        lambda what: order.append(what.client) if isinstance(what, SequenceFinished) else None
    )
    hold(running)
    clients = [
        httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE)
        for key in ("first-key-1", "second-key-2")
    ]
    with ThreadPoolExecutor(12) as pool:
        for count, client in ((6, clients[0]), (2, clients[1])):
            waiting = running.engine_thread.snapshot().waiting + running.engine_thread.snapshot().running
            for _ in range(count):
                pool.submit(client.post, URL, json=LONG | {"max_tokens": 2})
            until(
                lambda total=waiting + count: (
                    sum((running.engine_thread.snapshot().waiting, running.engine_thread.snapshot().running)) == total
                )
            )
        running.target.gate.set()
    one, other = order[0], next(client for client in order if client != order[0])
    # the first text was running when the second client came; from then on they take turns
    assert order == [one, one, other, one, other, one, one, one] or order == [
        one,
        other,
        one,
        other,
        one,
        one,
        one,
        one,
    ]
    for client in clients:
        client.close()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("running_already", [True, False], ids=["running", "waiting"])
def test_a_client_that_hangs_up_frees_its_pages_within_a_round(serve, stream: bool, running_already: bool):
    running = serve(max_batch=1)
    rounds: list[RoundFinished] = []
    running.engine_thread.observers.append(
        lambda what: rounds.append(what) if isinstance(what, RoundFinished) else None
    )
    hold(running)
    if not running_already:
        blocker = threading.Thread(target=running.post, args=(URL,), kwargs=LONG | {"max_tokens": 3})
        blocker.start()
        until(running.target.entered.is_set)
    others = len(running.engine_thread._jobs)
    with closing(HTTPConnection(running.url.removeprefix("http://"), timeout=PATIENCE)) as connection:
        body = json.dumps(LONG | {"prompt": "b" * 40, "stream": stream})
        connection.request("POST", URL, body, {"content-type": "application/json"})
        until(lambda: len(running.engine_thread._jobs) == others + 1)  # hung up sooner, it would never be queued
        until(running.target.entered.is_set)
    until(lambda: running.engine_thread._cancelled)  # the server has noticed, while no round can end
    before = len(rounds)
    running.target.gate.set()
    until(lambda: running.engine_thread.snapshot().running + running.engine_thread.snapshot().waiting == 0)
    until(lambda: running.engine_thread.snapshot().pages_used == 0)
    if running_already:
        assert len(rounds) - before <= 2  # the one that was under way, and the one that dropped it
    else:
        blocker.join()
    running.llm.engine.check()
    assert running.post(URL, **LONG | {"max_tokens": 2}).status_code == 200


NEXT_PASSES = 500
"""In which the next request is answered; texts that hung up and were kept, as many as may wait, would take 10,000."""


def test_two_hundred_that_hang_up_leave_nothing(serve):
    running = serve()
    target = running.target

    def knock(i: int) -> None:
        connection = HTTPConnection(running.url.removeprefix("http://"), timeout=0.1)
        body = json.dumps(LONG | {"stream": i % 2 == 0, "seed": i, "n": 4})
        with closing(connection), suppress(TimeoutError):
            connection.request("POST", URL, body, {"content-type": "application/json"})
            connection.getresponse().read()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(knock, range(200)))
    before = target.passes
    assert running.post(URL, prompt="a", max_tokens=2).status_code == 200
    assert target.passes - before < NEXT_PASSES
    until(lambda: target.pool.used == 0)
    running.llm.engine.check()


def test_a_deadline_ends_what_waits_and_what_runs(serve, monkeypatch: pytest.MonkeyPatch):
    running = serve(max_batch=1, deadline=600.0)
    later = 0.0
    clock: Callable[[], float] = time.perf_counter
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(perf_counter=lambda: clock() + later))
    hold(running)
    with ThreadPoolExecutor(4) as pool:
        first = in_background(pool, running)
        until(running.target.entered.is_set)
        second = in_background(pool, running, stream=True)
        until(lambda: running.engine_thread.snapshot().waiting == 1)
        later = 600.0
        running.target.gate.set()
        assert first.result().status_code == 503
        assert first.result().json()["error"]["code"] == "deadline_exceeded"
        assert '"code": "deadline_exceeded"' in second.result().text
        assert "[DONE]" not in second.result().text
    until(lambda: running.target.pool.used == 0)
    running.llm.engine.check()


def test_draining_finishes_what_was_taken_and_takes_no_more(serve):
    running = serve(max_batch=1)
    hold(running)
    with ThreadPoolExecutor(4) as pool:
        asked = [in_background(pool, running, max_tokens=4) for _ in range(3)]
        until(lambda: running.engine_thread.snapshot().waiting + running.engine_thread.snapshot().running == 3)
        running.engine_thread.drain(PATIENCE)
        refused = running.post(URL, **LONG)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) >= 1
        assert running.http.get("/health").status_code == 503
        running.target.gate.set()
        assert [each.result().status_code for each in asked] == [200] * 3
    assert running.engine_thread.stopped.wait(PATIENCE)
    assert running.target.pool.used == 0


def test_draining_ends_when_its_time_is_up(serve):
    running = serve()
    hold(running)
    with ThreadPoolExecutor(2) as pool:
        asked = in_background(pool, running, stream=True)
        until(running.target.entered.is_set)
        running.engine_thread.drain(0)
        running.target.gate.set()
        assert '"code": "shutting_down"' in asked.result().text


def test_a_crashed_engine_is_told_of_within_a_second(serve):
    running = serve()
    hold(running)
    with ThreadPoolExecutor(4) as pool:
        streamed, whole = in_background(pool, running, stream=True), in_background(pool, running)
        until(lambda: running.engine_thread.snapshot().running + running.engine_thread.snapshot().waiting == 2)
        running.target.crash = True
        running.target.gate.set()
        soon(lambda: running.http.get("/health").status_code == 503)
        last = streamed.result().text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        assert whole.result().status_code == 503
    assert running.engine_thread.state == "dead"
    refused = running.post(URL, **LONG)
    assert refused.status_code == 503
    for text in (refused.text, whole.result().text, streamed.result().text):
        assert "0x7f00dead" not in text
        assert "secret" not in text
    running.server.handle_exit(signal.SIGTERM, None)  # what is dead can still be told to go
    running.thread.join(PATIENCE)
    assert not running.thread.is_alive()


def test_health_is_503_while_the_model_loads():
    ready = threading.Event()
    running = start(load=lambda: (ready.wait(PATIENCE), make_llm(ToyWriter()))[1], wait=False)
    try:
        answer = running.http.get("/health")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_loading"
        assert running.post(URL, **LONG).status_code == 503
        assert running.http.get("/version").status_code == 200
        ready.set()
        until(lambda: running.http.get("/health").status_code == 200)
        assert running.post(URL, **LONG | {"max_tokens": 2}).status_code == 200
    finally:
        ready.set()
        running.stop()


def test_requests_together_say_what_each_says_alone(serve):
    running = serve(max_batch=3)
    alone = make_llm(drafter="none")
    from outrider.core.sampling import SamplingParams

    with ThreadPoolExecutor(8) as pool:
        asked = {i: in_background(pool, running, seed=i, prompt="ab" * (i + 1), max_tokens=30) for i in range(12)}
        for i, answer in asked.items():
            params = SamplingParams(temperature=1.0, seed=i, max_tokens=30, ignore_eos=True)
            assert answer.result().json()["choices"][0]["text"] == alone.generate("ab" * (i + 1), params).text
    running.llm.engine.check()
    assert running.target.pool.used == 0
