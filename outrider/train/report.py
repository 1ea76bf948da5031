"""The page a training run ends with: what the drafter is worth, what it costs, and how to use it. No scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outrider.train.acceptance import Acceptance
from outrider.train.measure import Measured
from outrider.train.plot import Line, svg_plot

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } td, th { padding: .2rem .9rem .2rem 0; text-align: right }
td:first-child, th:first-child { text-align: left } th { font-weight: 600 } tr + tr { border-top: 1px solid #8884 }
code, pre { font: 13px ui-monospace, monospace } pre { padding: .6rem; background: #8881; overflow-x: auto }
.note { opacity: .75 } details { margin: .4rem 0 } .prompt { white-space: pre-wrap; opacity: .75 }
"""


@dataclass(frozen=True, slots=True)
class KindRow:
    """Held-out answers of one kind."""

    name: str
    answers: int
    bigrams: float | None
    """Mean share of distinct bigrams in the greedy ones; None: there are none."""
    before: Acceptance | None
    after: Acceptance | None


@dataclass(frozen=True, slots=True)
class ReportData:
    """All that the page shows."""

    title: str
    target: str
    drafter: str
    """As `--drafter` takes it."""
    answers: int
    tokens: int
    steps: int
    seconds: float
    device: str
    parameters: int
    target_parameters: int
    size: int
    """Bytes of the drafter's files."""
    coverage: float | None
    """Share of the answers' tokens that it can draft; None: it can draft all."""
    before: Acceptance
    after: Acceptance
    kinds: Seq[KindRow]
    history: Seq[dict[str, Any]]
    measured: Measured | None
    settings: dict[str, Any]


def training_plots(history: Seq[dict[str, Any]]) -> list[str]:
    """The loss, the expected τ, and the acceptance by position, as SVG."""
    steps = [each for each in history if "loss" in each]
    looks = [each for each in history if "tau" in each]
    names = [name for name in ("loss", "ce", "l1", "confidence") if steps and name in steps[0]]
    losses = [Line(name, [(each["step"], each[name]) for each in steps]) for name in names]
    taus = [
        Line("greedy", [(each["step"], each["tau"]) for each in looks]),
        Line("temperature 1", [(each["step"], each["tau_sampled"]) for each in looks]),
    ]
    count = len(looks[0]["greedy"]) if looks else 0
    positions = [Line(f"position {k + 1}", [(each["step"], each["greedy"][k]) for each in looks]) for k in range(count)]
    return [
        svg_plot("loss", losses, across="step"),
        svg_plot("expected τ on held-out answers", taus, across="step"),
        svg_plot("acceptance by position, greedy, given those before", positions, across="step"),
    ]


def report_page(data: ReportData) -> str:
    """The page as HTML; all of it in one file."""
    parts = [
        f"<h1>{html.escape(data.title)}</h1>",
        _summary(data),
        "<h2>Use it</h2>",
        f"<pre>outrider serve {html.escape(data.target)} --drafter {html.escape(data.drafter)}</pre>",
        "<h2>Acceptance on held-out answers</h2>",
        _positions(data),
        _kinds(data),
        *training_plots(data.history),
    ]
    if data.measured is not None:
        parts += ["<h2>Speed</h2>", _speed(data, data.measured), "<h2>Examples</h2>", _examples(data.measured)]
    options = ", ".join(f"{name} {value}" for name, value in data.settings.items())
    parts += ["<h2>Settings</h2>", f"<p class=note>{html.escape(options)}</p>"]
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{html.escape(data.title)}</title>'
        f"<style>{STYLE}</style>\n<body>\n{body}\n</body></html>\n"
    )


def _summary(data: ReportData) -> str:
    share = data.parameters / max(1, data.target_parameters)
    covered = "" if data.coverage is None else f" It can draft {100 * data.coverage:.1f} % of the answers' tokens."
    return (
        f"<p>Trained on {data.answers:,} answers of {html.escape(data.target)} ({data.tokens:,} tokens) in "
        f"{data.steps:,} steps and {data.seconds / 60:.1f} minutes on {html.escape(data.device)}. "
        f"{data.parameters:,} parameters, "
        f"{100 * share:.1f} % of the target's; {data.size / 1e6:.1f} MB on disk.{covered} Expected tokens per pass of "
        f"the target: <b>{data.after.tau:.2f}</b> greedy, <b>{data.after.tau_sampled:.2f}</b> at temperature 1 "
        f"(untrained {data.before.tau:.2f} and {data.before.tau_sampled:.2f}; without drafts 1).</p>"
    )


def _table(head: Seq[str], rows: Seq[Seq[str]]) -> str:
    cells = "".join(f"<th>{html.escape(each)}</th>" for each in head)
    lines = ("<tr>" + "".join(f"<td>{html.escape(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{''.join(lines)}</table>"


def _positions(data: ReportData) -> str:
    """The chance that each position is accepted, given that those before it were."""
    count = len(data.after.greedy)
    shown = [
        ("greedy, untrained", data.before.greedy, data.before.tau),
        ("greedy", data.after.greedy, data.after.tau),
        ("temperature 1, untrained", data.before.sampled, data.before.tau_sampled),
        ("temperature 1", data.after.sampled, data.after.tau_sampled),
    ]
    rows = [[name, *(f"{each:.3f}" for each in chances), f"{tau:.2f}"] for name, chances, tau in shown]
    head = ["by position, given those before", *(str(k + 1) for k in range(count)), "τ"]
    return _table(head, rows)


def _kinds(data: ReportData) -> str:
    rows = [
        [
            row.name,
            str(row.answers),
            f"{row.before.tau:.2f}" if row.before and row.before.greedy else "",
            f"{row.after.tau:.2f}" if row.after and row.after.greedy else "",
            f"{row.after.tau_sampled:.2f}" if row.after and row.after.sampled else "",
            "" if row.bigrams is None else f"{row.bigrams:.2f}",
        ]
        for row in data.kinds
        if row.answers
    ]
    head = ["kind", "answers", "τ greedy, untrained", "τ greedy", "τ temperature 1", "distinct bigrams"]
    note = "A text that repeats itself is easy to draft: a small share of distinct bigrams inflates τ."
    return _table(head, rows) + f"<p class=note>{note}</p>"


def _speed(data: ReportData, found: Measured) -> str:
    rows = [
        ["tokens a second, plain", f"{found.plain:.1f}"],
        ["tokens a second with the drafter", f"{found.drafted:.1f}"],
        ["speed-up, measured", f"{found.speedup:.2f} x"],
        ["speed-up, predicted from the expected τ", f"{found.predicted(data.after.tau):.2f} x"],
        ["τ, measured", f"{found.tau:.2f}"],
        ["distinct bigrams of these answers", f"{found.bigrams:.2f}"],
        ["a plain round, ms", f"{found.plain_ms:.2f}"],
        ["a round with drafts, ms", f"{found.round_ms:.2f}"],
        ["of that drafting, where the device waits for it", f"{found.draft_ms:.2f}"],
        ["of that the target's pass", f"{found.verify_ms:.2f}"],
        ["answers identical to plain decoding's", f"{100 * found.identical:.0f} %"],
    ]
    return _table(["held-out prompts, greedy, one at a time", ""], rows)


def _examples(found: Measured) -> str:
    shown = [
        f"<details open><summary>{html.escape(each.kind)}, τ {each.tau:.2f}, distinct bigrams {each.bigrams:.2f}"
        f"</summary><p class=prompt>{html.escape(each.prompt[-600:])}</p>{each.html}</details>"
        for each in found.examples
    ]
    return "\n".join(shown)
