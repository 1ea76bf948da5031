"""`outrider serve` with other engines behind it: vLLM started as a child, or servers that run already."""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.options import DraftingOptions, ModelOptions, option
from outrider.cli.screen import Screen, progress_bars
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.remote.front import Front
    from outrider.server.settings import Settings

ENGINES = ("outrider", "vllm")
VLLM_OPTIONS = ("model", "revision", "dtype", "context", "drafter", "speculative_config")
"""Options of the model and its drafter that are translated for vLLM; any other is refused where it is given."""
INSTEAD = {
    "max_batch": "use --max-running",
    "cache_tokens": "vLLM plans its cache by --engine-arg=--gpu-memory-utilization=0.9",
    "quantize": "vLLM reads quantized checkpoints, or --engine-arg=--quantization=fp8",
    "device": "choose devices with CUDA_VISIBLE_DEVICES",
    "threads": "set VLLM_CPU_OMP_THREADS_BIND",
    "pinned": "set VLLM_BATCH_INVARIANT=1 where vLLM has it for your device",
    "fixed": "vLLM drafts always",
    "mode": "vLLM samples by its own rejection rule; leave it out",
    "rule": "--speculative-config has rejection_sample_method",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Other engines."""

    engine: str = option("outrider", "outrider, or vllm: start vLLM and serve it")
    engine_url: list[str] = option((), "A vLLM or Outrider that runs already; several are replicas", metavar="URL")  # noqa: RUF009 - a field
    engine_api_key: str | None = option(None, "Its key; or OUTRIDER_ENGINE_API_KEY", metavar="KEY")
    engine_command: str = option("vllm", "What starts vLLM", metavar="COMMAND")
    engine_arg: list[str] = option((), "Passed to vLLM as it is; repeatable", metavar="ARG")  # noqa: RUF009 - a field
    tensor_parallel_size: int | None = option(None, "GPUs that share each layer, in vLLM")
    pipeline_parallel_size: int | None = option(None, "Groups of GPUs that share the layers, in vLLM")
    nodes: int | None = option(None, "Machines that vLLM runs on, this one first")
    max_running: int | None = option(None, "Max sequences at once of each replica (256)")

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine has no {self.engine!r}; choose one of: {', '.join(ENGINES)}")
        counts = ("tensor_parallel_size", "pipeline_parallel_size", "nodes", "max_running")
        for name in counts:
            value = getattr(self, name)
            if value is not None and not 1 <= value <= 1 << 16:
                raise ConfigError(f"{_flag(name)} must be 1 to {1 << 16}, got {value}")
        if self.engine_api_key and not self.engine_url:
            raise ConfigError("--engine-api-key is for --engine-url; a vLLM that is started gets a key of its own")
        starting = ("engine_command", "engine_arg", "tensor_parallel_size", "pipeline_parallel_size", "nodes")
        given = [name for name in (*starting, "max_running") if name in _changed(self)]
        if not self.is_remote and given:
            raise ConfigError(f"{_flag(given[0])} belongs to --engine vllm or --engine-url; add one of them")
        if self.engine_url and (given := [name for name in starting if name in _changed(self)]):
            raise ConfigError(f"{_flag(given[0])} is for a vLLM that is started; with --engine-url it runs already")

    @property
    def is_remote(self) -> bool:
        return self.engine != "outrider" or bool(self.engine_url)

    @property
    def key(self) -> str:
        return self.engine_api_key or os.environ.get("OUTRIDER_ENGINE_API_KEY", "")


@dataclass(frozen=True, slots=True)
class VllmStart:
    """How to start vLLM."""

    command: tuple[str, ...]
    speculative_config: dict[str, Any]
    """vLLM's speculative_config; {}: it drafts nothing."""

    @property
    def drafting(self) -> dict[str, Any]:
        """What /v1/models reports about drafting."""
        config = self.speculative_config
        if not config:
            return {"drafter": "none", "max_draft_tokens": 0}
        told: dict[str, Any] = {"drafter": str(config.get("method", "draft_model"))}
        length = config.get("num_speculative_tokens")
        return told | ({"max_draft_tokens": length} if isinstance(length, int) else {})


def serve_remote(engine: EngineOptions, drafting: DraftingOptions, model: ModelOptions, settings: Settings) -> None:
    """Serve the texts of other engines until stopped. settings: without a served name, the first replica's is used."""
    from outrider.remote.app import create_remote_app
    from outrider.remote.child import EngineChild
    from outrider.remote.front import MAX_RUNNING, Front, FrontOptions
    from outrider.remote.replica import Replica, check_url
    from outrider.server.ops.logs import set_up_logs
    from outrider.server.run import listen, run_server

    screen, start, child, key = Screen(), None, None, engine.key
    set_up_logs(settings.log_format, with_text=settings.log_prompts)
    if engine.engine_url:
        urls = [check_url(url) for url in engine.engine_url]
        if len(set(urls)) < len(urls):
            raise ConfigError("--engine-url names one server more than once")
        refuse_named(engine, [*_changed(drafting), *_changed(model)])
        replicas = [Replica(url) for url in urls]
        settings = settings if settings.served_name else replace(settings, served_name=_name_of(urls, engine.key))
    else:
        start = vllm_start(engine, drafting, model, settings.served_name, screen)
        replicas = [Replica("http://127.0.0.1")]
        key = secrets.token_hex(16)  # so that nobody on this machine can ask vLLM directly
        child = EngineChild(start.command, replicas[0], {"VLLM_API_KEY": key})
    listening = listen(settings)
    settings = replace(settings, port=listening.getsockname()[1])
    options = FrontOptions(max_queue=settings.max_queue, max_running=engine.max_running or MAX_RUNNING, key=key)
    drafts = start is not None and bool(start.speculative_config)
    front = Front(replicas, options, child, lambda front: _say_engines(screen, front, settings, drafts=drafts))
    screen.note(f"listening on {settings.address}, waiting for {' '.join(engine.engine_url) or 'vLLM'}")
    try:
        run_server(create_remote_app(front, settings, start.drafting if start else None), front, settings, listening)
    except ConfigError as error:
        screen.note(str(error), "red")
        raise typer.Exit(2) from error


def refuse_named(engine: EngineOptions, names: Collection[str]) -> None:
    """ConfigError for a named option that has no effect with other engines, even where its value is the default."""
    where, taken = ("--engine-url", ("model",)) if engine.engine_url else ("--engine vllm", VLLM_OPTIONS)
    instead = dict.fromkeys(INSTEAD, "the server there decides") if engine.engine_url else INSTEAD
    for name in (f.name for group in (DraftingOptions, ModelOptions) for f in fields(group)):
        if name in names and name not in taken:
            raise ConfigError(f"{_flag(name)} has no effect with {where}: {instead.get(name, 'leave it out')}")


def vllm_start(
    engine: EngineOptions, drafting: DraftingOptions, model: ModelOptions, name: str, screen: Screen
) -> VllmStart:
    """Fetch and check the model and the drafter. Returns the command that starts vLLM with them."""
    from outrider.checkpoints.resolve import resolve

    refuse_named(engine, [*_changed(drafting), *_changed(model)])
    with progress_bars(screen.notes) as progress:
        target = str(resolve(model.model, revision=model.revision, progress=progress))
    config = speculative_config(drafting, target)
    _tell_plan(screen, target, config, model.dtype)
    words = [*shlex.split(engine.engine_command), "serve", target, "--served-model-name", name]
    words += ["--dtype", model.dtype] if model.dtype != "auto" else []
    words += ["--max-model-len", str(model.context)] if model.context else []
    words += ["--max-num-seqs", str(engine.max_running)] if engine.max_running else []
    for option_name, flag in (("tensor_parallel_size", ""), ("pipeline_parallel_size", ""), ("nodes", "--nnodes")):
        value = getattr(engine, option_name)
        words += [flag or _flag(option_name), str(value)] if value else []
    words += ["--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    if config:
        words += ["--speculative-config", json.dumps(config), "--per-request-spec-decode-metrics", "summary"]
    words += engine.engine_arg
    if engine.nodes and engine.nodes > 1:
        other = shlex.join([*words, "--headless", "--node-rank", "1", "--master-addr"])
        screen.note(f"on node 1 (and so on): {other} THIS_MACHINE")
    return VllmStart(tuple(words), config)


def speculative_config(drafting: DraftingOptions, target: str) -> dict[str, Any]:
    """vLLM's configuration for the drafter of the options; {} for none. ConfigError where vLLM has no such method."""
    if drafting.speculative_config is not None:
        try:
            config = json.loads(drafting.speculative_config)
        except ValueError as error:
            raise ConfigError(f"--speculative-config is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError("--speculative-config must be a JSON object")
        return config
    if drafting.drafter is None:
        return {}
    from outrider.advise.export import Choice, export_to, with_vllm_head
    from outrider.drafters.registry import parse_drafter
    from outrider.drafters.shipped import shipped_for

    if drafting.drafter.partition(":")[0] == "auto":
        raise ConfigError(
            "--drafter auto chooses in every round, which vLLM cannot; `outrider advise` says which to name"
        )
    length = parse_drafter(drafting.drafter).traits.max_tokens
    shipped = shipped_for(Path(target))
    choice = Choice(target, drafting.drafter, length, shipped=str(shipped.folder) if shipped else "")
    return export_to("vllm", with_vllm_head(choice)).arguments


def _tell_plan(screen: Screen, target: str, config: dict[str, Any], dtype: str) -> None:
    """Print the model's memory and what `outrider check` finds about its draft. ConfigError where that is refused."""
    from outrider.plan.forecast import PlanOptions, make_forecast
    from outrider.report.numbers import memory

    for each in make_forecast(target, "none", PlanOptions(dtype=dtype, quantize="none")).models:
        cache = memory(1024 * each.per_token)
        screen.note(f"plan     {each.role}: {memory(each.weights)} of weights, {cache} for 1024 tokens of cache")
    draft = config.get("model")
    if isinstance(draft, str) and draft:
        from outrider.check.doctor import check_pair
        from outrider.check.smoke import RunOptions

        report = check_pair(target, draft, RunOptions(), smoke=False)
        for finding in report.findings:
            if finding.level not in ("ok", "note"):
                screen.note(f"check    {finding.level}: {finding.what} {finding.fix}".rstrip())
        if report.has("refuse"):
            raise ConfigError(f"{draft} cannot draft for {target}; `outrider check` says more")


def _changed(options: Any) -> list[str]:
    """The names of the fields that differ from their defaults."""
    return [
        f.name for f in fields(options) if f.default is not MISSING and _differs(getattr(options, f.name), f.default)
    ]


def _differs(value: Any, default: Any) -> bool:
    return list(value) != list(default) if isinstance(default, tuple) else value != default


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _name_of(urls: Seq[str], key: str) -> str:
    """The model's name at the first server that answers. ConfigError where none does."""
    from urllib.error import URLError
    from urllib.request import Request, urlopen

    for url in urls:
        request = Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})  # noqa: S310 - checked
        try:
            with urlopen(request, timeout=5) as response:  # noqa: S310 - http or https, as check_url says
                return str(json.load(response)["data"][0]["id"])
        except (URLError, OSError, ValueError, KeyError, IndexError, TypeError):
            continue
    raise ConfigError(
        f"no server answers /v1/models at {', '.join(urls)}; start one, give its key with --engine-api-key, "
        "or say what it serves with --served-model-name"
    )


def _say_engines(screen: Screen, front: Front, settings: Settings, *, drafts: bool) -> None:
    from outrider.remote.capabilities import lacks

    pool = front.pool
    missing = lacks(pool.kind, drafts=drafts)["missing"]
    engines = ", ".join(sorted({f"{card.kind} {card.version}".strip() for card in pool.cards}))
    lines = {
        "model": settings.served_name,
        "engine": f"{engines}, {len(pool.replicas)} {'replica' if len(pool.replicas) == 1 else 'replicas'}",
        **({"missing": ", ".join(missing)} if missing else {}),
        "batch": f"{front.options.max_running} texts at once of each replica, {settings.max_queue} may wait",
    }
    say_ready(screen, lines, settings)


def say_ready(screen: Screen, lines: dict[str, str], settings: Settings) -> None:
    """Print the given lines, each with its name in front, and the server's address."""
    keys = f"{len(settings.api_keys)} API keys" if settings.api_keys else "no API key"
    for name, text in {**lines, "address": f"{settings.address}/v1, page at /, {keys}"}.items():
        screen.note(f"{name:<8} {text}", "default")
    screen.note("ready", "green")
