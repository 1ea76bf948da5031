"""`outrider check`: whether a draft model or a head can draft for a target, and which options it needs."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from outrider.cli.options import argument, option
from outrider.cli.plan import write_page
from outrider.cli.screen import Screen, clean, progress_bars
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.check.findings import Report

STYLES = {"ok": "#1f9d3a", "note": "dim", "caution": "#b8860b", "padding": "#3b82f6"}
STYLES |= {"option": "#b8860b", "cross": "#b8860b", "refuse": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCommand:
    """Check."""

    target: str = argument(None, "Folder, Hugging Face id or .gguf file of the target", metavar="TARGET")
    draft: str = argument(None, "The same of a draft model, or of a drafting head", metavar="DRAFT")
    no_smoke: bool = option(False, "Compare files only, load nothing")
    seconds: float = option(10.0, "Of drafting")
    device: str = option("auto", "cpu, cuda, cuda:1")
    dtype: str = option("auto", "float32, bfloat16 or float16")
    quantize: str = option("auto", "int8 or int4 weights on the CPU, or none")
    html: str | None = option(None, "Write a page", metavar="FILE")
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        if not self.target or not self.draft:
            raise ConfigError("check takes a target and a draft: `outrider check TARGET DRAFT`")
        if not 0 < self.seconds <= 3600:
            raise ConfigError(f"--seconds must be above 0 and at most 3600, got {self.seconds}")


def check(given: CheckCommand) -> None:
    """Tell whether a draft model or a drafting head can draft for a target, and what to do about what is wrong.

    Vocabularies, templates, limits, kinds and sizes are compared, then both are loaded and draft for ten
    seconds. The exit code is 0 to use it as it is, 1 where it needs an option or cross-model, 2 to refuse.
    """
    from outrider.check.doctor import check_pair
    from outrider.check.page import check_page
    from outrider.check.smoke import RunOptions

    screen = Screen()
    options = RunOptions(device=given.device, dtype=given.dtype, quantize=given.quantize, seconds=given.seconds)
    with progress_bars(screen.notes) as progress:
        report = check_pair(given.target, given.draft, options, smoke=not given.no_smoke, progress=progress)
    if given.html is not None:
        write_page(given.html, check_page(report))
    if given.json:
        sys.stdout.write(json.dumps(report.as_json(), allow_nan=False) + "\n")
    else:
        _show(screen, report)
    if report.exit_code:
        raise typer.Exit(report.exit_code)


def _show(screen: Screen, report: Report) -> None:
    from outrider.check.page import MEANINGS, ranked

    for finding in ranked(report):
        line = Text(f"{finding.level:8}", STYLES[finding.level]).append(f"{finding.code}: ", "bold")
        screen.out.print(line.append(clean(finding.what)), soft_wrap=True)
        for name, text in (("so", finding.consequence), ("fix", finding.fix)):
            if text:
                screen.out.print(Text(f"{'':8}{name}: {clean(text)}", "dim"), soft_wrap=True)
    screen.say("verdict", f": {report.verdict}. {MEANINGS[report.verdict]}")
    if report.command:
        screen.say("next", f": {report.command}")
