"""`outrider bench peers`: this engine beside others, on the same weights and prompts."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.bench_offline import (
    digest_prompts,
    facts_of,
    gather_prompts,
    measure_until_interrupted,
    short_table,
)
from outrider.cli.options import RuntimeOptions, argument, check_ranges, option
from outrider.cli.screen import Screen, progress_bars
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.bench.peers import PeerPlan
    from outrider.loading.load import LoadedModel

SHOWN = ("prompts", "engine", "tok/s", "over the best other", "identical", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersOptions:
    """Measurement."""

    name: str = argument("demo", "Folder, Hugging Face id or .gguf file (demo)", metavar="MODEL")
    drafter: list[str] = option((), "Our drafters; repeatable (suffix)", metavar="SPEC")  # noqa: RUF009 - a field
    draft: str | None = option(None, "A draft model, for us and Transformers", metavar="FOLDER")
    gguf: Path | None = option(None, "The same weights for llama.cpp (MODEL's file)", metavar="FILE")  # noqa: RUF009 - a field
    python: list[str] = option((), "A Python that has vLLM or llama-cpp-python; repeatable", metavar="PATH")  # noqa: RUF009 - a field
    suites: str | None = option(None, "Built-in prompts: chat, code, ... or all (all)", metavar="NAME,...")
    prompts: list[Path] = option((), "A file of prompts; repeatable", metavar="FILE")  # noqa: RUF009 - a field
    limit: int | None = option(2, "Prompts of each category; 0: all")
    max_tokens: int = option(64, "Max new tokens of each text")
    repeats: int = option(5, "Repetitions, each of all engines in turn")
    out: Path | None = option(None, "Keep measurements here; continued if it has some", metavar="FILE")  # noqa: RUF009 - a field
    json: bool = option(False, "One JSON object on stdout")

    def __post_init__(self) -> None:
        check_ranges(self, max_tokens=(2, 1 << 20), repeats=(1, 1000))


def peers(options: PeersOptions, runtime: RuntimeOptions) -> None:
    """Measure this engine beside Transformers, vLLM and llama.cpp, and say who wins each row.

    Engines that this Python or one named by --python has are run, each in a process of its own.
    """
    from outrider.bench.engines import Engines, load_target
    from outrider.bench.machine import without_folders
    from outrider.bench.peers import PeersBench, summarize_peers
    from outrider.bench.record import make_header, open_run
    from outrider.bench.tables import PEER_COLUMNS, peer_cells

    screen = Screen()
    prompts = gather_prompts(options.suites, options.prompts, options.limit)
    drafters = list(options.drafter) or ["suffix"]
    drafters += [f"draft-model:model={options.draft}"] if options.draft else []
    with progress_bars(screen.notes) as progress:
        engines = Engines(
            lambda: load_target(options.name, drafters, max_batch=1, progress=progress, **asdict(runtime)),
            drafters,
            max_batch=1,
            controlled=drafters,
        )
    try:
        loaded = engines.loaded
        plans = peer_plans(options, loaded, runtime.threads)
        told = json.loads(without_folders(json.dumps([asdict(plan) for plan in plans])))
        settings = {"model": options.name, "drafters": drafters, "peers": told}
        settings |= {"prompts": digest_prompts(prompts), "max_tokens": options.max_tokens, "repeats": options.repeats}
        settings |= {"runtime": asdict(runtime)}
        facts = facts_of(loaded.target.device) | {"number_format": loaded.format}
        run = open_run(make_header("peers", settings, facts), options.out)
        bench = PeersBench(engines, prompts, run, max_tokens=options.max_tokens, repeats=options.repeats)
        log = Path(tempfile.mkdtemp(prefix="outrider-peers-")) / "log.txt"
        exit_code = measure_until_interrupted(lambda tell: bench.measure_all(plans, log, tell), run, screen)
    finally:
        engines.close()
    found = summarize_peers(run)
    for why in bench.left_out:
        screen.note(f"left out: {why}", "yellow")
    formats = {"outrider": loaded.format} | {str(line["kind"]): str(line["format"]) for line in run.of("system")}
    for remark in remarks({plan.kind for plan in plans}, formats):
        screen.note(remark, "yellow")
    if options.json:
        told = {**run.header, "systems": run.of("system"), "rows": [row.as_dict() for row in found]}
        sys.stdout.write(json.dumps(told | {"left_out": bench.left_out}, allow_nan=False) + "\n")
        raise typer.Exit(exit_code)
    screen.out.print(short_table(PEER_COLUMNS, SHOWN, [peer_cells(row) for row in found]))
    ours = sum(row.wins == "wins" and row.system.startswith("outrider") for row in found)
    rest = "; who wins the others is above" if ours < len(bench.items) else ""
    screen.say(f"outrider wins {ours} of {len(bench.items)} kinds of prompts clearly", rest)
    raise typer.Exit(exit_code)


def remarks(tried: Collection[str], formats: Mapping[str, str]) -> list[str]:
    """Warnings on a comparison: engines that were not tried, and number formats that differ. formats: by engine."""
    found: list[str] = []
    missing = [name for name in ("transformers", "vllm", "llama.cpp") if name not in tried]
    if missing:
        told = "--python names a Python that has them; llama.cpp reads .gguf files, see --gguf"
        found.append(f"not compared: {', '.join(missing)}; {told}")
    if len(set(formats.values())) > 1:
        named = ", ".join(f"{name} {form}" for name, form in formats.items())
        found.append(f"the engines compute in different number formats, which have speeds of their own: {named}")
    return found


def peer_plans(options: PeersOptions, loaded: LoadedModel, threads: int | None) -> list[PeerPlan]:
    """The worker processes for each engine that some Python has. ConfigError for a named Python that has none."""
    from outrider.bench.peers import PeerPlan, installed
    from outrider.checkpoints.folder import gguf_of

    reference = gguf_of(loaded.folder)
    gguf = options.gguf or (None if reference is None else Path(reference.file))
    context = min(loaded.target.context, 4096)
    folder, dtype = str(loaded.folder), "bfloat16" if loaded.target.device.type == "cuda" else "float32"
    plans: list[PeerPlan] = []
    for python in (sys.executable, *options.python):
        has = installed(python)
        if python != sys.executable and not any(has.values()):
            raise ConfigError(f"--python {python} has none of transformers, vllm and llama_cpp, or cannot be run")
        known = {plan.kind for plan in plans}
        if has.get("transformers") and "transformers" not in known:
            given: dict[str, Any] = {"folder": folder, "dtype": dtype, "device": str(loaded.target.device)}
            given |= {"threads": threads or 0, "draft": options.draft or ""}
            if reference is not None:
                given |= {"folder": str(Path(reference.file).parent), "gguf": Path(reference.file).name}
            rows = ("generate", "prompt lookup", *(("assisted",) if options.draft else ()))
            plans.append(PeerPlan("transformers", python, given, rows))
        if has.get("llama.cpp") and gguf is not None and "llama.cpp" not in known:
            given = {"gguf": str(gguf), "context": context, "threads": threads or 0}
            plans.append(PeerPlan("llama.cpp", python, given, ("generate", "prompt lookup")))
        if has.get("vllm") and "vllm" not in known:
            given = {"folder": folder, "dtype": dtype, "context": context}
            for lookup, row in ((False, "generate"), (True, "prompt lookup")):
                plans.append(PeerPlan("vllm", python, given | {"lookup": lookup}, (row,)))
    return plans
