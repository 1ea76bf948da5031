"""What our server before vLLM costs: the same requests to vLLM itself and through us, in turn.

    python benchmarks/front.py --direct http://127.0.0.1:8001 --through http://127.0.0.1:8000 --model demo
    python benchmarks/front.py --alone

Rounds alternate, so that other work on the machine disturbs both alike; the figures are medians over rounds.

--alone starts a server without a model (front_peer.py) and ours before it, and counts ours' processor time, which
other programs change little: to the first token of a request, of a whole request of one token, and of each chunk
that arrives by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

PORTS = (18471, 18472)
GAP = 0.004
"""Seconds between the chunks of a stream of --alone."""
LATE = 0.02


async def stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the first event with text, and the events in all."""
    began, first, events = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{url} says {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if line.startswith(b"data: {"):
                events += 1
                first = first or time.perf_counter() - began
                if b'"error"' in line:
                    raise RuntimeError(line.decode()[:200])
    return first, events


def body_of(model: str, prompt: str, tokens: int) -> dict[str, Any]:
    common = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 0}
    return common | {"ignore_eos": True, "stream_options": {"include_usage": True}}


async def first_tokens(
    sessions: list[Any], urls: list[str], model: str, count: int, begin: str = ""
) -> list[list[float]]:
    """Of each server, the seconds to the first token of one request at a time. begin: of each prompt."""
    seconds: list[list[float]] = [[], []]
    for i in range(count):
        for k in (0, 1) if i % 2 else (1, 0):
            seconds[k].append((await stream(sessions[k], urls[k], body_of(model, f"{begin}{i}{k} is a number", 1)))[0])
    return seconds


async def rates(sessions: list[Any], urls: list[str], given: argparse.Namespace) -> list[list[float]]:
    """Of each server and round, the tokens per second of all clients together."""
    out: list[list[float]] = [[], []]
    for i in range(given.rounds):
        for k in (0, 1) if i % 2 else (1, 0):
            began = time.perf_counter()
            bodies = [body_of(given.model, f"{i}{k}{c} is a number", given.tokens) for c in range(given.clients)]
            await asyncio.gather(*(stream(sessions[k], urls[k], body) for body in bodies))
            out[k].append(given.clients * given.tokens / (time.perf_counter() - began))
    return out


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads, to the nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


