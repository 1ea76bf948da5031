"""`outrider bench report`: runs as one HTML page, and as tables in Markdown."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from outrider.cli.options import argument, option
from outrider.cli.plan import write_page
from outrider.cli.screen import Screen
from outrider.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOptions:
    """Report."""

    files: list[Path] = argument((), "Files that --out of a bench command wrote", metavar="FILE...")  # noqa: RUF009 - a field
    html: Path | None = option(None, "Where the page goes (beside the first file)", metavar="FILE")  # noqa: RUF009 - a field
    markdown: bool = option(False, "Only the tables, on stdout")


def report(options: ReportOptions) -> None:
    """Compare runs on one HTML page, and print their tables in Markdown."""
    from outrider.bench.page import report_markdown, report_page
    from outrider.bench.record import read_run

    if not options.files:
        raise ConfigError("report takes files that `outrider bench --out FILE` wrote; name at least one")
    names = [file.stem for file in options.files]
    shown = names if len(set(names)) == len(names) else list(map(str, options.files))
    runs = {name: read_run(file) for name, file in zip(shown, options.files, strict=True)}
    empty = [name for name, run in runs.items() if not run.of("measure")]
    if empty:
        raise ConfigError(f"{', '.join(empty)}: nothing is measured yet; the command that wrote it continues it")
    sys.stdout.write(report_markdown(runs))
    if not options.markdown:
        file = options.html or options.files[0].expanduser().with_suffix(".html")
        write_page(str(file), report_page(runs))
        Screen().note(f"page: {file}")
