"""`outrider plan --fleet`: how many replicas hold a latency."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from outrider.cli.options import option
from outrider.cli.screen import Screen, clean, passing_line, progress_bars
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.fleet.costs import ServingCosts
    from outrider.fleet.size import FleetPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Fleet. How many replicas a load needs, in place of memory."""

    fleet: str | None = option(None, "Arrivals: a file, or poisson:rate=2,prompt=200,output=100", metavar="TRACE")
    latency_ms: float | None = option(None, "p99 of a whole request that must hold")
    ttft_ms: float | None = option(None, "p99 to the first token that must hold")
    tpot_ms: float | None = option(None, "p99 of a further token that must hold")
    replicas: str | None = option(None, "Numbers to replay (those that find the answer)", metavar="N,N")
    costs: Path | None = option(None, "JSON of what serving costs (measured)", metavar="FILE")  # noqa: RUF009 - a field
    prompts: Path | None = option(None, "Prompts to measure costs on (built-in ones)", metavar="FILE")  # noqa: RUF009 - a field
    limit: int = option(24, "Prompts to take")

    def __post_init__(self) -> None:
        for name in ("latency_ms", "ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {value:g}")
        if self.fleet is None and any((self.latency_ms, self.ttft_ms, self.tpot_ms, self.replicas, self.costs)):
            raise ConfigError(
                "latencies, --replicas and --costs belong to a fleet: name its arrivals with --fleet TRACE"
            )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a replica runs, on which costs are measured."""

    target: str
    options: dict[str, Any]
    """The options of LLM."""


def plan_fleet(given: FleetOptions, model: ServedModel, screen: Screen) -> FleetPlan:
    """Replay the arrivals against the given costs, or against costs that are measured on the model."""
    from outrider.fleet.size import Goals, make_plan, parse_replicas
    from outrider.fleet.trace import read_trace

    trace, replicas = read_trace(given.fleet or ""), parse_replicas(given.replicas)
    goals = Goals(given.latency_ms, given.ttft_ms, given.tpot_ms)
    return make_plan(trace, _costs(given, model, screen), goals, replicas)


def _costs(given: FleetOptions, model: ServedModel, screen: Screen) -> ServingCosts:
    from outrider.fleet.costs import read_costs

    if given.costs is not None:
        return read_costs(given.costs)
    from outrider.advise.prompts import read_prompt_ids
    from outrider.checkpoints.storage import outrider_home
    from outrider.fleet.measure import DRAFTED_TOKENS, kept_costs
    from outrider.llm import LLM

    if given.limit < 1:
        raise ConfigError(f"--limit must be 1 at least, got {given.limit}")
    with progress_bars(screen.notes) as progress, LLM(model.target, progress=progress, **model.options) as llm:
        room = llm.engine.target.context - DRAFTED_TOKENS
        prompts = read_prompt_ids(llm.tokenizer, given.prompts, given.limit, room)
        return kept_costs(llm, prompts, outrider_home() / "costs", passing_line(screen))


def show_fleet(screen: Screen, plan: FleetPlan) -> None:
    from outrider.fleet.page import LONG, NOTES, columns_of, how_full, summary

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    head, rows = columns_of(plan)
    for name in head:
        if name not in LONG:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(cell for name, cell in zip(head, row, strict=True) if name not in LONG))
    screen.out.print(table)
    screen.out.print(Text(clean(summary(plan)), "bold"), soft_wrap=True)
    if plan.costs.what:
        screen.note(f"costs of {plan.costs.what}")
    screen.note(how_full(plan))
    screen.note(NOTES[0])
