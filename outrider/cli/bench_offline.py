"""`outrider bench offline`: plain decoding against drafters, on suites of prompts or files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.options import RuntimeOptions, argument, check_ranges, option
from outrider.cli.screen import Screen, about, clean, progress_bars, progress_line
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.offline import Axes, OfflineBench
    from outrider.bench.prompts import BenchPrompt
    from outrider.bench.record import RunFile
    from outrider.bench.summary import RowSummary

SHOWN = ("prompts", "row", "tok/s", "speed-up", "identical", "limit", "acc. length", "α")
INTERRUPTED = 130  # 128 + SIGINT, as in shells
MIN_WORDS = 10
LIMIT = 3
DEMO_SUITES, DEMO_LIMIT = "chat,code,edit", 2
"""The suites and the limit for the model `demo` unless options say otherwise: they take a minute or two on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineOptions:
    """Measurement."""

    name: str = argument("demo", "Folder, Hugging Face id or .gguf file (demo)", metavar="MODEL")
    drafter: list[str] = option((), "NAME:KEY=VALUE,...; repeatable (auto)", metavar="SPEC")  # noqa: RUF009 - a field
    lengths: str | None = option(None, "Draft lengths: every drafter with each as its k", metavar="N,...")
    control: bool = option(False, "Draft only where it is measured to gain, as `auto` does")
    suites: str | None = option(
        None, f"Built-in prompts: chat, code, ... or all (all; of demo {DEMO_SUITES})", metavar="NAME,..."
    )
    prompts: list[Path] = option((), "A file of prompts; repeatable", metavar="FILE")  # noqa: RUF009 - a field
    limit: int | None = option(None, f"Prompts of each category; 0: all ({LIMIT}; of demo {DEMO_LIMIT})")
    temperatures: str = option("0", "0 takes the best token", metavar="T,...")
    batches: str = option("1", "Sequences at once", metavar="N,...")
    contexts: str = option("0", "Fill prompts up to so many tokens; 0: not", metavar="N,...")
    thinking: str | None = option(None, "on, off or on,off, where the model has it", metavar="MODE,...")
    max_tokens: int = option(96, "Max new tokens of each text")
    repeats: int = option(5, "Repetitions, each of all rows in turn")
    seed: int = option(0, "Of sampled texts")
    out: Path | None = option(None, "Keep measurements here; continued if it has some", metavar="FILE")  # noqa: RUF009 - a field
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(2, 1 << 20), repeats=(1, 1000))

    def axes(self) -> Axes:
        """The axes of the measurement. ConfigError for values out of range."""
        from outrider.bench.offline import Axes

        return Axes(
            temperatures=numbers("--temperatures", self.temperatures, float, 0, 100),
            batches=numbers("--batches", self.batches, int, 1, 1024),
            contexts=numbers("--contexts", self.contexts, int, 0, 1 << 24),
            thinking=tuple(part.strip() for part in self.thinking.split(",")) if self.thinking else ("",),
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            seed=self.seed,
        )


def offline(options: OfflineOptions, runtime: RuntimeOptions) -> None:
    """Measure plain decoding and drafters on the same prompts: speed, acceptance, and whether texts are equal.

    Interrupted, it reports what was measured; with --out, the same command continues.
    """
    from outrider.bench.energy import energy_meter
    from outrider.bench.engines import Engines, controlled_rows, load_target, with_lengths
    from outrider.bench.offline import OfflineBench
    from outrider.bench.record import make_header, open_run
    from outrider.bench.summary import summarize
    from outrider.bench.tables import COLUMNS, cells_of

    axes, screen = options.axes(), Screen()
    lengths = numbers("--lengths", options.lengths, int, 1, 64) if options.lengths else ()
    drafters = with_lengths(options.drafter or ["auto"], lengths)
    controlled = controlled_rows(drafters, options.control)
    prompts = _prompts(options)
    max_batch = max(axes.batches)
    with progress_bars(screen.notes) as progress:

        def make_target() -> Any:
            return load_target(options.name, drafters, max_batch=max_batch, progress=progress, **asdict(runtime))

        engines = Engines(make_target, drafters, max_batch=max_batch, controlled=controlled)
    try:
        device = engines.loaded.target.device
        meter = energy_meter(device)
        settings = {"model": options.name, "drafters": drafters, "controlled": controlled, "axes": asdict(axes)}
        settings |= {"prompts": digest_prompts(prompts), "runtime": asdict(runtime)}
        facts = facts_of(device) | {
            "number_format": engines.loaded.format,
            "bandwidth": None if engines.limits is None else engines.limits.ceilings.bandwidth,
            "energy": meter.source or "not told",
        }
        run = open_run(make_header("offline", settings, facts), options.out)
        bench = OfflineBench(engines, prompts, axes, run, meter)
        _tell_duration(screen, bench, options)
        exit_code = measure_until_interrupted(bench.measure_all, run, screen)
    finally:
        engines.close()
    rows = summarize(run)
    if options.json:
        told = {**run.header, "rows": [row.as_dict() for row in rows]}
        sys.stdout.write(json.dumps(told, allow_nan=False) + "\n")
    else:
        screen.out.print(short_table(COLUMNS, SHOWN, [cells_of(row) for row in rows]))
        _print_notes(screen, run, rows)
    raise typer.Exit(exit_code)


