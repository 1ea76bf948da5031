"""`outrider prove`: whether an engine's or a server's text is really unchanged by speculation."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from outrider.cli.options import DraftingOptions, RuntimeOptions, argument, option
from outrider.cli.screen import Screen, progress_bars, progress_line
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.prove.checks import Proof
    from outrider.prove.journal import Journal

SHOWN_CHECKS = 20
STYLES = {"holds": "green", "tie": "yellow", "fails": "bold red", "not checked": "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveOptions:
    """Proof."""

    name: str | None = argument(None, "Folder, Hugging Face id, .gguf file or demo", metavar="MODEL")
    url: str | None = option(None, "A server in place of MODEL, such as http://127.0.0.1:8000/v1")
    plain_url: str | None = option(None, "The same model served without speculation", metavar="URL")
    served_model: str | None = option(None, "Its name on the server (the first one)", metavar="NAME")
    prompts: Path | None = option(None, "A .jsonl or .txt file (8 built-in ones)", metavar="FILE")  # noqa: RUF009 - a field
    draws: int = option(1536, "Texts of the sampled tests")
    max_tokens: int = option(24, "Tokens of each compared text")
    max_batch: int = option(16, "Sequences at once")
    out: Path | None = option(None, "Folder of the report (in OUTRIDER_HOME)", metavar="FOLDER")  # noqa: RUF009 - a field
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        if (self.name is None) == (self.url is None):
            raise ConfigError("prove takes a MODEL, such as `outrider prove demo`, or --url of a server: one of them")
        if self.url is None and (self.plain_url or self.served_model):
            raise ConfigError("--plain-url and --served-model belong to --url")
        for name, low, high in (("draws", 64, 1 << 20), ("max_tokens", 8, 512), ("max_batch", 2, 1024)):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"--{name.replace('_', '-')} must be {low} to {high}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveDraftingOptions:
    """Drafting."""

    drafter: str | None = option(None, "NAME:KEY=VALUE,..., A+B or MODULE:CLASS (auto)", metavar="SPEC")
    speculative_config: str | None = option(None, "vLLM's, in place of --drafter", metavar="JSON")
    mode: str | None = option(None, "seeded or distribution (both)", metavar="MODE")
    rule: str = option("block", "Of distribution: block or token")

    def drafting(self) -> DraftingOptions:
        """These options as the checked ones that other commands have. Without --mode the mode is `distribution`."""
        mode, rule = self.mode or "distribution", self.rule if self.mode != "seeded" else None
        return DraftingOptions(drafter=self.drafter, speculative_config=self.speculative_config, mode=mode, rule=rule)


def prove(options: ProveOptions, drafting: ProveDraftingOptions, runtime: RuntimeOptions) -> None:
    """Compare text with and without speculation, token by token and in distribution.

    Exit code 0 only if everything holds; 1: something fails; 3: something could not be checked.
    Interrupted, the same command continues.
    """
    screen = Screen()
    proof, folder = (
        _prove_url(options, drafting, screen) if options.url else _prove_model(options, drafting, runtime, screen)
    )
    _write_reports(proof, folder)
    if options.json:
        sys.stdout.write(json.dumps(proof.as_dict(), allow_nan=False) + "\n")
        sys.stdout.flush()
    else:
        _print_proof(screen, proof, folder)
    raise typer.Exit(proof.exit_code)


def _prove_model(
    options: ProveOptions, drafting: ProveDraftingOptions, runtime: RuntimeOptions, screen: Screen
) -> tuple[Proof, Path]:
    from outrider import __version__
    from outrider.llm import LLM
    from outrider.prove.local import ENGINE_OPTIONS, LocalProof, ProofSettings
    from outrider.prove.settings import encode_prompts, read_prompt_file

    given = drafting.drafting()
    modes: Any = ("seeded", "distribution") if drafting.mode is None else (given.mode,)
    rule: Any = given.rule or "block"
    prompts = read_prompt_file(options.prompts)
    with progress_bars(screen.notes) as progress:
        llm = LLM(
            options.name or "demo",
            drafter=given.config(),
            mode=modes[0],
            rule=rule,
            max_batch=options.max_batch,
            progress=progress,
            **ENGINE_OPTIONS,
            **asdict(runtime),
        )
    settings = ProofSettings(
        drafter=given.config(),
        modes=modes,
        rule=rule,
        draws=options.draws,
        max_tokens=options.max_tokens,
        prompts=encode_prompts(llm, prompts),
    )
    subject = {
        "model": options.name,
        "drafter": drafting.drafter or drafting.speculative_config or "auto",
        "modes": list(modes),
        "rule": rule,
        "number format": llm.loaded.format,
        "device": str(llm.loaded.target.device),
        "draws": options.draws,
        "max tokens": options.max_tokens,
        "prompts": str(options.prompts or "built-in"),
        "version": __version__,
    }
    folder = _folder(options, subject | {"tokens": settings.prompts, "options": asdict(runtime)})
    journal = _journal(folder, subject | {"tokens": settings.prompts, "options": asdict(runtime)})
    proof = LocalProof(llm, settings, journal)
    try:
        return _run(list(proof.tasks()), journal, subject, screen), folder
    finally:
        proof.close()


def _prove_url(options: ProveOptions, drafting: ProveDraftingOptions, screen: Screen) -> tuple[Proof, Path]:
    if drafting.drafter or drafting.speculative_config:
        raise ConfigError("--drafter and --speculative-config choose a drafter of MODEL; a server at --url has its own")
    from outrider import __version__
    from outrider.prove.api import ApiError
    from outrider.prove.remote import RemoteProof, RemoteSettings
    from outrider.prove.settings import read_prompt_file

    prompts = read_prompt_file(options.prompts)
    settings = RemoteSettings(
        url=options.url or "",
        plain_url=options.plain_url,
        model=options.served_model,
        key=os.environ.get("OPENAI_API_KEY", ""),
        seeded=drafting.drafting().mode == "seeded",
        draws=options.draws,
        max_tokens=options.max_tokens,
        batch=options.max_batch,
        prompts=tuple(prompts),
    )
    subject = {
        "url": options.url,
        "plain url": options.plain_url or "",
        "mode": drafting.mode or "",
        "model": options.served_model or "",
        "draws": options.draws,
        "max tokens": options.max_tokens,
        "prompts": str(options.prompts or "built-in"),
        "version": __version__,
    }
    folder = _folder(options, subject)
    journal = _journal(folder, subject)
    try:
        proof = RemoteProof(settings, journal)
        return _run(list(proof.tasks()), journal, subject | proof.told, screen), folder
    except ApiError as error:  # no check failed: exit code 2
        raise ConfigError(str(error)) from error


def _folder(options: ProveOptions, identity: dict[str, Any]) -> Path:
    """The folder of the report: the given one, or one whose name is unique to this proof."""
    from hashlib import sha256

    from outrider.checkpoints.storage import outrider_home

    if options.out is not None:
        return options.out.expanduser()
    digest = sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()[:8]
    words = "".join(char if char.isalnum() else "-" for char in options.name or options.url or "")
    return outrider_home() / "prove" / f"{words.strip('-')[-40:]}-{digest}"


def _journal(folder: Path, identity: dict[str, Any]) -> Journal:
    from outrider.prove.journal import Journal

    return Journal(folder, identity)


def _run(tasks: list[Any], journal: Journal, subject: dict[str, Any], screen: Screen) -> Proof:
    """Run all tasks, with a line of progress, and delete the journal at the end."""
    from outrider.prove.checks import Proof
    from outrider.prove.journal import run_tasks

    began = time.monotonic()

    if journal.done:
        screen.note(f"continuing: {len(journal.done)} parts were done before")
    try:
        checks = run_tasks(tasks, journal, progress_line(screen, "done"))
    except KeyboardInterrupt:
        screen.note("interrupted; the same command continues from here")
        raise
    proof = Proof(subject, checks, time.monotonic() - began)
    journal.close()
    return proof


def _write_reports(proof: Proof, folder: Path) -> None:
    from outrider.prove.page import proof_page
    from outrider.train.files import write_json, write_text

    write_json(folder / "report.json", proof.as_dict())
    write_text(folder / "report.html", proof_page(proof))


def _print_proof(screen: Screen, proof: Proof, folder: Path) -> None:
    """Print the counts of each group, the checks that do not hold, the verdict, and what to do next."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for heading in ("", "checks", "hold", "ties", "fail", "not checked"):
        table.add_column(heading, justify="left" if not heading else "right")
    for group in dict.fromkeys(check.group for check in proof.checks):
        own = [check.status for check in proof.checks if check.group == group]
        counts = [len(own), *(own.count(status) for status in STYLES)]
        table.add_row(group, *map(str, counts))
    screen.out.print(table)
    shown = [check for check in proof.checks if check.status != "holds"]
    for check in shown[:SHOWN_CHECKS]:
        line = Text(check.status, STYLES[check.status]).append(f"  {check.name}: {check.detail}", "default")
        screen.out.print(line, soft_wrap=True)
    if len(shown) > SHOWN_CHECKS:
        screen.out.print(f"and {len(shown) - SHOWN_CHECKS} more, in the report")
    screen.say(proof.headline, f"\nreport: {folder / 'report.html'}")
    screen.note(_next_step(proof))


def _next_step(proof: Proof) -> str:
    if proof.count("fails"):
        return "next: send report.json with a bug report; `--mode`, `--drafter none` and `--prompts` narrow it down"
    if proof.count("not checked"):
        return "next: give what is missing, as said above, and run it again"
    return "next: `outrider bench` measures whether it is faster"
