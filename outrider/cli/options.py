"""The options that commands share: frozen groups, each a panel of `--help`, flattened for typer."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from outrider.cli.interrupts import ending_at_once
from outrider.cli.usage import did_you_mean
from outrider.core.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from outrider.checkpoints.storage import Progress
    from outrider.core.sampling import SamplingParams
    from outrider.drafters.base import DrafterConfig
    from outrider.llm import LLM


def option(default: Any, says: str, *, metavar: str | None = None) -> Any:
    """A field of a group that is an option of the command line, named after the field."""
    return field(default=default, metadata={"info": _Info(says, metavar)})


def argument(default: Any, says: str, *, metavar: str) -> Any:
    """A field of a group that is given by its place."""
    return field(default=default, metadata={"info": _Info(says, metavar, by_place=True)})


@dataclass(frozen=True, slots=True)
class _Info:
    says: str
    metavar: str | None
    by_place: bool = False

    def annotate(self, f: Field[Any], hint: Any, panel: str) -> Any:
        """The field's type with what typer wants to know of it. The default is told in brackets, to save lines."""
        if self.by_place:
            return Annotated[hint, typer.Argument(help=self.says, metavar=self.metavar, show_default=False)]
        told = isinstance(f.default, str | int | float) and hint is not bool
        says = f"{self.says} ({f.default})" if told else self.says
        # Naming a switch keeps typer from adding a --no- form.
        decl, metavar = f"--{f.name.replace('_', '-')}", "" if hint is bool else self.metavar
        shown = typer.Option(decl, help=says, metavar=metavar, rich_help_panel=panel, show_default=False)
        return Annotated[hint, shown]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters are groups of options, as the flat function that typer reads."""
    groups = {name: hint for name, hint in get_type_hints(command).items() if name != "return"}
    parameters = [parameter for group in groups.values() for parameter in _parameters(group)]

    def flat(**given: Any) -> None:
        with ending_at_once():
            importlib.import_module("torch")  # which every one of these needs
        parts = {name: group(**{f.name: given[f.name] for f in fields(group)}) for name, group in groups.items()}
        command(**parts)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(flat)["__signature__"] = inspect.Signature(parameters)
    return flat


def _parameters(group: Any) -> list[inspect.Parameter]:
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
class Named:
    """Model."""

    model: str = option("demo", "Folder, Hugging Face id or .gguf file")


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Model. How a model is run, whatever it is called."""

    revision: str | None = option(None, "Of a Hugging Face model: branch, tag, commit")
    pinned: bool = option(False, "Bit-identical with and without speculation on CUDA")
    device: str = option("auto", "cpu, cuda, cuda:1")
    dtype: str = option("auto", "float32, bfloat16 or float16")
    quantize: str = option("auto", "int8 or int4 weights on the CPU, or none")
    context: int | None = option(None, "Most tokens of one text (the model's limit)")
    cache_tokens: int | None = option(None, "Tokens the cache holds (by free memory)")


@dataclass(frozen=True, kw_only=True)
class Model(Placed, Named):
    """Model. The fields of the last base come first."""

    max_batch: int = option(8, "Texts at once")


