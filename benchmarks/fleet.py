"""The simulator of `outrider plan --fleet` against real servers: throughput of 1 and 2 replicas under a closed load.

    python benchmarks/fleet.py [--replicas 1,2] [--clients 4,8] [--repeats 2] [--clock processor] [--out FILE]

Costs are measured in this process, then replicas are started (`outrider serve`, one thread each) and put under load by
the client of `outrider bench serve`; each request goes to the replica with the fewest under way. The simulator is given
the lengths of those requests.

--clock clock: tokens a second, as they pass. --clock processor, the default: tokens over the seconds of processor time
that the thread of a replica's engine took. That is the same where it is always busy and has a core of its own, and does
not change where other programs take that core. Costs are measured by the same clock, before and after the loads.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

from outrider.advise.prompts import read_prompt_ids
from outrider.bench.client import Client, Outcome
from outrider.bench.load import Load, put_under_load
from outrider.bench.prompts import SUITES, BenchPrompt, read_suite
from outrider.fleet.costs import ServingCosts
from outrider.fleet.measure import measure_costs
from outrider.fleet.simulate import simulate
from outrider.fleet.trace import closed_loop
from outrider.llm import LLM

PROMPTS = 24
"""That costs are measured on."""
MAX_TOKENS = 64
CLOCKS = {"clock": time.perf_counter, "processor": time.process_time}


@dataclass(slots=True)
class Replicas:
    """Servers, and how many requests each has under way. Takes the place of `bench.client.Client`."""

    clients: list[Client]
    processes: list[int]
    under_way: list[int] = field(default_factory=list[int])
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.under_way = [0] * len(self.clients)

    def ask(self, messages: Any, outcome: Outcome, **more: Any) -> Outcome:
        with self.lock:
            at = min(range(len(self.clients)), key=self.under_way.__getitem__)
            self.under_way[at] += 1
        try:
            return self.clients[at].ask(messages, outcome, **more)
        finally:
            with self.lock:
                self.under_way[at] -= 1

    def processor_ticks(self) -> list[dict[str, int]]:
        """By replica and thread: ticks of the processor since it began."""
        return [
            {task.name: sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13])) for task in tasks}
            for tasks in (Path(f"/proc/{pid}/task").iterdir() for pid in self.processes)
        ]

    def engine_seconds(self, before: list[dict[str, int]]) -> float:
        """Processor time of the engine's thread since then, the mean over replicas: it is the busiest one."""
        now = self.processor_ticks()
        spent = [max(b[task] - a.get(task, 0) for task in b) for a, b in zip(before, now, strict=True)]
        return sum(spent) / len(spent) / os.sysconf("SC_CLK_TCK")


@contextmanager
def replicas(count: int, model: str, drafter: str) -> Iterator[Replicas]:
    """Within, so many servers answer."""
    first = 18100
    words = [sys.executable, "-m", "outrider", "serve", model, "--drafter", drafter, "--threads", "1", "--port"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [*words, str(first + i)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for i in range(count)
    ]
    try:
        for i in range(count):
            _wait(f"http://127.0.0.1:{first + i}/health", started[i])
        options = {"max_tokens": MAX_TOKENS, "temperature": 0}
        clients = [Client(f"http://127.0.0.1:{first + i}/v1", None, options) for i in range(count)]
        model_name = json.loads(urlopen(f"{clients[0].url}/models").read())["data"][0]["id"]  # noqa: S310 - loopback
        yield Replicas([replace(each, model=model_name) for each in clients], [each.pid for each in started])
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(3000):
        if process.poll() is not None:
            raise SystemExit(f"a server ended with {process.returncode}")
        try:
            with urlopen(url) as response:  # noqa: S310 - loopback
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


def costs_of(model: str, drafter: str, clock: str) -> ServingCosts:
    with LLM(model, drafter=drafter, threads=1) as llm:
        prompts = read_prompt_ids(llm.tokenizer, None, PROMPTS, 1024)
        return measure_costs(llm, prompts, lambda _: None, CLOCKS[clock])


def predicted(costs: list[ServingCosts], row: dict[str, Any], served: list[Outcome], clock: str) -> float:
    """Tokens a second, from costs measured before and after. By processor time: while every replica is busy."""
    lengths = [(max(1, each.prompt_tokens - (each.cached_tokens or 0)), each.output_tokens) for each in served]
    load, count = closed_loop(lengths, row["clients"]), row["replicas"]
    runs = [simulate(load, each, count, speculate=row["drafts"]) for each in costs]
    seconds = [run.seconds if clock == "clock" else run.busy / count for run in runs]
    return sum(output for _, output in lengths) / (sum(seconds) / len(seconds))


def load_once(fleet: Replicas, prompts: list[BenchPrompt], clients: int, off: bool, salt: str) -> dict[str, Any]:
    options: dict[str, Any] = {"cache_salt": salt} | ({"speculation": {"off": True}} if off else {})
    before = fleet.processor_ticks()
    count = len(prompts)  # each once: a drafter that remembers answers would draft a second one whole
    outcomes, seconds = put_under_load(fleet, prompts, Load(concurrency=clients), count=count, **options)  # pyright: ignore[reportArgumentType]
    failed = [each.error for each in outcomes if each.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    tokens = sum(each.output_tokens for each in outcomes)
    return {"outcomes": outcomes, "clock": tokens / seconds, "processor": tokens / fleet.engine_seconds(before)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--clients", default="4,8")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="processor")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prompts = [read_suite(name)[i] for i in range(3) for name in SUITES if name != "multi-turn"]
    rows: list[dict[str, Any]] = []
    before = costs_of(given.model, given.drafter, given.clock)
    for count in map(int, given.replicas.split(",")):
        for repeat in range(given.repeats):
            runs: list[tuple[dict[str, Any], list[Outcome]]] = []
            with replicas(count, given.model, given.drafter) as fleet:
                load_once(
                    fleet, prompts[:2], 2, False, "first"
                )  # the first requests pay for what later ones find ready
                for clients in map(int, given.clients.split(",")):
                    for drafts in (False, True):
                        found = load_once(fleet, prompts, clients, not drafts, f"{repeat} {clients} {drafts}")
                        row = {"replicas": count, "clients": clients, "drafts": drafts, "repeat": repeat}
                        runs.append((row | {"measured": found[given.clock]}, found["outcomes"]))
            after = costs_of(given.model, given.drafter, given.clock)
            for row, outcomes in runs:
                row["predicted"] = predicted([before, after], row, outcomes, given.clock)
                row["ratio"] = row["predicted"] / row["measured"]
                rows.append(row)
                print(json.dumps(row), flush=True)
            before = after
            if given.out is not None:
                given.out.write_text(json.dumps({"clock": given.clock, "rows": rows}, indent=1) + "\n")
    for count in sorted({row["replicas"] for row in rows}):
        ratios = sorted(row["ratio"] for row in rows if row["replicas"] == count)
        told = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        print(f"{count} replicas, by {given.clock}: predicted / measured {told}")


if __name__ == "__main__":
    main()
