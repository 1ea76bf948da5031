"""Load on a server. Closed loop: a number of conversations at once. Open loop: they begin at random, at a rate.

A conversation's turns follow one another: each is sent when the one before is answered, with its answer.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from outrider.bench.client import Client, Outcome
from outrider.bench.prompts import BenchPrompt

MAX_OPEN = 4096
"""Max conversations of an open loop that are under way at once."""


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop (`concurrency`) or an open loop (`rate`)."""

    concurrency: int | None = None
    rate: float | None = None
    """Conversations a second."""

    @property
    def name(self) -> str:
        return f"{self.concurrency} at once" if self.rate is None else f"{self.rate:g} a second"


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """When conversations begin, in seconds: the first at once, then a Poisson process of this rate."""
    draw, now, times = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


def put_under_load(
    client: Client, prompts: Seq[BenchPrompt], load: Load, *, count: int, seed: int = 0, **options: Any
) -> tuple[list[Outcome], float]:
    """The outcomes of `count` conversations, in the order of the prompts, and the seconds it all took.

    options: fields of every request. If interrupted, no further turn is sent, and requests under way are finished.
    """
    chosen = list(islice(cycle(prompts), count))
    stop = threading.Event()
    starts = [0.0] * count if load.rate is None else arrivals(load.rate, count, seed)
    workers = min(load.concurrency or MAX_OPEN, count)
    began = time.perf_counter()

    def run(place: int) -> list[Outcome]:
        due = began + starts[place]
        stop.wait(max(0.0, due - time.perf_counter()))
        late = 0.0 if load.rate is None else time.perf_counter() - due
        return list(_converse(client, chosen[place], late, stop.is_set, options))

    with ThreadPoolExecutor(workers) as pool:
        try:
            done = [outcome for outcomes in pool.map(run, range(count)) for outcome in outcomes]
        except KeyboardInterrupt:
            stop.set()
            raise
    return done, time.perf_counter() - began


def _converse(
    client: Client, prompt: BenchPrompt, waited: float, stopped: Callable[[], bool], options: dict[str, Any]
) -> Iterator[Outcome]:
    """The outcomes of a conversation, turn by turn; after a failure, no further turn is sent."""
    messages = list(prompt.history)
    for turn, said in enumerate(prompt.turns):
        if stopped():
            return
        messages.append({"role": "user", "content": said})
        outcome = client.ask(messages, Outcome(prompt.id, turn, waited=waited if turn == 0 else 0.0), **options)
        yield outcome
        if outcome.error:
            return
        messages.append({"role": "assistant", "content": outcome.text})
