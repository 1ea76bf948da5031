"""`outrider bench serve`: load on any OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from outrider.cli.bench_offline import (
    digest_prompts,
    facts_of,
    gather_prompts,
    measure_until_interrupted,
    numbers,
    short_table,
)
from outrider.cli.options import argument, check_ranges, option
from outrider.cli.screen import Screen
from outrider.core.errors import ConfigError

SHOWN = ("load", "speculation", "tok/s", "speed-up", "identical", "TPOT", "cached")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions:
    """Measurement."""

    url: str = argument("http://127.0.0.1:8000/v1", "The server (http://127.0.0.1:8000/v1)", metavar="URL")
    concurrency: str | None = option(None, "Closed loop: so many at once (1,4,16)", metavar="N,...")
    rates: str | None = option(None, "Open loop: conversations a second, at random times", metavar="R,...")
    suites: str | None = option(None, "Built-in prompts: chat, code, ... or all (all)", metavar="NAME,...")
    prompts: list[Path] = option((), "A file of prompts; repeatable", metavar="FILE")  # noqa: RUF009 - a field
    limit: int | None = option(3, "Prompts of each category; 0: all")
    conversations: int | None = option(None, "Of each load (each prompt once)")
    max_tokens: int = option(96, "Max new tokens of each answer")
    temperature: float = option(0.0, "0 takes the best token")
    repeats: int = option(3, "Repetitions, with speculation on and off in turn")
    seed: int = option(0, "Of sampled texts and random times")
    served_model: str | None = option(None, "Its name on the server (the first one)", metavar="NAME")
    export: Path | None = option(None, "Write vLLM's and aiperf's files here", metavar="FOLDER")  # noqa: RUF009 - a field
    out: Path | None = option(None, "Keep measurements here; continued if it has some", metavar="FILE")  # noqa: RUF009 - a field
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(1, 1 << 20), repeats=(1, 1000), conversations=(1, 1 << 20))


def serve(options: ServeBenchOptions) -> None:
    """Put a server under load: speed, latencies, cache hits, and whether speculation leaves texts unchanged.

    A key is taken from OPENAI_API_KEY. JSON has the names of `vllm bench serve`.
    """
    from outrider.bench.load import Load
    from outrider.bench.record import make_header, open_run
    from outrider.bench.serve import ServeBench, ServePlan, summarize_serve
    from outrider.bench.tables import SERVE_COLUMNS, serve_cells
    from outrider.prove.api import Api, ApiError

    screen = Screen()
    closed = options.concurrency or (None if options.rates else "1,4,16")
    loads = [Load(concurrency=each) for each in numbers("--concurrency", closed, int, 1, 4096)] if closed else []
    if options.rates:
        loads += [Load(rate=each) for each in numbers("--rates", options.rates, float, 1e-3, 1e5)]
    prompts = gather_prompts(options.suites, options.prompts, options.limit)
    plan = ServePlan(
        loads=tuple(loads),
        count=options.conversations or len(prompts),
        repeats=options.repeats,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
    )
    api = Api(options.url, os.environ.get("OPENAI_API_KEY", ""), options.served_model)
    try:
        kind = api.kind()
    except ApiError as error:  # nothing was measured: exit code 2
        raise ConfigError(str(error)) from error
    settings = {"url": api.url, "model": options.served_model, "plan": asdict(plan), "prompts": digest_prompts(prompts)}
    facts = facts_of(None) | {"server": kind.name, "served_model": api.model}
    run = open_run(make_header("serve", settings, facts), options.out)
    bench = ServeBench(api, kind, prompts, plan, run, options.export)
    exit_code = measure_until_interrupted(bench.measure_all, run, screen)
    found = summarize_serve(run)
    if options.json:
        told = {**run.header, "loads": [each.as_dict() for each in found], "runs": run.of("measure")}
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
        raise typer.Exit(exit_code)
    screen.out.print(short_table(SERVE_COLUMNS, SHOWN, [serve_cells(each) for each in found]))
    if len(bench.conditions) == 1:
        screen.note(f"this server ({kind.name}) cannot switch speculation off for a request: no text is compared")
    if run.path is not None:
        screen.note(f"next: `outrider bench report {run.path}` makes a page and a table of it")
    raise typer.Exit(exit_code)
