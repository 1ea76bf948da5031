"""A server under random requests for minutes or hours, a third of them abandoned; at the end nothing may be left over.

    python tests/server/soak.py [--minutes 3] [--clients 6] [--cases 300] [--seed 0] [--drafter SPEC]

The server is a process of its own with a tiny random model, little cache and a small batch,
so that texts wait, share pages and are preempted. `--cases` distinct requests are first
answered by the offline engine without a drafter; then they are asked of the server over and
over in random manners (streamed or whole, drafted for or not, with provenance, a prediction,
a salt), and every text that came to its end must be the offline one.

At the end: no text running or waiting, no page in use, `engine.check()` silent, exit code 0
after SIGTERM. Memory is the server's resident set, read every second; the first quarter of
the run is warm-up, and of what follows the median of the last third may be at most 1 % above
that of the first. A run of less than two minutes is too short to judge that. The suffix
drafter is told to remember 4,096 tokens of finished answers, so that it is full, and grows no
more, well before the warm-up ends; by default it remembers 262,144.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from process_world import Process, write_tiny_model
from soak_cases import Case, Manner, Said, expected_of, random_case, random_manner

from outrider import LLM

CONTEXT, CACHE, BATCH, QUEUE = 512, 1024, 8, 64
DRAFTER = "suffix:cached_tokens=4096+prediction"
DRIFT = 0.01
JUDGED_MINUTES = 2.0
Answers = list[tuple[Case, list[Said]]]
"""Each case with what the offline engine says to it."""


@dataclass
class Tally:
    """What came of the requests. Clients add to it together."""

    counts: Counter[str] = field(default_factory=Counter[str])
    problems: list[str] = field(default_factory=list[str])
    memory: list[int] = field(default_factory=list[int])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def problem(self, what: str) -> None:
        with self.lock:
            self.problems.append(what)

    @property
    def drift(self) -> float:
        """How much larger the last third's memory is than the first's, warm-up left out."""
        settled = self.memory[len(self.memory) // 4 :]
        third = len(settled) // 3
        if not third:
            return 0.0
        return statistics.median(settled[-third:]) / statistics.median(settled[:third]) - 1


class Client(threading.Thread):
    """Asks one random case after another until told to stop. The server's drafter takes predictions."""

    def __init__(self, url: str, cases: Answers, tally: Tally, stop: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self.url, self.cases, self.tally, self.stop, self.rng = url, cases, tally, stop, random.Random(seed)

    def run(self) -> None:
        try:
            with httpx.Client(base_url=self.url, timeout=60) as http:
                while not self.stop.is_set():
                    case, expected = self.rng.choice(self.cases)
                    self._ask(http, case, expected, random_manner(self.rng, case, expected))
        except Exception as error:  # a client that falls silent would let the soak pass
            self.tally.problem(f"client: {error!r}")

    def _ask(self, http: httpx.Client, case: Case, expected: list[Said], manner: Manner) -> None:
        body = case.body() | manner.extra | {"stream": manner.stream}
        try:
            told = (_streamed if manner.stream else _whole)(http, case.path, body, manner.leave_after)
        except (httpx.ReadTimeout, TimeoutError):
            self.tally.add("abandoned")
            return
        self.tally.add("refused" if told is None else "finished")
        if told not in (None, expected):
            self.tally.problem(f"{json.dumps(body)}\n  offline: {expected}\n  served:  {told}")


def _whole(http: httpx.Client, path: str, body: dict[str, Any], leave_after: float | None) -> list[Said] | None:
    answer = http.post(path, json=body, timeout=httpx.Timeout(60, read=leave_after or 60))
    if answer.status_code == 429:
        return None
    answer.raise_for_status()
    return [
        Said(each["text"] if "text" in each else each["message"]["content"] or "", each["finish_reason"])
        for each in answer.json()["choices"]
    ]


def _streamed(http: httpx.Client, path: str, body: dict[str, Any], leave_after: float | None) -> list[Said] | None:
    texts, finishes = [""] * body["n"], [""] * body["n"]
    end = time.monotonic() + (leave_after or 60)
    with http.stream("POST", path, json=body, timeout=httpx.Timeout(60, read=leave_after or 60)) as answer:
        if answer.status_code == 429:
            return None
        answer.raise_for_status()
        for line in answer.iter_lines():
            if time.monotonic() > end:
                raise TimeoutError
            if line == "data: [DONE]":
                return [Said(*each) for each in zip(texts, finishes, strict=True)]
            for choice in json.loads(line.removeprefix("data: "))["choices"] if line else ():
                texts[choice["index"]] += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                finishes[choice["index"]] = choice["finish_reason"] or finishes[choice["index"]]
    raise ConnectionError("a stream ended without [DONE]")


class Soaked(Process):
    """The server, of this file's own making: it checks its engine when it ends, and says what it found."""

    def __init__(self, folder: Path, drafter: str) -> None:
        command = [sys.executable, __file__, "--serve", str(folder), "--drafter", drafter]
        self._start(command, stdout=subprocess.PIPE)

    def verdict(self) -> dict[str, Any]:
        """End it as an operator would."""
        self.popen.send_signal(signal.SIGTERM)
        assert self.popen.stdout
        last = self.popen.stdout.read().strip().splitlines()[-1:]
        code = self.popen.wait(60)
        return (json.loads(last[0]) if last else {"check": "nothing was said"}) | {"exit_code": code}


def serve(folder: str, drafter: str) -> None:
    """What the server's process does."""
    from outrider.server.app import create_app
    from outrider.server.ops.logs import set_up_logs
    from outrider.server.queue.engine_thread import EngineThread
    from outrider.server.queue.local_engine import LocalEngine
    from outrider.server.run import listen, run_server
    from outrider.server.settings import Settings

    llm = LLM(folder, drafter=drafter, max_batch=BATCH, context=CONTEXT, cache_tokens=CACHE)
    settings = Settings(served_name="tiny", port=0, max_queue=QUEUE)
    set_up_logs("text")
    listening = listen(settings)
    print(f"listening on http://127.0.0.1:{listening.getsockname()[1]}", file=sys.stderr, flush=True)
    engine_thread = EngineThread(lambda: LocalEngine(llm), QUEUE, lambda _: print("ready", file=sys.stderr, flush=True))
    run_server(create_app(engine_thread, settings), engine_thread, settings, listening)
    try:
        llm.engine.check()
        found = ""
    except Exception as error:  # to be told, whatever it is
        found = repr(error)
    print(json.dumps({"check": found, "pages": llm.engine.target.pool.used}), flush=True)


def soak(server: Soaked, cases: Answers, minutes: float, clients: int, seed: int) -> Tally:
    tally, stop = Tally(), threading.Event()
    threads = [Client(server.url, cases, tally, stop, seed * 1000 + i) for i in range(clients)]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < minutes * 60 and any(thread.is_alive() for thread in threads):
        time.sleep(1)
        tally.memory.append(server.resident)
        if len(tally.memory) % 15 == 0:
            said = ", ".join(f"{count} {what}" for what, count in sorted(tally.counts.items()))
            print(f"{passed:6.0f} s  {server.resident / 1e6:7.1f} MB  {said}, {len(tally.problems)} wrong", flush=True)
    stop.set()
    for thread in threads:
        thread.join(90)
    return tally


def leftovers(server: Soaked) -> list[str]:
    """What is still there once everyone has gone; it gets a few seconds."""
    names = ("outrider_requests_running", "outrider_requests_waiting", "outrider_pages_used")
    end = time.monotonic() + 10
    while (left := {name: server.metric(name) for name in names if server.metric(name)}) and time.monotonic() < end:
        time.sleep(0.1)
    return [f"{name} is {value:g} with nobody asking" for name, value in left.items()]


def main() -> int:
    options = _options()
    if options.serve:
        serve(options.serve, options.drafter)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return _judge(options, write_tiny_model(Path(folder)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter", default=DRAFTER)
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args()


def _judge(options: argparse.Namespace, folder: Path) -> int:
    offline, rng = LLM(str(folder), drafter="none", context=CONTEXT), random.Random(options.seed)
    began = time.monotonic()
    drawn = [random_case(rng) for _ in range(options.cases)]
    cases = [(case, expected_of(offline, case)) for case in drawn]
    print(f"{len(cases)} cases answered offline in {time.monotonic() - began:.0f} s", flush=True)
    server = Soaked(folder, options.drafter)
    try:
        server.until_ready()
        tally = soak(server, cases, options.minutes, options.clients, options.seed)
        problems = tally.problems + leftovers(server)
        preempted, accepted = (
            server.metric(f"outrider_{name}_total") for name in ("preemptions", "spec_accepted_tokens")
        )
        verdict = server.verdict()
    finally:
        server.end()
    if verdict != {"check": "", "pages": 0, "exit_code": 0}:
        problems.append(f"the server's end: {verdict}")
    if options.minutes >= JUDGED_MINUTES and tally.drift > DRIFT:
        problems.append(f"memory grew by {tally.drift:.2%}")
    if not tally.counts["finished"] or not tally.counts["abandoned"]:
        problems.append(f"too little came of it: {dict(tally.counts)}")
    for problem in problems[:20]:
        print(f"WRONG {problem}")
    print(
        f"{dict(tally.counts)}; {preempted:g} preemptions, {accepted:g} drafted tokens accepted; "
        f"memory drift {tally.drift:+.2%}{'' if options.minutes >= JUDGED_MINUTES else ' (too short to judge)'}; "
        f"{len(problems)} problems"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