WITH_PREDICTION = "suffix+prediction"  # cheap for every text, and drafts from a `prediction`


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """Drafting."""

    drafter: str | None = option(None, "NAME:KEY=VALUE,... or A+B (suffix)", metavar="SPEC")
    speculative_config: str | None = option(None, "vLLM's, in place of --drafter", metavar="JSON")
    mode: str = option("seeded", "seeded or distribution", metavar="MODE")
    rule: str | None = option(None, "Of distribution: block or token (block)")

    def __post_init__(self) -> None:
        if self.drafter is not None and self.speculative_config is not None:
            raise ConfigError("--drafter and --speculative-config both say how to draft; give one of them")
        _choose("--mode", self.mode, ("seeded", "distribution"))
        if self.rule is not None:
            _choose("--rule", self.rule, ("block", "token"))
            if self.mode != "distribution":
                raise ConfigError(f"--rule {self.rule} belongs to --mode distribution; mode seeded has one rule")

    def else_with(self, drafter: str) -> Drafting:
        """The same, with this drafter where none was asked for."""
        asked = self.drafter is not None or self.speculative_config is not None
        return self if asked else replace(self, drafter=drafter)

    def config(self) -> str | DrafterConfig:
        """What LLM takes as its drafter."""
        if self.speculative_config is None:
            return self.drafter or "suffix"
        from outrider.drafters.speculative_config import from_vllm

        return from_vllm(self.speculative_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling. Named and defaulted as in SamplingParams."""

    max_tokens: int = option(256, "Most new tokens")
    temperature: float = option(0.0, "0 takes the best token")
    top_p: float = option(1.0, "Keep the likeliest up to this")
    top_k: int = option(0, "Keep the k likeliest; 0 keeps all")
    min_p: float = option(0.0, "Keep those this near the best")
    typical_p: float = option(1.0, "Keep the most typical up to this")
    repetition_penalty: float = option(1.0, "Weaken what prompt or text has")
    presence_penalty: float = option(0.0, "Weaken what the text has, once")
    frequency_penalty: float = option(0.0, "The same, for each time")
    logit_bias: str | None = option(None, 'Added to logits, e.g. {"42": -1.5}', metavar="JSON")
    allowed_token_ids: str | None = option(None, "Choose only among these", metavar="ID,...")
    banned_token_ids: str | None = option(None, "Never choose these", metavar="ID,...")
    min_tokens: int = option(0, "No end before so many tokens")
    stop: list[str] = option((), "End before this string; repeatable", metavar="TEXT")  # noqa: RUF009 - a field
    stop_token_ids: str | None = option(None, "End after any of these", metavar="ID,...")
    ignore_eos: bool = option(False, "Go on past the end-of-text token")
    seed: int | None = option(None, "Same seed, same text (a fresh one)")

    def params(self, **more: Any) -> SamplingParams:
        """The same as SamplingParams, with `more` of its fields. ConfigError for a value out of range."""
        from outrider.core.sampling import SamplingParams

        given = {f.name: getattr(self, f.name) for f in fields(self)} | more
        given["logit_bias"] = _bias(self.logit_bias)
        given["stop"] = tuple(self.stop)
        given["allowed_token_ids"] = _ids("--allowed-token-ids", self.allowed_token_ids)
        given["banned_token_ids"] = _ids("--banned-token-ids", self.banned_token_ids) or ()
        given["stop_token_ids"] = _ids("--stop-token-ids", self.stop_token_ids) or ()
        try:
            return SamplingParams(**given)
        except RequestError as error:
            raise ConfigError(str(error)) from error


def build(model: Model, drafting: Drafting, progress: Progress | None = None) -> LLM:
    """Load what the options name."""
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
        revision=model.revision,
        pinned=model.pinned,
    )


def engine_options(drafting: Drafting, model: Model) -> dict[str, Any]:
    """The options of LLM that stay the same when the drafter changes."""
    return {"mode": drafting.mode, "rule": drafting.rule or "block", "max_batch": model.max_batch}


def read_text(option_name: str, file: Path) -> str:
    """A UTF-8 file, less the newline that ends it."""
    try:
        return file.expanduser().read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option_name} {file}: not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise ConfigError(f"{option_name} {file}: {error.strerror or error}") from error


def _choose(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} has no {value!r}; {did_you_mean(value, choices)}choose one of: {', '.join(choices)}")


def _ids(name: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise ConfigError(f"{name} takes token ids with commas between them, such as 1,2,3; got {text!r}") from error


def _bias(text: str | None) -> dict[int, float]:
    if text is None:
        return {}
    try:
        return {int(token): float(bias) for token, bias in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f'--logit-bias takes a JSON object from token id to number, such as {{"42": -1.5}}; got {text!r}'
        ) from error
