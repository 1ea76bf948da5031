"""`outrider plan`: the memory of a model and its drafter, before anything is loaded."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.options import argument, option
from outrider.cli.plan_fleet import FleetOptions, ServedModel, plan_fleet, show_fleet
from outrider.cli.screen import Screen, clean
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.plan.forecast import Forecast

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Plan."""

    target: str = argument("demo", "Folder, Hugging Face id or .gguf file (demo)", metavar="TARGET")
    drafter: str = option("auto", "As for serve: NAME:KEY=VALUE,...", metavar="SPEC")
    memory: str | None = option(None, "Plan for so much, such as 24GiB (what is free)", metavar="SIZE")
    device: str = option("auto", "cpu, cuda, cuda:1")
    dtype: str = option("auto", "float32, bfloat16 or float16")
    quantize: str = option("auto", "int8 or int4 weights on the CPU, or none")
    context: int | None = option(None, "Max tokens of one sequence (the model's limit)")
    max_batch: int = option(8, "Max sequences at once")
    cache_tokens: int | None = option(None, "Tokens the cache holds (by memory)")
    max_round_tokens: int | None = option(None, "Max tokens of a round (by device)")
    revision: str | None = option(None, "Of a Hugging Face model: branch, tag, commit")
    html: str | None = option(None, "Write a page", metavar="FILE")
    json: bool = option(False, "One JSON object on stdout")


def plan(given: PlanCommand, fleet: FleetOptions) -> None:
    """Tell what a model and its drafter take of a device's memory, from configurations and headers alone.

    The exit code is 0 where it fits and 1 where it does not. Defaults are in brackets. With --fleet: how many replicas
    hold a latency.
    """
    if fleet.fleet is not None:
        _plan_fleet(given, fleet)
        return
    from outrider.plan.forecast import PlanOptions, make_forecast
    from outrider.plan.page import plan_page

    same = {f.name for f in fields(PlanOptions)} - {"memory"}
    asked = PlanOptions(memory=parse_size(given.memory), **{name: getattr(given, name) for name in same})
    found = make_forecast(given.target, given.drafter, asked)
    if given.html is not None:
        write_page(given.html, plan_page(found))
    if given.json:
        sys.stdout.write(json.dumps(found.as_json(), allow_nan=False) + "\n")
    else:
        _show(Screen(), found)
    if not found.fits:
        raise typer.Exit(1)


def _plan_fleet(given: PlanCommand, fleet: FleetOptions) -> None:
    """Run `outrider plan --fleet`. The exit code is 1 where no number of replicas holds the goals."""
    from outrider.fleet.page import fleet_page

    screen = Screen()
    found = plan_fleet(fleet, ServedModel(given.target, _engine_options(given)), screen)
    if given.html is not None:
        write_page(given.html, fleet_page(found))
    if given.json:
        sys.stdout.write(json.dumps(found.as_json(), allow_nan=False) + "\n")
    else:
        show_fleet(screen, found)
    if found.needed and all(each is None for each in found.needed.values()):
        raise typer.Exit(1)


def _engine_options(given: PlanCommand) -> dict[str, Any]:
    """The options of LLM that costs are measured with. ConfigError where --memory is given."""
    if given.memory is not None:
        raise ConfigError("--memory is of a plan without --fleet: costs are measured on the device that is here")
    names = ("drafter", "device", "dtype", "quantize", "context", "max_batch", "cache_tokens", "max_round_tokens")
    return {name: getattr(given, name) for name in (*names, "revision")}


def parse_size(text: str | None) -> int | None:
    """Bytes: a number with GiB, GB, MiB and so on; without a unit GiB. None for None."""
    if text is None:
        return None
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]i?)?(b)?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--memory takes a size above 0 such as 24GiB or 80GB; got {text!r}")
    unit = (match[2] or ("" if match[3] else "gi")).lower()
    return int(float(match[1]) * UNITS[unit])


def write_page(name: str, text: str) -> None:
    """Write an HTML page to a file. ConfigError where it cannot be written."""
    file = Path(name).expanduser()
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {file}: {error.strerror or error}") from error


def _show(screen: Screen, found: Forecast) -> None:
    from outrider.plan.page import KINDS, MEANINGS, advice, label, largest_draft, summary
    from outrider.report.numbers import count, memory

    screen.out.print(Text(clean(summary(found)), "bold"), soft_wrap=True)
    parts = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    parts.add_column("")
    for model in found.models:
        parts.add_column(Text(clean(label(model))), justify="right", overflow="fold")
    parts.add_column("", style="dim")
    for kind in KINDS:
        sizes = [int(getattr(model, kind)) for model in found.models]
        if any(sizes):
            parts.add_row(kind, *map(memory, sizes), MEANINGS[kind])
    parts.add_row("cache", *(memory(found.tokens * m.per_token) for m in found.models), f"{count(found.tokens)} tokens")
    parts.add_row("  per 1k", *(memory(1024 * m.per_token) for m in found.models), "1024 tokens")
    screen.out.print(parts)
    if found.own:
        screen.say(found.own_name, f": {memory(found.own)}")
    fits = ", ".join(f"{fit.batch} x {count(fit.context)}" for fit in found.largest) or "nothing"
    screen.say("largest batch x context", f": {fits}")
    screen.say("largest draft model", f": {largest_draft(found)}")
    for each in found.notes:
        screen.note(each)
    screen.say("next", f": {advice(found)}")
