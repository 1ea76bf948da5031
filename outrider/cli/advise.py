"""`outrider advise`: which drafter to use for a target, or none."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from outrider.cli.options import RuntimeOptions, argument, option
from outrider.cli.plan import write_page
from outrider.cli.screen import Screen, about, passing_line, progress_bars
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.advise.advice import Advice
    from outrider.advise.measure import Scope
    from outrider.advise.measured import Measured
    from outrider.llm import LLM


@dataclass(frozen=True, slots=True)
class Extent:
    """How much to measure."""

    limit: int
    temperatures: str
    batches: str
    contexts: str


USUAL = Extent(6, "0,1", "1,4", "1024")
DEMO = Extent(3, "0", "1", "")
"""The extent for the model `demo`, with which an advice takes a minute or two on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions:
    """Advice."""

    target: str = argument("demo", "Folder, Hugging Face id or .gguf file (demo)", metavar="TARGET")
    draft: list[str] = option((), "A draft model or head to try; repeatable", metavar="NAME")  # noqa: RUF009 - a field
    prompts: Path | None = option(None, "A .jsonl or .txt file of prompts (built-in ones)", metavar="FILE")  # noqa: RUF009 - a field
    limit: int | None = option(None, f"Prompts to take ({USUAL.limit}; of demo {DEMO.limit})")
    max_tokens: int = option(48, "Max tokens of an answer")
    temperatures: str | None = option(
        None,
        f"With commas between; the first one decides ({USUAL.temperatures}; of demo {DEMO.temperatures})",
        metavar="T,T",
    )
    batches: str | None = option(
        None, f"With commas between; the first one decides ({USUAL.batches}; of demo {DEMO.batches})", metavar="N,N"
    )
    contexts: str | None = option(
        None, f"Rounds are also timed behind so many tokens ({USUAL.contexts}; of demo none)", metavar="N,N"
    )
    url: str | None = option(None, "Advise for a running vLLM or Outrider, from its counters; its key: OPENAI_API_KEY")
    out: Path | None = option(None, "Keep what is measured; continued if it is there", metavar="FILE")  # noqa: RUF009 - a field
    html: str | None = option(None, "Write a page", metavar="FILE")
    json: bool = option(False, "One JSON object on stdout")

    @property
    def extent(self) -> Extent:
        """The extent that the options give; what they leave out has the usual value for the target."""
        asked = {name: getattr(self, name) for name in Extent.__slots__}
        given = {name: value for name, value in asked.items() if value is not None}
        return replace(DEMO if self.target == "demo" else USUAL, **given)


def advise(given: AdviseOptions, runtime: RuntimeOptions) -> None:
    """Measure which drafter makes a target answer soonest on your prompts, at which length, up to which load.

    Says so where none does. Defaults are in brackets.
    """
    screen = Screen()
    if given.url is not None:
        _advise_url(given, screen)
        return
    options = {name: value for name, value in asdict(runtime).items() if value is not None}
    with progress_bars(screen.notes) as progress:
        try:
            advice = _advise(given, options, screen, progress)
        except KeyboardInterrupt:
            kept = "the same command continues from here" if given.out else "with --out FILE it could be continued"
            screen.note(f"interrupted; {kept}")
            raise
    if given.html is not None:
        from outrider.advise.page import advice_page

        write_page(given.html, advice_page(advice))
    if given.json:
        sys.stdout.write(json.dumps(advice.as_json(), allow_nan=False) + "\n")
    else:
        _show(screen, advice, given)


def _advise(given: AdviseOptions, options: dict[str, Any], screen: Screen, progress: Any) -> Advice:
    from outrider.advise.advice import VERIFIED, Advice, Adviser
    from outrider.advise.candidates import candidates
    from outrider.advise.duration import expected_seconds, probe
    from outrider.checkpoints.resolve import resolve
    from outrider.drafters.shipped import shipped_for
    from outrider.llm import LLM

    resolve(given.target, progress=progress)  # fetched first: the time of loading is counted below
    opened = time.monotonic()
    with LLM(given.target, drafter="none", progress=progress, **options) as llm:
        loading = time.monotonic() - opened
        scope, folder = _scope(given, llm), llm.loaded.folder
        facts, paces = _facts(llm, given, scope), probe(llm, scope)
    wanted = list(candidates(folder, given.draft))
    # without the number of CPU threads, which is measured anew each time
    kept = Kept(given.out, facts | {"device": facts["device"].partition(",")[0], "scope": repr(scope)})
    if kept.known:
        screen.note(f"continuing: {given.out} holds {', '.join(each.drafter for each in kept.known)}")
    left = [each for each in wanted if each.drafter not in {known.drafter for known in kept.known}]
    takes = about(expected_seconds(scope, paces, loading, left, min(VERIFIED, len(wanted))))
    screen.note(f"{len(wanted)} drafters are tried, and the best {VERIFIED} run beside plain decoding: takes {takes}")
    if given.extent == DEMO:
        more = f"--limit {USUAL.limit} --temperatures {USUAL.temperatures} --batches {USUAL.batches}"
        screen.note(f"more is measured with {more} --contexts {USUAL.contexts}, as of every other target")
    began, show = time.monotonic(), passing_line(screen)
    adviser = Adviser(
        given.target,
        scope,
        options,
        lambda drafter, what: show(f"{time.monotonic() - began:.0f} s, of {takes}; now: {drafter}, {what}"),
        kept.add,
    )
    shipped = shipped_for(folder)
    begun = Advice(given.target, facts, shipped=str(shipped.folder) if shipped else "")
    advice = adviser.run(wanted, kept.known, begun)
    kept.finish(advice)
    return advice


