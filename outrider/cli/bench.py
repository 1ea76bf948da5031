"""`outrider bench`: a group of commands. A word that names none of them is the MODEL of `offline`."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from outrider.cli.bench_offline import offline
from outrider.cli.bench_peers import peers
from outrider.cli.bench_report import report
from outrider.cli.bench_rounds import rounds
from outrider.cli.bench_serve import serve
from outrider.cli.options import flatten_options

DEFAULT = "offline"


class DefaultGroup(TyperGroup):
    """Without the name of a command, DEFAULT is meant: `outrider bench demo` is `outrider bench offline demo`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ctx.help_option_names):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="bench",
    cls=DefaultGroup,
    help="Measure speed: plain decoding against drafters, a server under load, and other engines.\n\n"
    "`outrider bench MODEL` is `outrider bench offline MODEL`.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(DEFAULT)(flatten_options(offline))
app.command("rounds")(flatten_options(rounds))
app.command("serve")(flatten_options(serve))
app.command("peers")(flatten_options(peers))
app.command("report")(flatten_options(report))
