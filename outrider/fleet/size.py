"""Figures of replayed traces, and the fewest replicas that keep latencies within given goals."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from typing import Any

from outrider.bench.statistics import percentile
from outrider.core.errors import ConfigError
from outrider.fleet.costs import ServingCosts
from outrider.fleet.simulate import Run, simulate
from outrider.fleet.trace import Trace

MAX_REPLICAS = 1 << 16
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Goals:
    """Bounds, in milliseconds, that 99 of 100 requests must not exceed; None: no bound."""

    latency_ms: float | None = None
    """Time of a whole request."""
    ttft_ms: float | None = None
    """Time to the first token."""
    tpot_ms: float | None = None
    """Time of a token after the first, the mean over a request."""

    @property
    def any(self) -> bool:
        return any(each is not None for each in asdict(self).values())


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one replay. Times are in milliseconds, by percentile."""

    replicas: int
    speculate: bool
    output_throughput: float
    """Output tokens a second, of all replicas together."""
    request_throughput: float
    utilisation: float
    """Share of the time in which a replica has a round under way."""
    batch: float
    """The mean number of sequences in a round, weighted by the rounds' time."""
    wait_ms: dict[int, float]
    """Time until a replica admits a request."""
    ttft_ms: dict[int, float]
    tpot_ms: dict[int, float]
    latency_ms: dict[int, float]
    holds: bool | None
    """Whether all goals hold; None where there are none."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """What `outrider plan --fleet` says."""

    trace: Trace
    costs: ServingCosts
    goals: Goals
    rows: tuple[Figures, ...]
    """The replays without drafts, then those with, each by number of replicas."""
    needed: dict[bool, int | None]
    """The fewest replicas that hold the goals, without and with drafts; None: no number does. Empty without goals."""

    def as_json(self) -> dict[str, Any]:
        lengths = [(each.prompt, each.output) for each in self.trace.arrivals]
        told = {
            "name": self.trace.name,
            "requests": len(lengths),
            "rate": self.trace.rate,
            "clients": self.trace.clients,
            "prompt_tokens": sum(p for p, _ in lengths),
            "output_tokens": sum(o for _, o in lengths),
        }
        needed = {"on" if on else "off": count for on, count in self.needed.items()}
        rows = [each.as_json() for each in self.rows]
        goals = asdict(self.goals)
        return {"trace": told, "goals": goals, "needed": needed, "runs": rows, "costs": self.costs.as_json()}


def make_plan(trace: Trace, costs: ServingCosts, goals: Goals, replicas: Seq[int] = ()) -> FleetPlan:
    """Replay a trace and find the fewest replicas that hold the goals.

    replicas: the numbers of replicas to show; empty: those replayed in the search, or 1 without goals.
    """
    rows: list[Figures] = []
    needed: dict[bool, int | None] = {}
    for speculate in (False, True) if costs.speculative else (False,):
        known: dict[int, Figures] = {}

        def figures(count: int, known: dict[int, Figures] = known, speculate: bool = speculate) -> Figures:
            if count not in known:
                known[count] = figures_of(simulate(trace, costs, count, speculate=speculate), goals)
            return known[count]

        if goals.any:
            most = min(MAX_REPLICAS, len(trace.arrivals))  # with one replica for each request, no request waits
            first = likely_replicas(trace, costs)
            needed[speculate] = fewest(lambda count, of=figures: bool(of(count).holds), first, most)
        for count in replicas or (() if goals.any else (1,)):
            figures(count)
        rows += [known[count] for count in sorted(replicas or known)]
    return FleetPlan(trace, costs, goals, tuple(rows), needed)


def fewest(holds: Callable[[int], bool], likely: int, most: int) -> int | None:
    """The fewest replicas, up to `most`, that hold the goals; None where `most` do not. likely: the first guess."""
    low, count = 0, min(likely, most)  # `low` does not hold
    while not holds(count):
        if count == most:
            return None
        low, count = count, min(2 * count, most)
    while count - low > 1:
        middle = (low + count) // 2
        low, count = (low, middle) if holds(middle) else (middle, count)
    return count


def likely_replicas(trace: Trace, costs: ServingCosts) -> int:
    """A first guess: the replicas that a trace keeps busy at the best rate of any batch; 1 if all arrive at once."""
    span = trace.arrivals[-1].seconds - trace.arrivals[0].seconds
    if not span:
        return 1
    rate = max(each.batch * each.tokens / each.seconds for each in (*costs.plain, *costs.speculative))
    reading = sum(each.prompt for each in trace.arrivals) * costs.prompts[-1][1] / costs.prompts[-1][0]
    return max(1, round((sum(each.output for each in trace.arrivals) / rate + reading) / span))


def figures_of(run: Run, goals: Goals) -> Figures:
    tokens = sum(each.output for each in run.served)
    ttft = _milliseconds([each.ttft for each in run.served])
    tpot = _milliseconds([each.tpot for each in run.served if each.tpot is not None])
    latency = _milliseconds([each.end - each.arrival for each in run.served])
    bounds = ((ttft, goals.ttft_ms), (tpot, goals.tpot_ms), (latency, goals.latency_ms))
    kept = [table[99] <= bound for table, bound in bounds if bound is not None]
    return Figures(
        run.replicas,
        run.speculate,
        tokens / run.seconds,
        len(run.served) / run.seconds,
        run.busy / run.seconds / run.replicas,
        run.batch,
        _milliseconds([each.wait for each in run.served]),
        ttft,
        tpot,
        latency,
        all(kept) if kept else None,
    )


def parse_replicas(text: str | None) -> list[int]:
    """The numbers in a text such as `1,2,4`, sorted; [] for None. ConfigError for anything else."""
    if text is None:
        return []
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(f"--replicas takes whole numbers with commas between them, got {text!r}") from error
    if not 1 <= found[0] <= found[-1] <= MAX_REPLICAS:
        raise ConfigError(f"--replicas takes numbers from 1 to {MAX_REPLICAS}, got {text!r}")
    return found


def _milliseconds(values: Seq[float]) -> dict[int, float]:
    return {at: 1e3 * percentile(values, at) if values else 0.0 for at in PERCENTILES}
