"""Runs as one HTML page that compares them, and as Markdown tables to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outrider.bench.engines import PLAIN
from outrider.bench.machine import describe
from outrider.bench.peers import summarize_peers
from outrider.bench.record import RunFile
from outrider.bench.serve import SERVED, LoadSummary, summarize_serve
from outrider.bench.statistics import median_estimate
from outrider.bench.summary import ALL, DEFINITIONS, RowSummary, summarize
from outrider.bench.tables import (
    COLUMNS,
    PEER_COLUMNS,
    SERVE_COLUMNS,
    cells_of,
    fastest,
    interval,
    markdown,
    peer_cells,
    place_of,
    serve_cells,
)
from outrider.report.numbers import digits, memory, share
from outrider.report.page import Html, Section, code, details, note, page, paragraph, table, verdict
from outrider.report.plot import Bars, Line, Mark, bar_plot, line_plot

SERVE_DEFINITIONS = {
    "tok/s": "output_throughput: tokens of all answers over the time of the whole load",
    "speed-up": "tok/s over that with speculation off in the same repetition, and its interval",
    "identical": "texts equal to those with speculation off",
    "TTFT": "time from a request to its first text, over the requests",
    "TPOT": "time for a token after the first, median over the requests",
    "E2E": "time from a request to its end",
    "cached": "prompt tokens found in the server's cache, over all prompt tokens",
    "acc. length": "1 + accepted / drafts, as the server tells for each request",
}
PEER_DEFINITIONS = {
    "tok/s": "tokens over seconds, of one text after another, prompts included; a token is one id that was emitted, "
    "the end-of-text token included. Median of the repetitions, in which all engines take turns",
    "over the best other": "tok/s over that of the fastest row of another engine, in the same repetition: median and "
    "interval",
    "identical": "texts whose ids are equal to those of our plain decoding; engines that compute in another number "
    "format write other texts",
    "wins": "the fastest row, and faster than every row of other engines, in an interval that excludes 1 and holds "
    "with a chance of at least 90 % (5 repetitions); else the fastest is first, not clearly",
}


@dataclass(frozen=True, slots=True)
class Table:
    """The figures of one run."""

    head: tuple[str, ...]
    rows: list[list[str]]
    definitions: Mapping[str, str]


def table_of(run: RunFile) -> Table:
    """The figures of a run as a table, by the kind of the run."""
    if run.header["kind"] == "serve":
        return Table(SERVE_COLUMNS, [serve_cells(each) for each in summarize_serve(run)], SERVE_DEFINITIONS)
    if run.header["kind"] == "peers":
        return Table(PEER_COLUMNS, [peer_cells(each) for each in summarize_peers(run)], PEER_DEFINITIONS)
    return Table(COLUMNS, [cells_of(each) for each in summarize(run)], DEFINITIONS)


def report_page(runs: Mapping[str, RunFile]) -> str:
    """One page from runs by name: how they compare, then each of them."""
    sections = [Section("", [_verdict(runs)])]
    offline = {name: run for name, run in runs.items() if run.header["kind"] == "offline"}
    if len(offline) > 1:
        sections.append(Section("The runs compared", list(_compared(offline))))
    for name, run in runs.items():
        sections.append(Section(f"{name}: {_title(run)}", list(_parts(run))))
    named = {key: value for run in runs.values() for key, value in table_of(run).definitions.items()}
    meanings = table(["figure", "meaning"], [[key, value] for key, value in named.items()], text=True)
    sections.append(Section("What the figures mean", [meanings]))
    return page("Speed, measured", sections)


def report_markdown(runs: Mapping[str, RunFile]) -> str:
    """A table for each run, with what it was measured on."""
    parts: list[str] = []
    for name, run in runs.items():
        found = table_of(run)
        told = f"{name}: {_title(run)}; {describe(run.header)}; {_versions(run)}"
        parts.append(f"{told}\n\n{markdown(found.head, found.rows)}")
    return "\n".join(parts)


def _verdict(runs: Mapping[str, RunFile]) -> Html:
    """Whether all texts are equal; a page about speed says that first."""
    different = [name for name, run in runs.items() if not _all_equal(run)]
    if different:
        return verdict(
            f"Not all texts are equal to those without speculation: {', '.join(different)}. `outrider prove` tells "
            "ties from faults; a speed whose text differs is not a speed-up.",
            "bad",
        )
    return verdict("Every text that was compared is the one of plain decoding.", "good")


def _all_equal(run: RunFile) -> bool:
    """Whether all compared texts are equal; of peers only our rows: other engines may use another number format."""
    kind = run.header["kind"]
    if kind == "serve":
        return all(each.identical is None or each.identical[0] == each.identical[1] for each in summarize_serve(run))
    if kind == "peers":
        return all(r.identical == r.texts for r in summarize_peers(run) if r.system.startswith("outrider"))
    return all(row.identical == row.texts for row in summarize(run))


def _title(run: RunFile) -> str:
    settings = run.header["settings"]
    return str(settings.get("model") or run.header.get("served_model") or settings.get("url") or "")


def _versions(run: RunFile) -> str:
    commit = run.header.get("commit")
    told = ", ".join(f"{name} {version}" for name, version in run.header["versions"].items())
    return f"{told}, commit {commit}" if commit else told


def _parts(run: RunFile) -> Iterator[Html]:
    """Where it was measured, the plots, the table."""
    header, found = run.header, table_of(run)
    if header["kind"] == "offline":
        yield from (verdict(f"{told}.", "good" if clear else "fair") for told, clear in fastest(summarize(run)))
    facts: list[list[str]] = [["machine", describe(header)], ["versions", _versions(run)], ["begun", header["began"]]]
    facts += [[name.replace("_", " "), _fact(name, header[name])] for name in FACTS if header.get(name)]
    facts += [[line["kind"], f"{line['version']}, {line['format']}"] for line in run.of("system")]
    repeats = max(line["repetition"] for line in run.of("measure")) + 1
    level = median_estimate([0.0] * repeats).level
    held = (
        f"hold with a chance of {share(level)}, from {repeats} repetitions" if repeats > 1 else "none of one repetition"
    )
    facts.append(["intervals", held])
    if header["machine"].get("load_average") is not None:
        facts.append(["load of the machine before", f"{header['machine']['load_average']} (average of a minute)"])
    yield table(["", ""], facts, text=True)
    yield code(header["command"])
    yield from _plots(run)
    yield table(found.head, found.rows)
    yield details("Settings", [code("\n".join(f"{key}: {value}" for key, value in header["settings"].items()))])


FACTS = ("number_format", "bandwidth", "energy", "server", "served_model")


def _fact(name: str, value: Any) -> str:
    return f"{memory(value)}/s, measured by a large copy" if name == "bandwidth" else str(value)


def _plots(run: RunFile) -> Iterator[Html]:
    if run.header["kind"] == "offline":
        yield from _offline_plots(summarize(run))
    elif run.header["kind"] == "serve":
        yield from _serve_plots(summarize_serve(run))
    else:
        rows = summarize_peers(run)
        kinds, systems = (list(dict.fromkeys(each)) for each in ((r.category for r in rows), (r.system for r in rows)))
        rates = {(row.category, row.system): row.tokens_per_second.value for row in rows}
        if all((kind, system) in rates for kind in kinds for system in systems):
            bars = [Bars(system, [rates[kind, system] for kind in kinds]) for system in systems]
            yield bar_plot("tok/s", kinds, bars)


def _offline_plots(rows: Seq[RowSummary]) -> Iterator[Html]:
    """Speed-up by prompts, speed-up by batch where there are several, and acceptance by position."""
    drafters = list(dict.fromkeys(row.row for row in rows if row.row != PLAIN))
    places = list(dict.fromkeys(place_of(row.cell) for row in rows))
    ratios = {(place_of(row.cell), row.row): row.speedup.value for row in rows if row.speedup is not None}
    shown = [place for place in places if all((place, drafter) in ratios for drafter in drafters)]
    if drafters and shown:
        bars = [Bars(drafter, [ratios[place, drafter] for place in shown]) for drafter in drafters]
        yield bar_plot("Speed-up over plain decoding", shown, bars)
    lines = list(_by_batch(rows, drafters))
    if any(len(line.points) > 1 for line in lines):
        yield line_plot("Speed-up by batch", lines, across="batch", marks=[Mark("plain", y=1.0)], log=True)
    whole = [row for row in rows if row.row != PLAIN and row.cell["category"] == ALL] or [
        row for row in rows if row.row != PLAIN
    ]
    for title, lines in (
        ("Acceptance by position, of all drafts", [(row, row.per_position_acceptance_rates) for row in whole]),
        ("Acceptance by position, conditional", [(row, row.per_position_conditional_rates) for row in whole]),
    ):
        drawn = [
            Line(f"{row.row}, {place_of(row.cell)}", [(i + 1.0, rate) for i, rate in enumerate(rates)])
            for row, rates in lines
            if len(rates) > 1
        ]
        if drawn:
            yield line_plot(title, drawn[:8], across="position in the draft", zero=True)


def _by_batch(rows: Seq[RowSummary], drafters: Seq[str]) -> Iterator[Line]:
    """A line for each drafter: of all categories together, or the only one, at the last of the other settings."""
    last = {**rows[-1].cell, "batch": None}  # those of all categories come last
    for drafter in drafters:
        own = [row for row in rows if row.row == drafter and {**row.cell, "batch": None} == last]
        found = sorted((row.cell["batch"], row.speedup) for row in own if row.speedup is not None)
        yield Line(drafter, [(b, s.value) for b, s in found], [(s.low, s.high) for _, s in found])


def _serve_plots(found: Seq[LoadSummary]) -> Iterator[Html]:
    for title, unit in (("tok/s by conversations at once", "concurrency"), ("tok/s by conversations a second", "rate")):
        own = [each for each in found if each.load[unit] is not None]
        conditions = list(dict.fromkeys(each.speculation for each in own))
        lines: list[Line] = []
        for condition in conditions:
            same = sorted((each for each in own if each.speculation == condition), key=lambda each: each.load[unit])
            rates = [(float(each.load[unit]), each.output_throughput) for each in same]
            name = condition if condition == SERVED else f"speculation {condition}"
            lines.append(Line(name, [(x, r.value) for x, r in rates], [(r.low, r.high) for _, r in rates]))
        if any(len(line.points) > 1 for line in lines):
            yield line_plot(title, lines, across=unit, log=True, zero=True)


def _compared(runs: Mapping[str, RunFile]) -> Iterator[Html]:
    """Rows that several runs have, side by side: tok/s, and the speed-up with its interval."""
    figures: dict[tuple[str, str], dict[str, RowSummary]] = {}
    for name, run in runs.items():
        for row in summarize(run):
            figures.setdefault((place_of(row.cell), row.row), {})[name] = row
    shared = {key: own for key, own in figures.items() if len(own) > 1}
    if not shared:
        yield paragraph("No row is in more than one run.")
        return
    rows: list[list[str]] = []
    for (place, drafter), own in shared.items():
        cells = [place, drafter]
        for name in runs:
            row = own.get(name)
            cells += ["", ""] if row is None else [digits(row.tokens_per_second.value), interval(row.speedup)]
        rows.append(cells)
    yield table(["prompts", "row", *(f"{name}: {what}" for name in runs for what in ("tok/s", "speed-up"))], rows)
    machines = {name: describe(run.header) for name, run in runs.items()}
    if len(set(machines.values())) > 1:
        yield note("These runs are of different machines: compare their speed-ups, not their tok/s.")
    if any(row.identical < row.texts for own in shared.values() for row in own.values()):
        yield note("Some of these texts differ from plain decoding's; the tables below say which.")
