"""A report as an HTML page."""

from __future__ import annotations

from outrider.check.findings import Finding, Report
from outrider.report.numbers import count, seconds
from outrider.report.page import Html, Section, Tone, code, join, note, page, strong, table, verdict
from outrider.report.plot import Bars, bar_plot

ORDER = ("refuse", "cross", "option", "padding", "caution", "note", "ok")
"""The levels, most serious first."""
TONES: dict[str, Tone] = {"use": "good", "use with padding": "good", "needs cross-vocabulary": "fair", "refuse": "bad"}
MEANINGS = {
    "use": "The draft can be used as it is.",
    "use with padding": "The draft can be used; the vocabularies are of different lengths, which is taken care of.",
    "needs cross-vocabulary": "The vocabularies differ: the draft can be used through cross-model, which maps them.",
    "refuse": "The draft cannot be used with this target.",
}


def ranked(report: Report) -> list[Finding]:
    """The findings, most serious first."""
    return sorted(report.findings, key=lambda finding: ORDER.index(finding.level))


def check_page(report: Report) -> str:
    """The whole file."""
    head = [verdict(join(strong(report.verdict), f": {MEANINGS[report.verdict]}"), TONES[report.verdict])]
    if report.command:
        head.append(code(report.command))
    sections = [Section("", head)]
    wrong = [each for each in ranked(report) if each.level != "ok"]
    if wrong:
        rows = [[each.level, each.code, each.what, each.consequence, each.fix] for each in wrong]
        columns = ["", "code", "what was found", "what follows", "what to do"]
        sections.append(Section("Findings", [table(columns, rows, text=True)]))
    sound = [[each.code, each.what] for each in report.findings if each.level == "ok"]
    if sound:
        sections.append(Section("Sound", [table(["code", "what was checked"], sound, text=True)]))
    if report.smoke is not None:
        sections.append(Section("Acceptance", _acceptance(report)))
    return page(f"{report.draft} as a draft for {report.target}", sections)


def _acceptance(report: Report) -> list[Html]:
    smoke = report.smoke
    if smoke is None:
        return []
    names = [str(i + 1) for i in range(len(smoke.by_position))]
    bars = [Bars("accepted", smoke.by_position)]
    plot = bar_plot("share of drafts accepted up to each position", names, bars, across="position", show=_share)
    told = (
        f"{count(smoke.tokens)} tokens in {count(smoke.rounds)} rounds and {seconds(smoke.seconds)}, greedy, built-in "
        f"prompts, one at a time: {smoke.tau:.2f} tokens for each pass of the target, its own included."
    )
    return [plot, note(told)]


def _share(value: float) -> str:
    return f"{value:.2f}"
