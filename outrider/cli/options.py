"""The options that commands share: dataclasses, each a panel of `--help`, flattened for typer."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outrider.cli.interrupts import default_sigint
from outrider.cli.usage import did_you_mean
from outrider.core.collector import collector_paused
from outrider.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.checkpoints.storage import Progress
    from outrider.core.sampling import SamplingParams
    from outrider.drafters.base import DrafterConfig
    from outrider.llm import LLM


def option(default: Any, text: str, *, metavar: str | None = None) -> Any:
    """A field that is a command line option of the same name."""
    return field(default=default, metadata={"info": _OptionInfo(text, metavar)})


def argument(default: Any, text: str, *, metavar: str) -> Any:
    """A field that is a positional argument."""
    return field(default=default, metadata={"info": _OptionInfo(text, metavar, positional=True)})


def check_ranges(options: Any, **bounds: tuple[int, int]) -> None:
    """Raise ConfigError where one of the named fields is outside its (lowest, highest) value; None is allowed."""
    for name, (low, high) in bounds.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')} must be {low} to {high}, got {value}")


@dataclass(frozen=True, slots=True)
class _OptionInfo:
    text: str
    metavar: str | None
    positional: bool = False

    def annotate(self, f: Field[Any], hint: Any, panel: str) -> Any:
        """The field's type annotated for typer. The default is shown in brackets, to save lines."""
        if self.positional:
            return Annotated[hint, typer.Argument(help=self.text, metavar=self.metavar, show_default=False)]
        has_default = isinstance(f.default, str | int | float) and hint is not bool
        text = f"{self.text} ({f.default})" if has_default else self.text
        # The explicit name of a switch keeps typer from adding a --no- form.
        name = f.name.rstrip("_").replace("_", "-")  # rstrip: `from_` cannot be `from`, a keyword of Python
        decl, metavar = f"--{name}", "" if hint is bool else self.metavar
        shown = typer.Option(decl, help=text, metavar=metavar, rich_help_panel=panel, show_default=False)
        return Annotated[hint, shown]


@dataclass(frozen=True, slots=True)
class Given:
    """A parameter of a command: the options that the command line names, whatever their values."""

    command_line: typer.Context

    @property
    def names(self) -> set[str]:
        sources = ((name, self.command_line.get_parameter_source(name)) for name in self.command_line.params)
        return {name for name, source in sources if source is not None and source.name == "COMMANDLINE"}


def flatten_options(command: Callable[..., None]) -> Callable[..., None]:
    """The flat function for typer of a command whose parameters are option dataclasses."""
    groups = {name: hint for name, hint in get_type_hints(command).items() if name != "return"}
    parameters = [parameter for group in groups.values() for parameter in _parameters(group)]

    def flat(**given: Any) -> None:
        with default_sigint():
            importlib.import_module("torch")  # every such command needs it
        parts = {name: group(**{f.name: given[f.name] for f in fields(group)}) for name, group in groups.items()}
        command(**parts)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(flat)["__signature__"] = inspect.Signature(parameters)
    return flat


def _parameters(group: Any) -> list[inspect.Parameter]:
    if group is Given:  # typer passes its own context for this type
        return [inspect.Parameter("command_line", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    hints, panel = get_type_hints(group), (inspect.getdoc(group) or "").split(".")[0]
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=f.metadata["info"].annotate(f, hints[f.name], panel),
        )
        for f in fields(group)
    ]


@dataclass(frozen=True, kw_only=True)
class ModelName:
    """Model."""

    model: str = option("demo", "Folder, Hugging Face id or .gguf file")


@dataclass(frozen=True, kw_only=True)
class RuntimeOptions:
    """Model. How it runs."""

    revision: str | None = option(None, "Of a Hugging Face model: branch, tag, commit")
    pinned: bool = option(False, "Bit-identical with and without speculation on CUDA")
    device: str = option("auto", "cpu, cuda, cuda:1")
    dtype: str = option("auto", "float32, bfloat16 or float16")
    quantize: str = option("auto", "int8 or int4 weights on the CPU, or none")
    context: int | None = option(None, "Max tokens of one sequence (the model's limit)")
    cache_tokens: int | None = option(None, "Tokens the cache holds (by free memory)")
    threads: int | None = option(None, "CPU threads of a pass (measured)")


