"""The command `outrider`: its verbs, and how each kind of failure ends. Torch is imported by the verb that needs it."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence as Seq
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from outrider import __version__
from outrider.cli.bench import bench
from outrider.cli.chat import chat
from outrider.cli.list import list_drafters, list_models
from outrider.cli.options import grouped
from outrider.cli.pull import pull
from outrider.cli.run import run
from outrider.cli.serve import serve
from outrider.cli.show import clean
from outrider.cli.usage import UsageError, explain
from outrider.core.errors import ConfigError, LosslessError, OutriderError

INTERRUPTED = 130  # 128 + SIGINT, as shells have it

app = typer.Typer(
    name="outrider",
    help="Lossless speculative decoding: the same text, sooner.",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
app.command("run")(grouped(run))
app.command("chat")(grouped(chat))
app.command("bench")(grouped(bench))
app.command("serve")(grouped(serve))
app.command("pull")(pull)
app.command("list")(list_models)
app.command("drafters")(list_drafters)


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="The version.")] = False,
) -> None:
    if version:
        typer.echo(f"outrider {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


def main(given: Seq[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit code: 0, 1 for a failed request, 2 for what cannot be."""
    words = list(sys.argv[1:] if given is None else given)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character still shows the rest
    try:
        code = typer.main.get_command(app).main(words, prog_name="outrider", standalone_mode=False) or 0
        sys.stdout.flush()
    except UsageError as error:
        _fail(explain(error, words), 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _leave_quietly()
    except LosslessError:
        raise
    except Exception as error:
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        if isinstance(error, OutriderError):
            _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
        _fail(f"{type(error).__name__}: {error}; not foreseen: OUTRIDER_DEBUG=1 shows where it happened", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> NoReturn:
    """Say what is wrong in one red line, and leave."""
    line = " ".join(clean(message).split())
    Console(stderr=True, highlight=False).print(Text(f"error: {line}", "red"), soft_wrap=True)
    sys.exit(code)


def _leave_quietly() -> NoReturn:
    """Whoever read our output has gone; keep the interpreter from complaining about it on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


if __name__ == "__main__":
    main()
