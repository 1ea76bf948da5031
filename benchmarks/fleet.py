"""The simulator of `outrider plan --fleet` against real servers: throughput of 1 and 2 replicas under a closed load.

    python benchmarks/fleet.py [--replicas 1,2] [--clients 4,8] [--repeats 2] [--clock processor] [--out FILE]

Costs are measured in this process, on the prompts that are then sent; replicas are started (`outrider serve`, one
thread each) and put under load by the client of `outrider bench serve`; each request goes to the replica with the
fewest under way. The simulator is given the lengths of those requests.

--clock clock: tokens a second, as they pass; the simulator is told the machine's cores, and the processor time of a
token in the servers' other threads and in the client, as a first load of other prompts showed. --clock processor,
the default: tokens over the seconds of processor time that the thread of a replica's engine took. That is the same
where it is always busy and has a core of its own, and changes little where other programs take that core. Costs
are measured by the same clock, before and after the loads.
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

from outrider.bench.client import Client, Outcome
from outrider.bench.load import Load, put_under_load
from outrider.bench.prompts import SUITES, BenchPrompt, read_suite
from outrider.fleet.costs import ServingCosts
from outrider.fleet.measure import measure_costs
from outrider.fleet.simulate import SharedMachine, simulate
from outrider.fleet.trace import closed_loop
from outrider.llm import LLM

MAX_TOKENS = 64
TICKS = os.sysconf("SC_CLK_TCK")
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

    def seconds(self, before: list[dict[str, int]]) -> tuple[float, float]:
        """Processor time since then: of the engine's thread, which is the busiest, the mean over replicas; and of all
        other threads together."""
        spent = [
            sorted(b[task] - a.get(task, 0) for task in b) for a, b in zip(before, self.processor_ticks(), strict=True)
        ]
        engines, others = sum(each[-1] for each in spent) / len(spent), sum(sum(each[:-1]) for each in spent)
        return engines / TICKS, others / TICKS


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


def costs_of(model: str, drafter: str, clock: str, prompts: list[BenchPrompt]) -> ServingCosts:
    with LLM(model, drafter=drafter, threads=1) as llm:
        messages = [[*each.history, {"role": "user", "content": each.turns[0]}] for each in prompts]
        ids = [llm.tokenizer.encode_chat(each) for each in messages]
        return measure_costs(llm, ids, lambda _: None, CLOCKS[clock])


def predicted(
    costs: list[ServingCosts], row: dict[str, Any], served: list[Outcome], machine: SharedMachine | None
) -> float:
    """Tokens a second, from costs measured before and after. machine: None by processor time, while all are busy."""
    lengths = [(max(1, each.prompt_tokens - (each.cached_tokens or 0)), each.output_tokens) for each in served]
    load, count = closed_loop(lengths, row["clients"]), row["replicas"]
    runs = [simulate(load, each, count, speculate=row["drafts"], machine=machine) for each in costs]
    seconds = [run.seconds if machine is not None else run.busy / count for run in runs]
    return sum(output for _, output in lengths) / (sum(seconds) / len(seconds))


def load_once(fleet: Replicas, prompts: list[BenchPrompt], clients: int, off: bool, salt: str) -> dict[str, Any]:
    options: dict[str, Any] = {"cache_salt": salt} | ({"speculation": {"off": True}} if off else {})
    before, own = fleet.processor_ticks(), time.process_time()
    count = len(prompts)  # each once: a drafter that remembers answers would draft a second one whole
    outcomes, seconds = put_under_load(fleet, prompts, Load(concurrency=clients), count=count, **options)  # pyright: ignore[reportArgumentType]
    failed = [each.error for each in outcomes if each.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    tokens = sum(each.output_tokens for each in outcomes)
    engine, others = fleet.seconds(before)
    beside = (others + time.process_time() - own) / tokens
    return {"outcomes": outcomes, "clock": tokens / seconds, "processor": tokens / engine, "beside": beside}


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
    others = [read_suite(name)[3] for name in SUITES if name != "multi-turn"]
    rows: list[dict[str, Any]] = []
    before = costs_of(given.model, given.drafter, given.clock, prompts)
    for count in map(int, given.replicas.split(",")):
        for repeat in range(given.repeats):
            runs: list[tuple[dict[str, Any], list[Outcome]]] = []
            with replicas(count, given.model, given.drafter) as fleet:
                load_once(fleet, others[:2], 2, False, "first")  # pays for what later ones find ready
                beside = load_once(fleet, others[2:], 4, True, "second")["beside"]
                machine = SharedMachine(os.cpu_count() or 1, beside) if given.clock == "clock" else None
                for clients in map(int, given.clients.split(",")):
                    for drafts in (False, True):
                        found = load_once(fleet, prompts, clients, not drafts, f"{repeat} {clients} {drafts}")
                        row = {"replicas": count, "clients": clients, "drafts": drafts, "repeat": repeat}
                        runs.append((row | {"measured": found[given.clock]}, found["outcomes"]))
            after = costs_of(given.model, given.drafter, given.clock, prompts)
            for row, outcomes in runs:
                row["predicted"] = predicted([before, after], row, outcomes, machine)
                row["ratio"], row["beside_ms"] = row["predicted"] / row["measured"], 1e3 * beside
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