@dataclass(frozen=True, kw_only=True)
class ModelOptions(RuntimeOptions, ModelName):
    """Model. The fields of the last base come first."""

    max_batch: int = option(8, "Max sequences at once")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOptions:
    """Drafting."""

    drafter: str | None = option(None, "NAME:KEY=VALUE,..., A+B or MODULE:CLASS (auto)", metavar="SPEC")
    speculative_config: str | None = option(None, "vLLM's, in place of --drafter", metavar="JSON")
    fixed: bool = option(False, "Draft always, not only where it is measured to gain")
    mode: str = option("seeded", "seeded or distribution", metavar="MODE")
    rule: str | None = option(None, "Of distribution: block or token (block)")

    def __post_init__(self) -> None:
        if self.drafter is not None and self.speculative_config is not None:
            raise ConfigError("--drafter and --speculative-config both choose a drafter; give one of them")
        _check_choice("--mode", self.mode, ("seeded", "distribution"))
        if self.rule is not None:
            _check_choice("--rule", self.rule, ("block", "token"))
            if self.mode != "distribution":
                raise ConfigError(f"--rule {self.rule} belongs to --mode distribution; mode seeded has one rule")

    def config(self) -> str | DrafterConfig:
        """The `drafter` argument of LLM."""
        if self.speculative_config is None:
            return self.drafter or "auto"
        from outrider.drafters.speculative_config import from_vllm

        return from_vllm(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Sampling. Named and defaulted as in SamplingParams."""

    max_tokens: int = option(256, "Max new tokens")
    temperature: float = option(0.0, "0 takes the best token")
    top_p: float = option(1.0, "Keep the most likely up to this mass")
    top_k: int = option(0, "Keep the k most likely; 0 keeps all")
    min_p: float = option(0.0, "Keep those this likely, times the best")
    typical_p: float = option(1.0, "Keep the most typical up to this")
    repetition_penalty: float = option(1.0, "For tokens in prompt or text")
    presence_penalty: float = option(0.0, "For tokens in the text")
    frequency_penalty: float = option(0.0, "The same, per occurrence")
    logit_bias: str | None = option(None, 'Added to logits, e.g. {"42": -1.5}', metavar="JSON")
    allowed_token_ids: str | None = option(None, "Only these may be chosen", metavar="ID,...")
    banned_token_ids: str | None = option(None, "Never choose these", metavar="ID,...")
    min_tokens: int = option(0, "Min new tokens")
    stop: list[str] = option((), "End before this string; repeatable", metavar="TEXT")  # noqa: RUF009 - a field
    stop_token_ids: str | None = option(None, "End after any of these", metavar="ID,...")
    ignore_eos: bool = option(False, "Continue past the end-of-text token")
    seed: int | None = option(None, "Same seed, same text (random)")

    def params(self, **more: Any) -> SamplingParams:
        """The SamplingParams, with `more` of its fields. Raises ConfigError for a value out of range."""
        from outrider.core.sampling import SamplingParams

        given = {f.name: getattr(self, f.name) for f in fields(self)} | more
        given["logit_bias"] = _parse_bias(self.logit_bias)
        given["stop"] = tuple(self.stop)
        given["allowed_token_ids"] = _parse_ids("--allowed-token-ids", self.allowed_token_ids)
        given["banned_token_ids"] = _parse_ids("--banned-token-ids", self.banned_token_ids) or ()
        given["stop_token_ids"] = _parse_ids("--stop-token-ids", self.stop_token_ids) or ()
        try:
            return SamplingParams(**given)
        except RequestError as error:
            raise ConfigError(str(error)) from error


def build_llm(model: ModelOptions, drafting: DraftingOptions, progress: Progress | None = None) -> LLM:
    """Load the model and drafter of the options."""
    with collector_paused():
        from outrider.llm import LLM

    return LLM(
        model.model,
        drafter=drafting.config(),
        **engine_options(drafting, model),
        progress=progress,
        device=model.device,
        dtype=model.dtype,
        quantize=model.quantize,
        context=model.context,
        cache_tokens=model.cache_tokens,
        threads=model.threads,
        revision=model.revision,
        pinned=model.pinned,
    )


def engine_options(drafting: DraftingOptions, model: ModelOptions) -> dict[str, Any]:
    """The options of LLM that do not depend on the drafter."""
    return {
        "mode": drafting.mode,
        "rule": drafting.rule or "block",
        "max_batch": model.max_batch,
        "adaptive": not drafting.fixed,
    }


def read_text(option_name: str, file: Path) -> str:
    """The text of a UTF-8 file, without its last newline."""
    try:
        return file.expanduser().read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option_name} {file}: not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise ConfigError(f"{option_name} {file}: {error.strerror or error}") from error


def read_stdin() -> Iterator[str]:
    """The lines piped into stdin; none where it is a terminal. Raises ConfigError where they are not UTF-8."""
    if sys.stdin is None or sys.stdin.isatty():
        return
    if isinstance(sys.stdin, io.TextIOWrapper):  # the locale's settings would let bytes pass that are not UTF-8
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        yield from sys.stdin
    except UnicodeDecodeError as error:
        raise ConfigError("the text piped in is not UTF-8; convert it first, as with iconv") from error


def check_utf8(what: str, text: str) -> str:
    """The text. Raises ConfigError where the command line held bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{what} is not UTF-8 text (character {error.start}); convert it first") from error
    return text


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} has no {value!r}; {did_you_mean(value, choices)}choose one of: {', '.join(choices)}")


def _parse_ids(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name} takes token ids with commas between them, such as 1,2,3; got {text!r}") from error


def _parse_bias(text: str | None) -> dict[int, float]:
    if text is None:
        return {}
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'--logit-bias takes a JSON object from token id to number, such as {{"42": -1.5}}; got {text!r}'
        ) from error
