"""A proof as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.prove.checks import FAILS, HOLDS, INCOMPLETE, Check, Proof
from outrider.prove.evalues import FALSE_ALARM
from outrider.report.numbers import seconds
from outrider.report.page import Html, Section, Tone, details, join, note, page, strong, table, verdict
from outrider.report.plot import Line, Mark, line_plot

GROUPS = {
    "server": "What the server tells and lets one switch",
    "rounding": "How far rounding moves logits",
    "rules": "The rules of verification, enumerated in float64",
    "texts": "Texts with and without speculation, token by token",
    "sampled": "Sampled texts against the target's distribution",
}
NOTES = {
    "rounding": "The same text is read in passes of different shapes. Where the scores of two tokens are closer than "
    "four times the largest difference, rounding alone may exchange them: a tie. Any other difference is a bug.",
    "texts": "Each text is generated without drafts first. Known texts as drafts: a drafter that knows the text drafts "
    "whole blocks, blocks that go wrong, and trees.",
    "sampled": "Evidence is the logarithm of an e-value: it reaches the limit in a correct engine with a probability "
    f"of at most {FALSE_ALARM:g} over all tests of this page together. A bias is a "
    "total variation, at every token: the smallest that all its simulations showed, on these very texts.",
}
MAX_OPEN = 12  # checks that are not folded away
ANSWERS = {
    HOLDS: "No change by speculation was found",
    FAILS: "Not lossless, speculation changed a text or a distribution",
    INCOMPLETE: "Not proved, nothing speaks against it and not all could be checked",
}
"""The answer in one line, by exit code."""
TONES: dict[int, Tone] = {HOLDS: "good", FAILS: "bad", INCOMPLETE: "fair"}


def proof_page(proof: Proof) -> str:
    """The whole file."""
    title = f"outrider prove: {proof.subject.get('model') or proof.subject.get('url')}"
    told = [[str(name), _told(value)] for name, value in proof.subject.items()]
    answer = join(strong(ANSWERS[proof.exit_code]), f": {proof.headline}")
    first = [verdict(answer, TONES[proof.exit_code]), table(["", ""], told, text=True)]
    first.append(note(f"{len(proof.checks)} checks in {seconds(proof.seconds)}."))
    failing = [check for check in proof.checks if check.status in ("fails", "not checked")]
    sections = [Section("", first)]
    if failing:
        sections.append(Section("What does not hold, or could not be checked", [_check_table(failing)]))
    for group, name in GROUPS.items():
        checks = [check for check in proof.checks if check.group == group]
        if checks:
            sections.append(Section(name, _group_parts(group, checks)))
    return page(title, sections)


def _group_parts(group: str, checks: Seq[Check]) -> list[Html]:
    parts = [note(NOTES[group])] if group in NOTES else []
    rows = [check for check in checks if "visible_bias" in check.figures]
    if group == "sampled" and len(rows) > 1:
        limit = rows[0].figures["limit"]
        points = [(i + 1.0, min(check.figures["log_e"], 4 * limit)) for i, check in enumerate(rows)]
        marks = [Mark("fails", y=limit)]
        parts.append(
            line_plot("Evidence against the target's distribution", [Line("test", points)], across="test", marks=marks)
        )
    pooled = [check for check in checks if ": all " in check.name]
    if pooled:
        parts.append(_check_table(pooled))
    rest = [check for check in checks if check not in pooled]
    shown = _check_table(rest)
    parts.append(
        shown if len(rest) <= MAX_OPEN else details(f"all {len(rest)} {'other ' if pooled else ''}checks", [shown])
    )
    return parts


def _told(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _check_table(checks: Seq[Check]) -> Html:
    rows = [[check.name, _status(check), check.detail] for check in checks]
    return table(["check", "", "what was found"], rows, text=True)


def _status(check: Check) -> Html:
    return join(check.status) if check.status == "holds" else strong(check.status)
