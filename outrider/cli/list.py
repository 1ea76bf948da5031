"""`outrider list` and `outrider drafters`: the installed models and the drafters."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.screen import Screen, clean


def list_models(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """List the installed models, and which of them a drafting head is shipped for."""
    from outrider.checkpoints.folder import installed_models
    from outrider.checkpoints.storage import outrider_home
    from outrider.drafters.shipped import shipped_for

    models = list(installed_models())
    if as_json:
        rows = [
            {
                "name": model.name,
                "architecture": model.architecture,
                "parameters": model.parameters or None,
                "size": model.size,
                "path": str(model.path),
                "head": head.name if (head := shipped_for(model.path)) else None,
            }
            for model in models
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    screen = Screen()
    if not models:
        screen.note(f"no models in {outrider_home()}; `outrider pull demo` fetches a small one")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("name", "architecture", "parameters", "size"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("parameters", "size") else "left")
    table.add_column("head", no_wrap=True)
    table.add_column("path", overflow="fold")
    for model in models:
        parameters = human_count(model.parameters) if model.parameters else "?"
        head = shipped_for(model.path)
        shipped = f"{head.drafter}, shipped" if head else ""
        cells = (model.name, model.architecture, parameters, human_size(model.size), shipped, str(model.path))
        table.add_row(*(Text(clean(cell)) for cell in cells))
    screen.out.print(table)


def list_drafters() -> None:
    """List the drafters, with their options for --drafter."""
    from outrider.drafters.registry import DRAFTERS, describe_drafters

    names = {config: name for name, config in DRAFTERS.items()}

    def shown(default: Any) -> str:
        each = default if isinstance(default, tuple) else (default,)
        return "+".join(names.get(type(one), str(one)) for one in each)

    screen = Screen()
    for drafter in describe_drafters():
        screen.say(drafter.name, f"  {drafter.summary}")
        table = Table(box=None, padding=(0, 0, 0, 2), show_header=False)
        for name, default, doc in drafter.options:
            table.add_row(Text(f"{name}={shown(default)}"), Text(doc, "dim"))
        if drafter.options:
            screen.out.print(table)


def human_size(size: int) -> str:
    """A size in bytes, in powers of 1000: 1.5 GB."""
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} B"


def human_count(number: int) -> str:
    """A count of parameters: 135M, 1.5B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            value = number / size
            return f"{value:.0f}{unit}" if value >= 10 else f"{value:.1f}{unit}"
    return str(number)