class Kept:
    """Keeps the measurements in a file, from which an interrupted run continues."""

    def __init__(self, file: Path | None, subject: dict[str, str]) -> None:
        from outrider.advise.measured import Measured

        self.file = file
        self.digest = sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()
        self.known: list[Measured] = []
        if file is None or not file.exists():
            return
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            known = [Measured.from_json(each) for each in data["measured"]]
            same = data["of"] == self.digest
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--out {file}: not what advise wrote ({error!r}); delete it or name another") from error
        if not same:
            raise ConfigError(f"--out {file} holds what was measured with other options or versions; name another file")
        self.known = known

    def add(self, found: Measured) -> None:
        self.known = [each for each in self.known if each.drafter != found.drafter] + [found]
        self._write({"measured": [each.as_json() for each in self.known]})

    def finish(self, advice: Advice) -> None:
        self._write(advice.as_json())

    def _write(self, data: dict[str, Any]) -> None:
        if self.file is None:
            return
        try:
            self.file.write_text(json.dumps({"of": self.digest} | data, indent=1, allow_nan=False), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out {self.file}: {error.strerror or error}") from error


def _scope(given: AdviseOptions, llm: LLM) -> Scope:
    from outrider.advise.measure import Scope
    from outrider.advise.prompts import read_prompt_ids

    extent = given.extent
    batches, contexts = _whole("--batches", extent.batches, 1, 1024), _whole("--contexts", extent.contexts, 1, 1 << 20)
    room = llm.loaded.target.context
    for name, value, low, high in (("limit", extent.limit, 1, 10_000), ("max-tokens", given.max_tokens, 8, 1 << 16)):
        if not low <= value <= high:
            raise ConfigError(f"--{name} must be {low} to {high}, got {value}")
    prompts = read_prompt_ids(llm.tokenizer, given.prompts, extent.limit, room - given.max_tokens)
    fitting = tuple(each for each in contexts if each + 64 <= room)
    return Scope(prompts, _temperatures(extent.temperatures), batches, fitting, given.max_tokens)


def _facts(llm: LLM, given: AdviseOptions, scope: Scope) -> dict[str, str]:
    import torch

    from outrider import __version__

    device = llm.loaded.target.device
    return {
        "target": given.target,
        "weights": llm.loaded.format,
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, threads: {llm.loaded.threads}",
        "prompts": f"{len(scope.prompts)} of {given.prompts or 'the built-in suites'}",
        "max tokens": str(scope.max_tokens),
        "versions": f"outrider {__version__}, torch {torch.__version__}",
    }


def _advise_url(given: AdviseOptions, screen: Screen) -> None:
    from outrider.advise.remote import advise_remote, read_counters

    for name, value in (("draft", given.draft), ("prompts", given.prompts), ("out", given.out)):
        if value:
            raise ConfigError(
                f"--{name} has no effect with --url, which reads a server's counters and measures nothing"
            )
    url = given.url or ""
    counters = read_counters(url, os.environ.get("OPENAI_API_KEY", ""))
    lines = advise_remote(counters)
    if given.html is not None:
        from outrider.advise.page import remote_page

        write_page(given.html, remote_page(counters, lines, url))
    if given.json:
        sys.stdout.write(json.dumps(asdict(counters) | {"advice": lines}) + "\n")
        return
    for line in lines:
        screen.say("", line)
    screen.note("next: `outrider bench serve URL` measures it under load, with drafts and without")


def _show(screen: Screen, advice: Advice, given: AdviseOptions) -> None:
    from outrider.advise.page import chosen, configurations, samples, summary, verified_rows

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("drafter", overflow="fold")
    for name in ("length", "temp.", "batch", "predicted", "measured", "τ", "texts"):
        table.add_column(name, justify="left" if name == "texts" else "right", no_wrap=True)
    for row in verified_rows(advice):
        table.add_row(*row)
    screen.out.print(table)
    of = f"Prompts: {advice.facts['prompts']}; at most {advice.facts['max tokens']} tokens a text."
    screen.note(f"{samples(advice)} {of}")
    for name, why in advice.unfit.items():
        screen.note(f"{name} does not fit: {why}")
    screen.say("advice", f": {summary(advice)}")
    choice = chosen(advice)
    if choice is None:
        screen.say("use", f": outrider serve {advice.target} --drafter none")
        return
    for name, text in configurations(choice):
        screen.say(name, f": {text.strip()}")
    if given.html is None:
        screen.note("--html FILE writes all of it as a page, with plots")


def _whole(name: str, text: str, low: int, high: int) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError as error:
        raise ConfigError(f"{name} takes whole numbers with commas between them, got {text!r}") from error
    if (not found and name == "--batches") or any(not low <= each <= high for each in found):
        raise ConfigError(f"{name} takes numbers from {low} to {high}, got {text!r}")
    return found


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise ConfigError(f"--temperatures takes numbers with commas between them, got {text!r}") from error
    if not found or any(not 0 <= each <= 2 for each in found):
        raise ConfigError(f"--temperatures takes numbers from 0 to 2, got {text!r}")
    return found
