"""The command `outrider`: its subcommands and exit codes. Torch is imported by the subcommand that needs it."""

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
from outrider.cli.advise import advise
from outrider.cli.bench import app as bench_app
from outrider.cli.chat import chat
from outrider.cli.check import check
from outrider.cli.export import export
from outrider.cli.list import list_drafters, list_models
from outrider.cli.options import flatten_options
from outrider.cli.plan import plan
from outrider.cli.prove import prove
from outrider.cli.pull import pull
from outrider.cli.run import run
from outrider.cli.screen import clean
from outrider.cli.serve import serve
from outrider.cli.train import app as train_app
from outrider.cli.usage import UsageError, exit_code, usage_message
from outrider.core.errors import LosslessError, OutriderError

INTERRUPTED = 130  # 128 + SIGINT, as in shells

app = typer.Typer(
    name="outrider",
    help="Lossless speculative decoding: the same text, sooner.",
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
app.command("run")(flatten_options(run))
app.command("chat")(flatten_options(chat))
app.add_typer(bench_app)
app.command("serve")(flatten_options(serve))
app.add_typer(train_app)
app.command("advise")(flatten_options(advise))
app.command("export")(flatten_options(export))
app.command("check")(flatten_options(check))
app.command("plan")(flatten_options(plan))
app.command("prove")(flatten_options(prove))
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
    """Run the command line and exit with 0, the command's own code, 1 for a failure at run time, or 2 for bad input."""
    words = list(sys.argv[1:] if given is None else given)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for terminals whose encoding lacks a character
    try:
        code = typer.main.get_command(app).main(words, prog_name="outrider", standalone_mode=False) or 0
        sys.stdout.flush()
    except UsageError as error:
        _fail(usage_message(error, words), 2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _exit_without_output()
    except LosslessError:
        raise
    except Exception as error:
        if os.environ.get("OUTRIDER_DEBUG") == "1":
            raise
        if isinstance(error, OutriderError):
            _fail(str(error), exit_code(error))
        if isinstance(error, PermissionError):
            where = error.filename or "a file"
            _fail(f"{where}: permission denied; OUTRIDER_HOME names another folder for models", 2)
        _fail(f"{type(error).__name__}: {error}; unexpected: OUTRIDER_DEBUG=1 shows where it happened", 1)
    sys.exit(code)


def _fail(message: str, code: int) -> NoReturn:
    """Print the error in one red line, and exit."""
    line = " ".join(clean(message).split())
    Console(stderr=True, highlight=False).print(Text(f"error: {line}", "red"), soft_wrap=True)
    sys.exit(code)


def _exit_without_output() -> NoReturn:
    """Exit with 1 after a broken pipe, without the interpreter's message about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)


if __name__ == "__main__":
    main()
