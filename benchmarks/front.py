"""What our server before vLLM costs: the same requests to vLLM itself and through us, in turn.

    python benchmarks/front.py --direct http://127.0.0.1:8001 --through http://127.0.0.1:8000 --model demo

Rounds alternate, so that other work on the machine disturbs both alike; the figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp

TICKS = os.sysconf("SC_CLK_TCK")


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


async def first_tokens(sessions: list[Any], urls: list[str], model: str, count: int) -> list[list[float]]:
    """Of each server, the seconds to the first token of one request at a time."""
    seconds: list[list[float]] = [[], []]
    for i in range(count):
        for k in (0, 1) if i % 2 else (1, 0):
            seconds[k].append((await stream(sessions[k], urls[k], body_of(model, f"{i}{k} is a number", 1)))[0])
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
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


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
    parser.add_argument("--direct", required=True)
    parser.add_argument("--through", required=True)
    parser.add_argument("--direct-key", default="")
    parser.add_argument("--through-key", default="")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--first", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--pid", type=int, default=0, help="of our server, to count its CPU time")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
