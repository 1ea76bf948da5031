"""The server under load, compared with Transformers' own on the same weights in the same run.

    python benchmarks/server.py [--model demo] [--clients 1 4 16 64] [--tokens 24] [--packed] [--json FILE]

Each load runs on each server in turn, so that other work on the machine affects all of them. A
client sends a request, reads its stream to the end, and sends the next; temperature 0, float32.
Every request to Outrider has a cache salt of its own, so that nothing is cached.

    tok/s        tokens of all responses over the time from the first request to the last response
    first        seconds from a request to its first token
    per token    seconds between tokens after that, averaged over a response
    whole        seconds from a request to its end

The last three as median / 95th percentile over requests. `same` counts the responses that
are equal to Outrider's without speculation.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, cycle, islice, zip_longest
from pathlib import Path
from typing import Any

import httpx
import torch

from outrider.checkpoints.resolve import resolve

HERE = Path(__file__).parent
PROMPTS: dict[str, list[str]] = json.loads((HERE / "prompts.json").read_text())
PLAIN = "outrider, no drafts"


@dataclass
class System:
    """A server, and what to send it besides the prompt."""

    name: str
    url: str
    model: str
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    salted: bool = True


@dataclass
class Answer:
    """One response and its times, in seconds from the request."""

    text: str = ""
    tokens: int = 0
    first: float = 0.0
    last: float = 0.0
    whole: float = 0.0

    @property
    def per_token(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1)


@dataclass
class Cell:
    """One load on one server."""

    system: str
    clients: int
    seconds: float
    answers: list[Answer]
    same: int = 0

    @property
    def rate(self) -> float:
        return sum(answer.tokens for answer in self.answers) / self.seconds

    def spread(self, name: str) -> tuple[float, float]:
        """Median and 95th percentile."""
        values = sorted(getattr(answer, name) for answer in self.answers)
        return values[len(values) // 2], values[min(len(values) - 1, int(len(values) * 0.95))]


async def stream_chat(http: httpx.AsyncClient, system: System, prompt: str, tokens: int) -> Answer:
    """One streamed chat completion, timed."""
    body: dict[str, Any] = {
        "model": system.model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if system.salted:
        body["cache_salt"] = os.urandom(8).hex()
    answer, began = Answer(), time.perf_counter()
    async with http.stream("POST", f"{system.url}/v1/chat/completions", json=body | system.extra) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(f"{system.name}: {chunk['error']}")
            options = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if options:
                answer.text += options
                answer.last = time.perf_counter() - began
                answer.first = answer.first or answer.last
            if chunk.get("usage"):
                answer.tokens = chunk["usage"]["completion_tokens"]
    answer.whole = time.perf_counter() - began
    return answer


async def run_load(system: System, clients: int, prompts: list[str], tokens: int) -> Cell:
    """Run the prompts with this many clients at once."""
    answers: dict[int, Answer] = {}
    left = iter(enumerate(prompts))
    async with httpx.AsyncClient(timeout=1200, limits=httpx.Limits(max_connections=None)) as http:

        async def client() -> None:
            for i, prompt in left:
                answers[i] = await stream_chat(http, system, prompt, tokens)

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - began
    return Cell(system.name, clients, seconds, [answers[i] for i in range(len(prompts))])


def prompts_for(clients: int, minimum: int) -> list[str]:
    """A prompt for each client, at least `minimum`: alternately copy-heavy ones and chats."""
    kinds = zip_longest(*(islice(cycle(PROMPTS[kind]), 8) for kind in ("copy", "chat")))
    return list(islice(cycle(chain.from_iterable(kinds)), max(clients, minimum)))


@contextmanager
def outrider_server(folder: Path, *options: str) -> Iterator[str]:
    """Run `outrider serve`; yields its address when it is ready."""
    command = [sys.executable, "-m", "outrider", "serve", str(folder), "--served-model-name", "bench", "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        address, lines = "", iter(process.stderr or ())
        for line in lines:
            found = re.search(r"listening on (\S+),", line)
            address = found[1] if found else address
            if line.startswith("ready"):
                break
        else:
            raise RuntimeError("outrider serve did not start")
        yield address
    finally:
        _stop(process)


@contextmanager
def transformers_server(folder: Path) -> Iterator[str]:
    """Run `transformers serve`, or where accelerate is missing the same server without it."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
    if importlib.util.find_spec("accelerate") is None:
        command = [sys.executable, str(HERE / "transformers_server.py")]
    command += [str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    env, quiet = os.environ | {"HF_HUB_OFFLINE": "1"}, subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError("transformers serve did not start; run it by hand to see why")
            try:
                httpx.get(f"{address}/health", timeout=1)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield address
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[Any]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()


def measure(systems: list[System], loads: list[int], tokens: int, minimum: int) -> list[Cell]:
    """Every load on every server, in turn."""
    for system in systems:  # a warm-up request
        asyncio.run(run_load(system, 1, prompts_for(1, 1), 8))
    cells: list[Cell] = []
    for clients in loads:
        row = [asyncio.run(run_load(system, clients, prompts_for(clients, minimum), tokens)) for system in systems]
        plain = next(cell for cell in row if cell.system == PLAIN)
        for cell in row:
            pairs = zip(cell.answers, plain.answers, strict=True)
            cell.same = sum(one.text.strip() == other.text.strip() for one, other in pairs)
            print(_line(cell), flush=True)
        cells += row
    return cells


def _line(cell: Cell) -> str:
    times = (f"{a:6.2f} / {b:6.2f}" for a, b in map(cell.spread, ("first", "per_token", "whole")))
    same = f"{cell.same}/{len(cell.answers)}"
    return f"| {cell.clients:3} | {cell.system:<27} | {cell.rate:6.1f} | {' | '.join(times)} | {same:>5} |"


def _as_dict(cell: Cell) -> dict[str, Any]:
    spreads = {name: cell.spread(name) for name in ("first", "per_token", "whole")}
    return asdict(cell) | {"tokens_per_second": cell.rate} | spreads


def main() -> None:
    parser = argparse.ArgumentParser(description="The server under load, beside Transformers' own.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--requests", type=int, default=6, help="at least this many for each load")
    parser.add_argument("--drafter", default="suffix+prediction")
    parser.add_argument("--packed", action="store_true", help="also Outrider with 4-bit weights, its default on a CPU")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    folder = Path(resolve(args.model))
    print(f"{folder.name}, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, ", end="")
    print(f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'unset')}, {args.tokens} tokens an answer\n")
    print("| clients | server | tok/s | first | per token | whole | same |\n|---|---|---|---|---|---|---|", flush=True)
    with ExitStack() as stack:
        exact = stack.enter_context(
            outrider_server(folder, "--drafter", args.drafter, "--dtype", "float32", "--quantize", "none")
        )
        systems = [
            System("transformers serve", stack.enter_context(transformers_server(folder)), str(folder), salted=False),
            System(PLAIN, exact, "bench", {"speculation": {"off": True}}),
            System(f"outrider, {args.drafter}", exact, "bench"),
        ]
        if args.packed:
            packed = stack.enter_context(outrider_server(folder, "--drafter", args.drafter, "--quantize", "int4"))
            systems.append(System("the same, 4-bit", packed, "bench"))
        cells = measure(systems, args.clients, args.tokens, args.requests)
    if args.json:
        args.json.write_text(json.dumps([_as_dict(cell) for cell in cells], indent=1))


if __name__ == "__main__":
    main()
