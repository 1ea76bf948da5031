"""What goes wrong inside: the engine crashes in the middle of streams, one text turns to NaN, ten times too much is
asked for. Texts that finish are those the offline engine writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from server_world import PATIENCE, Running, make_llm, soon, until

from outrider import SamplingParams

URL = "/v1/completions"
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}


def offline(prompt: str, seed: int, max_tokens: int) -> str:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=max_tokens, ignore_eos=True)
    return make_llm(drafter="none").generate(prompt, params).text


class Stream:
    """Reads a stream in a thread of its own; `first` is set with its first words."""

    def __init__(self, running: Running, **body: Any) -> None:
        self.first, self.lines = threading.Event(), list[str]()
        self.thread = threading.Thread(target=self._read, args=(running, LONG | {"stream": True} | body))
        self.thread.start()

    def _read(self, running: Running, body: dict[str, Any]) -> None:
        with httpx.stream("POST", f"{running.url}{URL}", json=body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line:
                    self.lines.append(line.removeprefix("data: "))
                    self.first.set()

    @property
    def chunks(self) -> list[dict[str, Any]]:
        self.thread.join(PATIENCE)
        return [json.loads(line) for line in self.lines if line != "[DONE]"]

    @property
    def text(self) -> str:
        return "".join(choice["text"] for chunk in self.chunks for choice in chunk.get("choices", ()))


def test_a_crash_in_the_middle_ends_open_streams_and_all_that_waits(serve: Callable[..., Running]):
    running = serve(max_batch=2)
    running.target.gate.clear()
    streams = [Stream(running, seed=seed, max_tokens=250) for seed in range(2)]
    until(lambda: running.engine_thread.snapshot().running + running.engine_thread.snapshot().waiting == 2)
    running.target.last_pass = 5  # both have begun, and neither can have ended
    running.target.gate.set()
    for stream in streams:
        assert stream.first.wait(PATIENCE)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(running.post, URL, **LONG | {"seed": seed}) for seed in range(4)]
        late = Stream(running)
        until(lambda: running.engine_thread.snapshot().waiting == 5)
        running.target.crash = True
        running.target.gate.set()
        soon(lambda: running.http.get("/health").status_code == 503)
        assert [each.result().status_code for each in waiting] == [503] * 4
        assert {each.result().json()["error"]["code"] for each in waiting} == {"engine_dead"}
    for seed, stream in enumerate(streams):
        *told, last = stream.chunks
        assert last["error"]["code"] == "engine_dead"
        assert "[DONE]" not in stream.lines
        assert told
        assert offline("a", seed, 250).startswith(stream.text)  # what was told before stands
    assert late.chunks[-1]["error"]["code"] == "engine_dead"
    assert running.engine_thread.snapshot().running == running.engine_thread.snapshot().waiting == 0


def test_a_text_that_turns_to_nan_leaves_the_others_in_its_rounds_alone(serve: Callable[..., Running]):
    running = serve(max_batch=4)
    running.target.poison = ord("%")
    running.target.gate.clear()
    good = [Stream(running, seed=seed, prompt="ab" * seed) for seed in (1, 2)]
    until(lambda: running.engine_thread.snapshot().running + running.engine_thread.snapshot().waiting == 2)
    bad = Stream(running, prompt="50%")
    # good at first, then writes the poison itself; the salt keeps others from drafting it
    half = Stream(running, prompt="c", seed=9, cache_salt="half", logit_bias={str(ord("%")): 14})
    until(lambda: running.engine_thread.snapshot().running + running.engine_thread.snapshot().waiting == 4)
    running.target.gate.set()
    assert bad.chunks[-1]["error"]["code"] == "model_error"
    assert half.chunks[-1]["error"]["code"] == "model_error"
    assert half.text.endswith("%")
    for seed, stream in zip((1, 2), good, strict=True):
        assert stream.text == offline("ab" * seed, seed, 200)
        assert stream.lines[-1] == "[DONE]"
    until(lambda: running.target.pool.used == 0)
    running.llm.engine.check()


def test_ten_times_what_the_queue_holds(serve: Callable[..., Running]):
    """Nobody gets anything but an answer or a 429 that says when to come back; coming back brings the answer."""
    running, queue, batch = serve(max_batch=4, max_queue=8), 8, 4
    total = 10 * queue
    running.target.gate.clear()
    ready = threading.Barrier(total)

    def ask(seed: int) -> httpx.Response:
        body = {"prompt": "ab", "max_tokens": 12, "ignore_eos": True, "seed": seed, "stream": seed % 2 == 0}
        ready.wait(PATIENCE)
        return httpx.post(f"{running.url}{URL}", json=body, timeout=PATIENCE)

    with ThreadPoolExecutor(total) as pool:
        asked = {seed: pool.submit(ask, seed) for seed in range(total)}
        until(lambda: sum(each.done() for each in asked.values()) == total - queue - batch)
        running.target.gate.set()
        answers = {seed: each.result() for seed, each in asked.items()}
    taken = {seed: answer for seed, answer in answers.items() if answer.status_code == 200}
    assert len(taken) == queue + batch
    for seed, answer in answers.items():
        if seed in taken:
            assert _said(answer) == offline("ab", seed, 12)
        else:
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 60
            assert answer.json()["error"]["code"] == "queue_full"
    again = next(seed for seed in answers if seed not in taken)
    body = {"prompt": "ab", "max_tokens": 12, "ignore_eos": True, "seed": again}
    assert _said(running.post(URL, **body)) == offline("ab", again, 12)
    until(lambda: running.target.pool.used == 0)
    running.llm.engine.check()


def _said(answer: httpx.Response) -> str:
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]["text"]
    *chunks, done = answer.text.strip().split("\n\n")
    assert done == "data: [DONE]"
    told = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    return "".join(choice["text"] for chunk in told for choice in chunk["choices"])