@contextmanager
def servers() -> Iterator[tuple[list[str], int]]:
    """Within, a peer without a model and our server before it: their addresses, and our process."""
    urls = [f"http://127.0.0.1:{port}" for port in PORTS]
    peer = [sys.executable, str(Path(__file__).with_name("front_peer.py")), str(PORTS[0])]
    words = ["serve", "--engine-url", urls[0], "--served-model-name", "demo", "--port", str(PORTS[1])]
    ours = [sys.executable, "-m", "outrider", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(each, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for each in (peer, ours)
    ]
    try:
        yield urls, started[1].pid
    finally:
        for each in started:
            each.terminate()
        for each in started:
            each.wait()


async def ready(session: aiohttp.ClientSession, url: str) -> None:
    for _ in range(600):
        try:
            async with session.get(f"{url}/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


async def first_cpu(session: aiohttp.ClientSession, url: str, pid: int, count: int) -> float:
    """Processor seconds of ours to the first token, the mean of requests whose second token comes late."""
    spent = 0.0
    for i in range(count):
        before = cpu_seconds(pid)
        async with session.post(f"{url}/v1/completions", json=body_of("demo", f"{LATE} {i}", 2)) as response:
            await response.content.readline()
            await asyncio.sleep(LATE / 4)  # until all is counted
            spent += cpu_seconds(pid) - before
            await response.read()
    return spent / count


async def measure_alone(given: argparse.Namespace) -> dict[str, Any]:
    """Series of first tokens, of requests of one token, and of streams, in turn: tenth percentiles and medians."""
    found: dict[str, list[float]] = {"first": [], "request": [], "chunk": [], "added": []}
    with servers() as (urls, pid):
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            await ready(session, urls[1])
            await first_tokens([session, session], urls, "demo", 50, "0 ")
            at = cpu_seconds(pid)
            await asyncio.sleep(4.0)
            idle = (cpu_seconds(pid) - at) / 4.0
            for _ in range(given.rounds):
                found["first"].append(await first_cpu(session, urls[1], pid, given.first))
                at = cpu_seconds(pid)
                seconds = await first_tokens([session, session], urls, "demo", given.first, "0 ")
                found["request"].append((cpu_seconds(pid) - at) / given.first)
                found["added"].append(statistics.median(b - a for a, b in zip(*seconds, strict=True)))
                at = cpu_seconds(pid)
                bodies = [body_of("demo", f"{GAP} {c}", given.tokens) for c in range(given.clients)]
                await asyncio.gather(*(stream(session, urls[1], body) for body in bodies))
                whole = cpu_seconds(pid) - at - given.clients * found["request"][-1]
                found["chunk"].append(whole / given.clients / given.tokens)
    told = {name: [sorted(each)[len(each) // 10], statistics.median(each)] for name, each in found.items()}
    return {
        "cpu_ms_to_first_token": [round(1e3 * each, 3) for each in told["first"]],
        "cpu_ms_a_request": [round(1e3 * each, 3) for each in told["request"]],
        "cpu_us_a_chunk": [round(1e6 * each, 1) for each in told["chunk"]],
        "first_token_added_ms": [round(1e3 * each, 2) for each in told["added"]],
        "cpu_ms_a_second_idle": round(1e3 * idle, 2),
        "load": [round(each, 1) for each in os.getloadavg()],
    }


async def measure(given: argparse.Namespace) -> dict[str, Any]:
    urls = [given.direct, given.through]
    keys = [given.direct_key, given.through_key]
    headers = [{"Authorization": f"Bearer {key}"} if key else {} for key in keys]
    sessions = [aiohttp.ClientSession(headers=each, timeout=aiohttp.ClientTimeout(total=600)) for each in headers]
    try:
        await first_tokens(sessions, urls, given.model, 2)
        before = cpu_seconds(given.pid) if given.pid else 0.0
        seconds = await first_tokens(sessions, urls, given.model, given.first)
        between = cpu_seconds(given.pid) if given.pid else 0.0
        rate = await rates(sessions, urls, given)
        after = cpu_seconds(given.pid) if given.pid else 0.0
    finally:
        for session in sessions:
            await session.close()
    added = statistics.median(b - a for a, b in zip(*seconds, strict=True))
    ratios = [b / a for a, b in zip(*rate, strict=True)]
    told: dict[str, Any] = {
        "first_token_ms": [round(1e3 * statistics.median(each), 2) for each in seconds],
        "first_token_added_ms": round(1e3 * added, 2),
        "tokens_per_second": [round(statistics.median(each), 1) for each in rate],
        "throughput_ratio": round(statistics.median(ratios), 4),
        "throughput_ratios": [round(each, 3) for each in ratios],
        "load": [round(each, 1) for each in os.getloadavg()],
    }
    if given.pid:  # does not depend on what else the machine does
        told["cpu_ms_a_request"] = round(1e3 * (between - before) / given.first, 3)
        told["cpu_us_a_token"] = round(1e6 * (after - between) / (given.rounds * given.clients * given.tokens), 1)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="start both, without a model")
    parser.add_argument("--direct")
    parser.add_argument("--through")
    parser.add_argument("--direct-key", default="")
    parser.add_argument("--through-key", default="")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--first", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pid", type=int, default=0, help="of our server, to count its CPU time")
    given = parser.parse_args()
    if not given.alone and not (given.direct and given.through):
        parser.error("give --direct and --through, or --alone")
    print(json.dumps(asyncio.run(measure_alone(given) if given.alone else measure(given)), indent=1))


if __name__ == "__main__":
    main()
