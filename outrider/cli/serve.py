"""`outrider serve`: a server with OpenAI's protocol."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import typer

from outrider.cli.options import DraftingOptions, Given, ModelOptions, argument, build_llm, option
from outrider.cli.screen import Screen, progress_bars
from outrider.cli.serve_engine import EngineOptions, refuse_named, say_ready, serve_remote
from outrider.core.errors import ConfigError
from outrider.server.settings import DEADLINE, DRAIN_TIMEOUT, MAX_QUEUE

if TYPE_CHECKING:
    from outrider.engine.client import EngineFacts
    from outrider.server.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Server."""

    name: str | None = argument(None, "Folder, Hugging Face id or .gguf file (demo)", metavar="MODEL")
    host: str = option("127.0.0.1", "Address to listen on")
    port: int = option(8000, "0 takes a free port")
    api_key: list[str] = option((), "API key to accept; repeatable, or OUTRIDER_API_KEY", metavar="KEY")  # noqa: RUF009 - a field
    served_model_name: str | None = option(None, "What clients call the model", metavar="NAME")
    max_queue: int = option(MAX_QUEUE, "Max sequences that wait")
    deadline: float = option(DEADLINE, "Seconds a request may take")
    drain_timeout: float = option(DRAIN_TIMEOUT, "Seconds open requests get after SIGTERM")
    strict: bool = option(False, "Refuse fields that have no effect")
    allow_special_tokens: str = option("prompts", "Where clients may write control tokens: none, prompts or all")
    allow_host: list[str] = option((), "Host header to accept; repeatable", metavar="NAME")  # noqa: RUF009 - a field
    cors_origin: list[str] = option((), "Origin whose pages may call; repeatable", metavar="URL")  # noqa: RUF009 - a field
    log_format: str = option("text", "text or json")
    log_prompts: bool = option(False, "Write prompts into the log")
    otlp_endpoint: str | None = option(None, "OTLP collector to send traces to", metavar="URL")

    def settings(self, model: str) -> Settings:
        from outrider.server.settings import Settings

        keys = tuple(self.api_key) or tuple(filter(None, os.environ.get("OUTRIDER_API_KEY", "").split(",")))
        return Settings(
            served_name=self.served_model_name or model,
            host=self.host,
            port=self.port,
            api_keys=keys,
            allow_hosts=tuple(self.allow_host),
            cors_origins=tuple(self.cors_origin),
            max_queue=self.max_queue,
            deadline=self.deadline,
            drain_timeout=self.drain_timeout,
            strict=self.strict,
            allow_special_tokens=_allowed(self.allow_special_tokens),
            log_format=_log_format(self.log_format),
            log_prompts=self.log_prompts,
            otlp_endpoint=self.otlp_endpoint or "",
        )


def serve(
    served: ServeOptions, drafting: DraftingOptions, model: ModelOptions, engine: EngineOptions, given: Given
) -> None:
    """Serve a model to OpenAI's clients, with a page at /.

    Listens at once; /health says 503 until the model is loaded. Defaults are in brackets.
    """
    _check_installed()
    if served.name is not None:
        if model.model not in ("demo", served.name):
            raise ConfigError(f"MODEL {served.name} and --model {model.model} each name a model; give one of them")
        model = replace(model, model=served.name)
    if engine.is_remote:
        refuse_named(engine, given.names)
        if served.allow_special_tokens != "prompts":
            raise ConfigError("--allow-special-tokens is for this package's engine; the server behind decides")
        unnamed = bool(engine.engine_url) and served.name is None
        return serve_remote(engine, drafting, model, served.settings("" if unnamed else model.model))
    _check_loading(model, drafting)
    settings = served.settings(model.model)

    from outrider.server.app import create_app
    from outrider.server.ops.logs import set_up_logs
    from outrider.server.queue.engine_thread import EngineThread
    from outrider.server.queue.local_engine import LocalEngine
    from outrider.server.run import listen, run_server

    set_up_logs(settings.log_format, with_text=settings.log_prompts)
    screen, listening = Screen(), listen(settings)
    settings = replace(settings, port=listening.getsockname()[1])

    def load() -> LocalEngine:
        with progress_bars(screen.notes) as progress:
            llm = build_llm(model, drafting, progress)
            if importlib.util.find_spec("llguidance"):
                from outrider.grammar import prepare

                progress.start("preparing grammars", None)
                prepare(llm.tokenizer)
                progress.done()
        return LocalEngine(llm)

    engine_thread = EngineThread(load, settings.max_queue, lambda engine: _say_model(screen, engine.facts, settings))
    screen.note(f"listening on {settings.address}, loading {model.model}")
    try:
        run_server(create_app(engine_thread, settings), engine_thread, settings, listening)
    except ConfigError as error:  # from loading, and already in the log
        raise typer.Exit(2) from error
    if not engine_thread.stopped.is_set():  # stopped while loading, which cannot be interrupted
        screen.notes.show_cursor()
        os._exit(0)
    return None


def _check_loading(model: ModelOptions, drafting: DraftingOptions) -> None:
    """ConfigError for options out of range, an unknown drafter, or names that cannot be models: all that can be checked
    before the server listens."""
    from outrider.checkpoints.resolve import check_name
    from outrider.drafters.registry import parse_drafter
    from outrider.loading.load import LoadOptions, choose_device, choose_dtype

    LoadOptions(
        max_batch=model.max_batch, context=model.context, cache_tokens=model.cache_tokens, threads=model.threads
    )
    choose_device(model.device)
    choose_dtype(model.dtype)
    config = drafting.config()
    config = parse_drafter(config) if isinstance(config, str) else config
    check_name(model.model)
    for each in config.traits.loads:
        try:
            check_name(each.model or model.model)
        except ConfigError as error:
            raise ConfigError(f"draft model: {error}") from error


def _allowed(where: str) -> Literal["none", "prompts", "all"]:
    if where not in ("none", "prompts", "all"):
        raise ConfigError(f"--allow-special-tokens has no {where!r}; choose none, prompts or all")
    return where


def _log_format(name: str) -> Literal["text", "json"]:
    if name not in ("text", "json"):
        raise ConfigError(f"--log-format has no {name!r}; choose text or json")
    return name


def _check_installed() -> None:
    needed = ("fastapi", "uvicorn", "httptools", "prometheus_client")
    missing = [name for name in needed if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigError(f"serving needs {', '.join(missing)}; install them with: pip install 'outrider[serve]'")


def _say_model(screen: Screen, facts: EngineFacts, settings: Settings) -> None:
    """Print the model, drafter, device, memory and limits of the server, and its address."""
    tokens = facts.page_count * facts.page_size
    stored = f" (stored as {facts.stored_format})" if facts.stored_format not in ("", facts.number_format) else ""
    lines = {
        "model": f"{facts.model} as {settings.served_name}, {facts.number_format}{stored} on {facts.device}",
        "drafter": f"{facts.drafter}, up to {facts.max_draft_tokens} tokens a round, mode {facts.mode}",
        "weights": f"{facts.weight_bytes / 1e6:.0f} MB on disk",
        **({"memory": facts.memory} if facts.memory else {}),
        **({"threads": facts.threads} if facts.threads else {}),
        "cache": f"{tokens} tokens in {facts.page_count} pages, context {facts.context}",
        "batch": f"{facts.max_batch} texts at once, {settings.max_queue} may wait",
    }
    say_ready(screen, lines, settings)
