"""`outrider export`: writes an advice as a configuration and a command for another engine."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from outrider.cli.options import argument, option
from outrider.cli.screen import Screen, clean
from outrider.cli.usage import did_you_mean
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.advise.export import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Export."""

    engine: str = argument(None, "vllm, sglang, tensorrt-llm or llama.cpp", metavar="ENGINE")
    from_: Path = option(None, "What `outrider advise` wrote with --out or --json", metavar="FILE")  # noqa: RUF009 - a field
    target: str | None = option(None, "Where the engine finds the target (as advised)", metavar="NAME")
    draft: str | None = option(None, "Where it finds the draft model or head (as advised)", metavar="NAME")
    drafter: str | None = option(None, "Another drafter than the one advised", metavar="SPEC")
    out: Path | None = option(None, "Write the engine's configuration file", metavar="FILE")  # noqa: RUF009 - a field
    python: str | None = option(None, "Python of the engine's environment, to ask it (this one)", metavar="FILE")
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        if not self.engine or not self.from_:
            raise ConfigError("export takes an engine and an advice: outrider export vllm --from advise.json")


def export(given: ExportOptions) -> None:
    """Write what was advised as a configuration and a command that another engine takes as they are.

    Held against the installed engine, else against what was recorded of one; says which.
    """
    from outrider.advise.export import ENGINES, export_to, with_vllm_head
    from outrider.advise.export_check import check_export

    if given.engine not in ENGINES:
        near = did_you_mean(given.engine, tuple(ENGINES))
        raise ConfigError(f"no engine {given.engine!r}; {near}choose one of: {', '.join(ENGINES)}")
    choice = _choice(given)
    choice = with_vllm_head(choice) if given.engine == "vllm" else choice
    made = export_to(given.engine, choice, str(given.out or ""))
    checked = check_export(made, given.python or "")
    if given.out is not None:
        _write(given.out, made.config or f"#!/bin/sh\nexec {made.command}\n")
    if given.json:
        told = {"engine": made.engine, "arguments": made.arguments, "command": made.command, "config": made.config}
        told |= {"notes": made.notes, "installed": checked.installed, "checked": checked.version}
        sys.stdout.write(json.dumps(told) + "\n")
        return
    screen = Screen()
    if made.config and given.out is None:
        screen.out.print(Text(clean(f"# config.yaml\n{made.config}")), soft_wrap=True, end="")
    screen.out.print(Text(clean(made.command)), soft_wrap=True)
    if not made.arguments:
        screen.note(
            "the advice is not to speculate, and this drafts nothing; --drafter SPEC exports a drafter all the same"
        )
        return
    for each in (*made.notes, f"checked: {checked}"):
        screen.note(each)


def _choice(given: ExportOptions) -> Choice:
    from outrider.advise.saved import read_choice
    from outrider.checkpoints.resolve import resolve

    found = read_choice(given.from_, given.drafter or "")
    target = given.target or (str(resolve("demo")) if found.target == "demo" else found.target)
    return replace(found, target=target, draft=given.draft or "")


def _write(file: Path, text: str) -> None:
    try:
        file.expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {file}: {error.strerror or error}") from error
