"""The simulator of `outrider plan --fleet` against real servers: throughput of 1 and 2 replicas under a closed load.

    python benchmarks/fleet.py [--replicas 1,2] [--clients 4,8] [--repeats 2] [--costs FILE] [--out FILE]

Costs are measured in this process, on the prompts that are then sent; replicas are started (`outrider serve`, one
thread each) and put under load by the client of `outrider bench serve`; each request goes to the replica with the
fewest under way. The simulator is given the lengths of those requests. A machine's speed changes from minute to minute
(by a quarter where this was written, with nothing else running): before and after each load rounds of its batch and a
prompt are timed again in this process, and the costs scaled by what they take then. --costs FILE: keeps the table, so
that runs can be short; --out FILE: rows are added to those it has.

--clock clock, the default: tokens a second, as they pass; the simulator is told the machine's cores, and the processor
time of a chunk in the servers' other threads and in the client, as a first load of other prompts showed. --clock
processor: tokens over the seconds of processor time that the thread of a replica's engine took. That is the same
where it is always busy and has a core of its own, and changes little where other programs take that core. Costs
are measured by the same clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
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
from outrider.fleet.costs import ServingCosts, read_costs
from outrider.fleet.measure import PLAIN, Clock, measure_costs, time_reading, time_rounds
from outrider.fleet.simulate import SharedMachine, simulate
from outrider.fleet.trace import closed_loop
from outrider.llm import LLM

MAX_TOKENS = 64
PROMPTS_OF_SUITE = 2
MAX_FOREIGN = 0.05
"""Share of a core that other programs may take during a load that counts."""
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


def machine_seconds() -> float:
    """Processor time of all programs since the machine started, and what it was not given."""
    user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + sum(others)) / TICKS


@contextmanager
def replicas(count: int, model: str, drafter: str) -> Iterator[Replicas]:
    """Within, so many servers answer."""
    first = 18100
    words = [sys.executable, "-m", "outrider", "serve", model, "--drafter", drafter, "--threads", "1", "--port"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [tempfile.TemporaryFile("w+") for _ in range(count)]  # noqa: SIM115 - closed at the end
    started = [
        subprocess.Popen([*words, str(first + i)], env=environment, stdout=log, stderr=log)
        for i, log in enumerate(logs)
    ]
    try:
        for i in range(count):
            _wait(f"http://127.0.0.1:{first + i}/health", started[i])
        options = {"max_tokens": MAX_TOKENS, "temperature": 0}
        clients = [Client(f"http://127.0.0.1:{first + i}/v1", None, options) for i in range(count)]
        model_name = json.loads(urlopen(f"{clients[0].url}/models").read())["data"][0]["id"]  # noqa: S310 - loopback
        yield Replicas([replace(each, model=model_name) for each in clients], [each.pid for each in started])
    except SystemExit:
        for log in logs:
            log.seek(0)
            print(log.read()[-4000:], file=sys.stderr)
        raise
    finally:
        for each, log in zip(started, logs, strict=True):
            each.terminate()
            each.wait()
            log.close()


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


@dataclass(frozen=True, slots=True)
class Yardstick:
    """The engine in this process: what serving costs by a table, and now."""

    llm: LLM
    prompts: list[list[int]]
    clock: Clock
    table: ServingCosts

    def costs(self, batch: int) -> ServingCosts:
        """The table, its rounds and its prompts each scaled by what one of them takes now."""
        table, short = self.table, sorted(self.prompts, key=len)[:batch]
        timed = time_rounds(self.llm, short, batch, PLAIN, self.clock).at(table.context, table.context_seconds)
        rounds = timed.seconds / table.round_cost(batch, False)[0]
        tokens, seconds = table.prompts[-1]
        reading = time_reading(self.llm, self.prompts, tokens, self.clock) / seconds
        return replace(
            table,
            plain=tuple(replace(each, seconds=rounds * each.seconds) for each in table.plain),
            speculative=tuple(replace(each, seconds=rounds * each.seconds) for each in table.speculative),
            prompts=tuple((tokens, reading * seconds) for tokens, seconds in table.prompts),
            context_seconds=rounds * table.context_seconds,
            prompt_context_seconds=reading * table.prompt_context_seconds,
        )


@contextmanager
def yardstick(given: argparse.Namespace, prompts: list[BenchPrompt]) -> Iterator[Yardstick]:
    with LLM(given.model, drafter=given.drafter, threads=1) as llm:
        messages = [[*each.history, {"role": "user", "content": each.turns[0]}] for each in prompts]
        ids, clock = [llm.tokenizer.encode_chat(each) for each in messages], CLOCKS[given.clock]
        if given.costs is not None and given.costs.exists():
            table = read_costs(given.costs)
        else:
            table = measure_costs(llm, ids, lambda _: None, clock)
        if given.costs is not None:
            given.costs.write_text(json.dumps(table.as_json()) + "\n")
        yield Yardstick(llm, ids, clock, table)


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
    before, own, all_before = fleet.processor_ticks(), time.process_time(), machine_seconds()
    count = len(prompts)  # each once: a drafter that remembers answers would draft a second one whole
    outcomes, seconds = put_under_load(fleet, prompts, Load(concurrency=clients), count=count, **options)  # pyright: ignore[reportArgumentType]
    failed = [each.error for each in outcomes if each.error]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0]}")
    tokens, chunks = sum(each.output_tokens for each in outcomes), sum(len(each.pieces) for each in outcomes)
    engine, rest = fleet.seconds(before)
    rest += time.process_time() - own
    foreign = (machine_seconds() - all_before - engine * len(fleet.clients) - rest) / seconds
    rates = {"clock": tokens / seconds, "processor": tokens / engine}
    return rates | {"outcomes": outcomes, "beside": rest / chunks, "foreign": foreign}


def run(given: argparse.Namespace, measure: Yardstick, prompts: list[BenchPrompt]) -> Iterator[dict[str, Any]]:
    """A row for each load, repetition by repetition."""
    others = [read_suite(name)[3] for name in SUITES if name != "multi-turn"]
    for count in map(int, given.replicas.split(",")):
        with replicas(count, given.model, given.drafter) as fleet:
            load_once(fleet, others[:2], 2, False, "first")  # pays for what later ones find ready
            beside = load_once(fleet, others[2:], 4, True, "second")["beside"]
            machine = SharedMachine(os.cpu_count() or 1, beside) if given.clock == "clock" else None
            cases = [(int(each), drafts) for each in given.clients.split(",") for drafts in (False, True)]
            for repeat, (clients, drafts) in itertools.product(range(given.repeats), cases):
                row = {"replicas": count, "clients": clients, "drafts": drafts, "repeat": repeat}
                batch = min(-(-clients // count), measure.table.max_batch)
                before = measure.costs(batch)
                found = load_once(fleet, prompts, clients, not drafts, f"{time.time()} {clients} {drafts}")
                costs = [before, measure.costs(batch)]
                row |= {"measured": found[given.clock], "beside_ms": 1e3 * beside, "foreign": found["foreign"]}
                row["predicted"] = predicted(costs, row, found["outcomes"], machine)
                row["ratio"] = row["predicted"] / row["measured"]
                row["round_ms"] = [1e3 * each.round_cost(batch, False)[0] for each in costs]
                yield row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="suffix")
    parser.add_argument("--replicas", default="1,2")
    parser.add_argument("--clients", default="4,8")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="clock")
    parser.add_argument("--costs", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    prompts = [read_suite(name)[i] for i in range(PROMPTS_OF_SUITE) for name in SUITES if name != "multi-turn"]
    rows: list[dict[str, Any]] = []
    if given.out is not None and given.out.exists():
        rows = json.loads(given.out.read_text())["rows"]
    with yardstick(given, prompts) as measure:
        for row in run(given, measure, prompts):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if given.out is not None:
                given.out.write_text(json.dumps({"clock": given.clock, "rows": rows}, indent=1) + "\n")
    for count in sorted({row["replicas"] for row in rows}):
        found = [row for row in rows if row["replicas"] == count]
        ratios = sorted(row["ratio"] for row in found if row["foreign"] < MAX_FOREIGN)
        told = f"{median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})" if ratios else "unknown"
        left = f"{len(found) - len(ratios)} of {len(found)} loads left out: other programs ran"
        print(f"{count} replicas, by {given.clock}: predicted / measured {told}; {left}")


if __name__ == "__main__":
    main()
