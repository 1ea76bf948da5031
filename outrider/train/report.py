"""The page a training run ends with: what the drafter is worth, what it costs, and how to use it. No scripts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outrider.report.page import Html, Section, code, details, escaped, join, note, page, paragraph, strong, table
from outrider.report.plot import Line, line_plot
from outrider.train.acceptance import Acceptance
from outrider.train.measure import Measured


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


def training_plots(history: Seq[dict[str, Any]]) -> list[Html]:
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
        line_plot("loss", losses, across="step"),
        line_plot("expected τ on held-out answers", taus, across="step"),
        line_plot("acceptance by position, greedy, given those before", positions, across="step"),
    ]


def report_page(data: ReportData) -> str:
    """The page as HTML; all of it in one file."""
    use = f"outrider serve {data.target} --drafter {data.drafter}"
    sections = [
        Section("", [_summary(data)]),
        Section("Use it", [code(use)]),
        Section("Acceptance on held-out answers", [_positions(data), *_kinds(data), *training_plots(data.history)]),
    ]
    if data.measured is not None:
        sections += [Section("Speed", [_speed(data, data.measured)]), Section("Examples", _examples(data.measured))]
    options = ", ".join(f"{name} {value}" for name, value in data.settings.items())
    return page(data.title, [*sections, Section("Settings", [note(options)])])


def _summary(data: ReportData) -> Html:
    share = data.parameters / max(1, data.target_parameters)
    covered = "" if data.coverage is None else f" It can draft {100 * data.coverage:.1f} % of the answers' tokens."
    text = (
        f"Trained on {data.answers:,} answers of {data.target} ({data.tokens:,} tokens) in {data.steps:,} steps and "
        f"{data.seconds / 60:.1f} minutes on {data.device}. {data.parameters:,} parameters, {100 * share:.1f} % of the "
        f"target's; {data.size / 1e6:.1f} MB on disk.{covered} Expected tokens per pass of the target: "
    )
    untrained = f" (untrained {data.before.tau:.2f} and {data.before.tau_sampled:.2f}; without drafts 1)."
    tau, sampled = strong(f"{data.after.tau:.2f}"), strong(f"{data.after.tau_sampled:.2f}")
    return paragraph(join(text, tau, " greedy, ", sampled, " at temperature 1", untrained))


def _positions(data: ReportData) -> Html:
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
    return table(head, rows)


def _kinds(data: ReportData) -> list[Html]:
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
    repeats = "A text that repeats itself is easy to draft: a small share of distinct bigrams inflates τ."
    return [table(head, rows), note(repeats)]


def _speed(data: ReportData, found: Measured) -> Html:
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
    return table(["held-out prompts, greedy, one at a time", ""], rows)


def _examples(found: Measured) -> list[Html]:
    return [
        details(
            f"{each.kind}, τ {each.tau:.2f}, distinct bigrams {each.bigrams:.2f}",
            [Html(f'<p class="prompt">{escaped(each.prompt[-600:])}</p>'), Html(each.html)],
            is_open=True,
        )
        for each in found.examples
    ]
