"""What a decoding round is made of: kernels, gaps between them, waits and copies. Operators, on the CPU."""

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

from outrider.bench.waits import Waits
from outrider.engine.engine import Engine

SYNCHRONISING = (
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaDeviceSynchronize",
    "cuStreamSynchronize",
    "cudaMemcpy",
)
"""Calls of the CUDA runtime during which the host stands still."""
COPIES = ("Memcpy", "Memset")
SHOWN_GAPS = 8


@dataclass(frozen=True, slots=True)
class Cost:
    """One kernel or operator: how often a round it ran, and how long."""

    name: str
    count: float
    us: float
    share: float
    """Of the time of all of them."""


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which the device did nothing."""

    us: float
    after: str
    before: str


@dataclass(slots=True, kw_only=True)
class Profile:
    """Figures of one round, on average over `rounds` of them."""

    device: str
    rounds: int
    tokens: float
    round_ms: float
    """Without the profiler's own cost."""
    profiled_ms: float
    """With it: gaps and waits are of these rounds."""
    busy_ms: float
    """Time in which the device worked; on the CPU, in which operators ran."""
    idle_ms: float
    """The rest of the profiled round; on the CPU, Python's share."""
    launches: float
    """Calls that start work on the device: kernels and whole graphs."""
    costs: list[Cost] = field(default_factory=list[Cost])
    copies: list[Cost] = field(default_factory=list[Cost])
    calls: list[Cost] = field(default_factory=list[Cost])
    """Synchronising calls of the CUDA runtime."""
    gaps: list[Gap] = field(default_factory=list[Gap])
    """The longest in one round, as they were."""
    waits: dict[str, float] = field(default_factory=dict[str, float])
    """Python lines at which the host waited, and how often."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that ran from `start` to `end`, in microseconds."""

    name: str
    start: float
    end: float


def profile_rounds(engine: Engine, rounds: int) -> Profile:
    """Take `rounds` rounds three times: by the clock, counting waits, and under the profiler.

    The engine is busy and warm: all its texts decode, and have room for as many rounds.
    """
    began = time.perf_counter()
    tokens = sum(_steps(engine, rounds))
    plain = time.perf_counter() - began
    with Waits() as waits:
        _steps(engine, rounds)
    cuda = engine.target.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        began = time.perf_counter()
        _steps(engine, rounds)
        profiled = time.perf_counter() - began
    events = list(profiler.events() or ())
    pieces = sorted(_device_pieces(events), key=lambda piece: piece.start)
    kernels = [piece for piece in pieces if not piece.name.startswith(COPIES)]
    calls = [_piece(event) for event in events if cuda and event.name.startswith("cu")]
    costs = costs_of(kernels, rounds) if cuda else _operators(profiler, rounds)
    busy = busy_us(pieces) / rounds if cuda else sum(cost.us for cost in costs)
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
        copies=costs_of((piece for piece in pieces if piece.name.startswith(COPIES)), rounds),
        calls=costs_of((call for call in calls if call.name in SYNCHRONISING), rounds),
        gaps=gaps_of(pieces)[:SHOWN_GAPS],
        waits={where: n / rounds for where, n in waits.where.most_common()},
    )


def busy_us(pieces: Iterable[Piece]) -> float:
    """Microseconds in which at least one piece ran; pieces may overlap. Sorted by start."""
    total, reached = 0.0, float("-inf")
    for piece in pieces:
        total += max(0.0, piece.end - max(piece.start, reached))
        reached = max(reached, piece.end)
    return total


def gaps_of(pieces: list[Piece]) -> list[Gap]:
    """The times between pieces, longest first. Sorted by start."""
    found: list[Gap] = []
    if not pieces:
        return found
    latest = pieces[0]
    for before, after in pairwise(pieces):
        latest = before if before.end >= latest.end else latest
        if after.start > latest.end:
            found.append(Gap(after.start - latest.end, latest.name, after.name))
    return sorted(found, key=lambda gap: -gap.us)


def costs_of(pieces: Iterable[Piece], rounds: int) -> list[Cost]:
    """Pieces of one name together, dearest first."""
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for piece in pieces:
        times[piece.name] += piece.end - piece.start
        counts[piece.name] += 1
    return _ranked({name: (counts[name], us) for name, us in times.items()}, rounds)


def _ranked(found: dict[str, tuple[int, float]], rounds: int) -> list[Cost]:
    whole = sum(us for _, us in found.values()) or 1.0
    costs = [Cost(name, count / rounds, us / rounds, us / whole) for name, (count, us) in found.items()]
    return sorted(costs, key=lambda cost: -cost.us)


def _steps(engine: Engine, rounds: int) -> list[int]:
    """The tokens each of some rounds brought."""
    return [sum(len(event.tokens) for event in engine.step()) for _ in range(rounds)]


def _device_pieces(events: Iterable[Any]) -> list[Piece]:
    """What ran on the device; marks that only name a stretch of time are left out."""
    on_device = (event for event in events if event.device_type == DeviceType.CUDA)
    return [_piece(event) for event in on_device if not getattr(event, "is_user_annotation", False)]


def _piece(event: Any) -> Piece:
    return Piece(event.name, event.time_range.start, event.time_range.end)


def _operators(profiler: Any, rounds: int) -> list[Cost]:
    """On the CPU: each operator's own time, without what it called."""
    averages = profiler.key_averages()
    return _ranked({each.key: (each.count, each.self_cpu_time_total) for each in averages}, rounds)
