"""A profile of a decoding round: kernels, gaps between them, synchronizations and copies; operators on the CPU."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType  # pyright: ignore[reportPrivateImportUsage]
from torch.profiler import ProfilerActivity, profile

from outrider.bench.syncs import SyncCounter
from outrider.engine.engine import Engine

SYNC_CALLS = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cuStreamSynchronize",
    "cudaMemcpy",
)
"""Calls of the CUDA runtime in which the host waits."""
COPY_PREFIXES = ("Memcpy", "Memset")
SHOWN_GAPS = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """One kernel or operator: how often it ran per round, and how long."""

    name: str
    count: float
    us: float
    share: float
    """Its part of the time of all that are listed with it."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the device was idle."""

    us: float
    after: str
    before: str


@dataclass(slots=True, kw_only=True)
class Profile:
    """Averages of one round over `rounds` of them."""

    device: str
    rounds: int
    tokens: float
    round_ms: float
    """Without the profiler."""
    profiled_ms: float
    """With the profiler: gaps and calls are of these rounds."""
    busy_ms: float
    """Time in which the device was busy; on the CPU, in which operators ran."""
    idle_ms: float
    """The rest of the profiled round; on the CPU, Python's share."""
    launches: float
    """Calls that launch kernels or CUDA graphs."""
    costs: list[Cost] = field(default_factory=list[Cost])
    copies: list[Cost] = field(default_factory=list[Cost])
    calls: list[Cost] = field(default_factory=list[Cost])
    """Synchronising calls of the CUDA runtime."""
    gaps: list[Gap] = field(default_factory=list[Gap])
    """The longest ones."""
    waits: dict[str, float] = field(default_factory=dict[str, float])
    """Python lines at which the host waited, and how often per round."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Something that ran from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


def profile_rounds(engine: Engine, rounds: int) -> Profile:
    """Run `rounds` rounds three times: timed, counting synchronizations, and under the profiler.

    The engine must be warm, and all its sequences must decode and have room for three times `rounds` rounds.
    """
    began = time.perf_counter()
    tokens = sum(_steps(engine, rounds))
    plain = time.perf_counter() - began
    with SyncCounter() as syncs:
        _steps(engine, rounds)
    cuda = engine.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        began = time.perf_counter()
        _steps(engine, rounds)
        profiled = time.perf_counter() - began
    events = list(profiler.events() or ())
    spans = sorted(_device_spans(events), key=lambda span: span.start)
    kernels = [span for span in spans if not span.name.startswith(COPY_PREFIXES)]
    calls = [_time_span(event) for event in events if cuda and event.name.startswith("cu")]
    costs = costs_of(kernels, rounds) if cuda else _operators(profiler, rounds)
    busy = busy_us(spans) / rounds if cuda else sum(cost.us for cost in costs)
    return Profile(
        device=torch.cuda.get_device_name(engine.target.device) if cuda else "cpu",
        rounds=rounds,
        tokens=tokens / rounds,
        round_ms=1e3 * plain / rounds,
        profiled_ms=1e3 * profiled / rounds,
        busy_ms=busy / 1e3,
        idle_ms=max(0.0, 1e3 * profiled / rounds - busy / 1e3),
        launches=sum("Launch" in call.name for call in calls) / rounds,
        costs=costs,
        copies=costs_of((span for span in spans if span.name.startswith(COPY_PREFIXES)), rounds),
        calls=costs_of((call for call in calls if call.name in SYNC_CALLS), rounds),
        gaps=gaps_of(spans)[:SHOWN_GAPS],
        waits={where: n / rounds for where, n in syncs.where.most_common()},
    )


def busy_us(spans: Iterable[TimeSpan]) -> float:
    """Microseconds in which at least one span ran. spans: sorted by start; may overlap."""
    total, reached = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total


def gaps_of(spans: list[TimeSpan]) -> list[Gap]:
    """The gaps between spans, longest first. spans: sorted by start."""
    found: list[Gap] = []
    if not spans:
        return found
    latest = spans[0]
    for before, after in pairwise(spans):
        latest = before if before.end >= latest.end else latest
        if after.start > latest.end:
            found.append(Gap(after.start - latest.end, latest.name, after.name))
    return sorted(found, key=lambda gap: -gap.us)


def costs_of(spans: Iterable[TimeSpan], rounds: int) -> list[Cost]:
    """The spans summed by name, longest first."""
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for span in spans:
        times[span.name] += span.end - span.start
        counts[span.name] += 1
    return _ranked({name: (counts[name], us) for name, us in times.items()}, rounds)


def _ranked(found: dict[str, tuple[int, float]], rounds: int) -> list[Cost]:
    whole = sum(us for _, us in found.values()) or 1.0
    costs = [Cost(name, count / rounds, us / rounds, us / whole) for name, (count, us) in found.items()]
    return sorted(costs, key=lambda cost: -cost.us)


def _steps(engine: Engine, rounds: int) -> list[int]:
    """The number of tokens of each round."""
    return [sum(len(event.tokens) for event in engine.step()) for _ in range(rounds)]


def _device_spans(events: Iterable[Any]) -> list[TimeSpan]:
    """What ran on the device, without user annotations."""
    on_device = (event for event in events if event.device_type == DeviceType.CUDA)
    return [_time_span(event) for event in on_device if not getattr(event, "is_user_annotation", False)]


def _time_span(event: Any) -> TimeSpan:
    return TimeSpan(event.name, event.time_range.start, event.time_range.end)


def _operators(profiler: Any, rounds: int) -> list[Cost]:
    """On the CPU: each operator's self time."""
    averages = profiler.key_averages()
    return _ranked({each.key: (each.count, each.self_cpu_time_total) for each in averages}, rounds)
