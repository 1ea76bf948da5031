"""A plan of replicas as sentences, table rows, and an HTML page."""

from __future__ import annotations

from outrider.fleet.size import Figures, FleetPlan
from outrider.report.numbers import count, digits, seconds, share
from outrider.report.page import Html, Section, note, page, paragraph, table, verdict
from outrider.report.plot import Line, Mark, line_plot

HEAD = ("replicas", "drafts", "tok/s", "computing", "batch", "wait p99", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
HEAD = (*HEAD, "p50", "p99", "holds")  # p50 and p99 alone are of whole requests
LONG = ("computing", "TTFT p50", "TPOT p50", "p50")
"""The columns that a terminal has no room for."""
COMPUTING = (
    "Computing: the share of the time in which a replica has a round under way; in the rest it has no request. Near "
    "100 % is usual and neither good nor bad: further requests join the rounds. Far below it, fewer replicas may do."
)
NOTES = (
    "Replayed, not run: rounds take what was measured by batch and context, requests go to the replica with the fewest "
    "under way, and no time of a network or a balancer is counted.",
    "TTFT: to the first token. TPOT: a token after the first, the mean over a request. p50 and p99: half of the "
    "requests, and 99 of 100, take no longer; alone they are of whole requests.",
    "Each sequence gains the mean tokens of a round: percentiles of TPOT are narrower than where acceptance varies.",
)


def summary(plan: FleetPlan) -> str:
    """The answer in a sentence."""
    bounds = [
        f"p99 of {name} within {digits(value)} ms"
        for name, value in (
            ("latency", plan.goals.latency_ms),
            ("TTFT", plan.goals.ttft_ms),
            ("TPOT", plan.goals.tpot_ms),
        )
        if value is not None
    ]
    if not bounds:
        best = max(plan.rows, key=lambda each: each.output_throughput)
        first = (
            f"{count(best.replicas)} {_plural(best.replicas)}: {digits(best.output_throughput)} output tokens a second"
        )
        return f"{first}; --ttft-ms, --tpot-ms or --latency-ms name what must hold, and find how many it takes"
    told = [
        f"{_plural(2)} {'with' if on else 'without'} drafts: {'no number holds it' if found is None else count(found)}"
        for on, found in plan.needed.items()
    ]
    return f"{', '.join(bounds)}: {'; '.join(told)}"


def how_full(plan: FleetPlan) -> str:
    """An explanation of the columns that show how busy replicas are."""
    return (
        f"Batch: sequences that a replica has at once, the mean, of at most {count(plan.costs.max_batch)}. Wait: "
        "before it begins with a request. A wait far above a round's time says that replicas are full: add one."
    )


def columns_of(plan: FleetPlan) -> tuple[list[str], list[list[str]]]:
    """The headings and the rows of the table; without goals, the column `holds` is left out."""
    width = len(HEAD) if plan.goals.any else len(HEAD) - 1
    return list(HEAD[:width]), [_row(each)[:width] for each in plan.rows]


def fleet_page(plan: FleetPlan) -> str:
    """The whole file."""
    held = not plan.needed or any(found is not None for found in plan.needed.values())
    lengths = plan.trace.arrivals
    load = f"{plan.trace.clients} clients" if plan.trace.clients else f"{digits(plan.trace.rate)} requests a second"
    told = (
        f"{count(len(lengths))} requests of {plan.trace.name}: {load}, prompts of "
        f"{digits(sum(each.prompt for each in lengths) / len(lengths))} tokens and answers of "
        f"{digits(sum(each.output for each in lengths) / len(lengths))} on average."
    )
    sections = [
        Section("", [verdict(summary(plan), "good" if held else "bad"), paragraph(told)]),
        Section("By number of replicas", [*_table(plan), *_plots(plan), *map(note, NOTES)]),
        Section("What a replica's work takes", [paragraph(plan.costs.what), _cost_table(plan)]),
    ]
    return page(f"Replicas for {plan.trace.name}", sections)


def _table(plan: FleetPlan) -> list[Html]:
    return [table(*columns_of(plan)), note(how_full(plan)), note(COMPUTING)]


def _row(each: Figures) -> list[str]:
    tables = (each.ttft_ms, each.tpot_ms, each.latency_ms)
    times = [seconds(table[at] / 1e3) for table in tables for at in (50, 99)]
    holds = "" if each.holds is None else "yes" if each.holds else "no"
    first = [count(each.replicas), "on" if each.speculate else "off", digits(each.output_throughput)]
    load = [share(each.utilisation), digits(each.batch), seconds(each.wait_ms[99] / 1e3)]
    return [*first, *load, *times, holds]


def _plots(plan: FleetPlan) -> list[Html]:
    found: list[Html] = []
    goals = {"ttft_ms": plan.goals.ttft_ms, "tpot_ms": plan.goals.tpot_ms, "latency_ms": plan.goals.latency_ms}
    names = {"ttft_ms": "to the first token", "tpot_ms": "a token", "latency_ms": "of a request"}
    for name, goal in goals.items():
        lines = [
            Line(
                f"drafts {'on' if on else 'off'}",
                [(r.replicas, getattr(r, name)[99]) for r in plan.rows if r.speculate == on],
            )
            for on in (False, True)
        ]
        marks = [] if goal is None else [Mark("the goal", y=goal)]
        found.append(line_plot(f"p99 {names[name]}, ms", lines, across="replicas", marks=marks, log=True, zero=True))
    return found


def _cost_table(plan: FleetPlan) -> Html:
    costs = plan.costs
    drafted = {each.batch: each for each in costs.speculative}
    rows: list[list[str]] = []
    for each in costs.plain:
        other = drafted.get(each.batch)
        plain = [count(each.batch), seconds(each.seconds), digits(each.batch / each.seconds)]
        drafts = ["", "", ""]
        if other is not None:
            rate = other.batch * other.tokens / other.seconds
            drafts = [seconds(other.seconds), f"{other.tokens:.2f}", digits(rate)]
        rows.append([*plain, *drafts])
    return table(["batch", "round", "tok/s", "round with drafts", "tokens a round", "tok/s"], rows)


def _plural(number: int) -> str:
    return "replica" if number == 1 else "replicas"