def measure_until_interrupted(measure: Callable[[Any], None], run: RunFile, screen: Screen) -> int:
    """Measure, with a line of progress. Ctrl-C ends the measuring; before the first measurement, it ends the command.

    Returns the exit code of the command: 0, or INTERRUPTED after Ctrl-C.
    """
    if run.continued:
        screen.note(f"continuing: {run.path} holds {len(run.of('measure'))} measurements")
    try:
        measure(progress_line(screen, "measured"))
    except KeyboardInterrupt:
        if not run.of("measure"):
            raise
        kept = "" if run.path is None else "; the same command continues from here"
        screen.note(f"interrupted: what follows is of what was measured{kept}", "yellow")
        return INTERRUPTED
    return 0


def _prompts(options: OfflineOptions) -> list[BenchPrompt]:
    demo = options.name == "demo"
    suites = options.suites or (DEMO_SUITES if demo and not options.prompts else None)
    limit = options.limit if options.limit is not None else DEMO_LIMIT if demo else LIMIT
    return gather_prompts(suites, options.prompts, limit)


def _tell_duration(screen: Screen, bench: OfflineBench, options: OfflineOptions) -> None:
    expected, rows = bench.expected_seconds(), ", ".join(bench.engines.rows)
    if not expected:
        return
    what = f"{len(bench.prompts)} prompts, {bench.axes.repeats} times by each of {rows}"
    short = options.name == "demo" and not (options.suites or options.prompts)
    screen.note(f"{what}: takes {about(expected)}{'; --suites all --limit 3 measures more' if short else ''}")


def gather_prompts(suites: str | None, files: Seq[Path], limit: int | None) -> list[BenchPrompt]:
    """The prompts of the named suites and files; those of all suites where neither is named. limit 0: all prompts."""
    from outrider.bench.prompts import SUITES, read_prompt_file, read_suite, select

    named = suites or ("" if files else "all")
    names = SUITES if named == "all" else [name.strip() for name in named.split(",") if name.strip()]
    found = [prompt for name in names for prompt in read_suite(name)]
    found += [prompt for file in files for prompt in read_prompt_file(file)]
    return select(found, limit or None)


def digest_prompts(prompts: Seq[BenchPrompt]) -> dict[str, Any]:
    """The number and the digest of prompts, by which a continued run recognises that its prompts are the same."""
    from hashlib import sha256

    text = json.dumps([asdict(prompt) for prompt in prompts])
    return {"count": len(prompts), "digest": sha256(text.encode()).hexdigest()[:16]}


def facts_of(device: Any) -> dict[str, Any]:
    """Machine, versions, commit and command, for a run's header. device: None where another machine computes."""
    from outrider.bench.machine import commit, machine_facts, versions, without_folders

    command = without_folders(shlex.join(["outrider", *sys.argv[1:]]))
    return {"machine": machine_facts(device), "versions": versions(), "commit": commit(), "command": command}


def numbers(name: str, text: str, kind: Callable[[str], Any], low: float, high: float) -> tuple[Any, ...]:
    """The numbers in a text with commas between them. ConfigError unless each is from low to high. name: the option."""
    try:
        found = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name} takes numbers with commas between them, such as 1,8; got {text!r}") from error
    if not found or not all(low <= each <= high for each in found):
        raise ConfigError(f"{name} takes numbers from {low} to {high} with commas between them; got {text!r}")
    return found


def short_table(columns: Seq[str], shown: Seq[str], rows: Seq[Seq[str]]) -> Table:
    """A table of the columns `shown`, which fit a terminal; reports have all. The first two of `columns` are words."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading in shown:
        if heading in columns[:2]:
            table.add_column(heading, min_width=MIN_WORDS, overflow="fold")
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = dict(zip(columns, row, strict=True))
        table.add_row(*(Text(clean(cells[heading])) for heading in shown))
    return table


def _print_notes(screen: Screen, run: RunFile, rows: Seq[RowSummary]) -> None:
    """Print which drafter is the fastest, which texts or τ differ between runs, and what to do next."""
    from outrider.bench.tables import fastest

    for told, _ in fastest(rows):
        screen.note(told, "bold")
    different = sorted({row.row for row in rows if row.identical < row.texts})
    if different:
        named = ", ".join(different)
        screen.note(f"not all texts of {named} are plain decoding's: `outrider prove` tells ties from faults", "yellow")
    moving = [row for row in rows if row.tau_range[0] != row.tau_range[1]]
    if moving:
        widest = max(moving, key=lambda row: row.tau_range[1] / row.tau_range[0])
        low, high = widest.tau_range
        screen.note(
            f"τ of {widest.row} was {low:.2f} to {high:.2f} ({widest.cell['category']}): the controller decides by "
            "measured times, so that other rounds have drafts in each repetition"
        )
    counts = sorted({row.repetitions for row in rows})
    times = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    limit = run.header["settings"]["axes"]["max_tokens"]
    screen.note(f"speeds are medians of {times} repetitions; a text has at most {limit} tokens")
    screen.note("definitions: `outrider bench report FILE`, or docs/bench.md")
    if run.path is None:
        screen.note("next: --out FILE keeps the measurements, and `outrider bench report FILE` makes a page of them")
    else:
        screen.note(f"next: `outrider bench report {run.path}` makes a page and a table of it")
