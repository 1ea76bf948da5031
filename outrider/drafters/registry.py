"""From a name to a drafter's configuration: the only place that knows them all."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from importlib import import_module
from itertools import pairwise
from textwrap import dedent
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterConfig

_MODULES = {
    "none": "none:NoDraftConfig",
    "prompt-lookup": "prompt_lookup:PromptLookupConfig",
    "suffix": "suffix:SuffixConfig",
    "prediction": "prediction:PredictionConfig",
    "grammar": "grammar:GrammarConfig",
    "draft-model": "draft_model:DraftModelConfig",
    "mix": "mix:MixConfig",
}
_ALIASES = {"ngram": "prompt-lookup", "off": "none"}
_AUTO = "auto"
"""How None is written."""
_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class _Drafters(Mapping[str, type[DrafterConfig]]):
    """Name -> configuration class. A drafter's file is imported when its name is first looked up."""

    def __getitem__(self, name: str) -> type[DrafterConfig]:
        module, _, attribute = _MODULES[name].partition(":")
        return getattr(import_module(f"outrider.drafters.{module}"), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


DRAFTERS: Mapping[str, type[DrafterConfig]] = _Drafters()


class OptionInfo(NamedTuple):
    """One option of a drafter, as shown by `outrider drafters`."""

    name: str
    default: Any
    """`auto` for None, as it would be written."""
    doc: str


class DrafterInfo(NamedTuple):
    """A drafter, as shown by `outrider drafters`."""

    name: str
    summary: str
    options: tuple[OptionInfo, ...]


def parse_drafter(spec: str) -> DrafterConfig:
    """Read `name`, `name:key=value,...`, or several joined by `+` for a mix of them.

    For example `suffix`, `prompt-lookup:k=12,min_match=2`, `suffix+draft-model:model=NAME`.
    `mix` is its default members, `mix:of=a+b` those named. A value holds no `,` and no `+`.
    """
    one = "+" not in spec or _canonical(spec.partition(":")[0]) == "mix"
    return _parse_one(spec) if one else _mix_of(spec.split("+"))


def describe_drafters() -> list[DrafterInfo]:
    """Every drafter with its first line of documentation and its options, in the registry's order."""
    described: list[DrafterInfo] = []
    for name, config in DRAFTERS.items():
        docs = _field_docs(config)
        options = tuple(OptionInfo(f.name, _default(f), docs.get(f.name, "")) for f in _options(config).values())
        described.append(DrafterInfo(name, (config.__doc__ or "").partition("\n")[0], options))
    return described


def _canonical(name: str) -> str:
    name = name.strip().lower().replace("_", "-")
    return _ALIASES.get(name, name)


def _parse_mix(rest: str) -> DrafterConfig:
    key, equals, members = rest.partition("=")
    if key.strip() != "of":
        raise ConfigError(f"mix has no option {key.strip()!r}; it has: of, for example mix:of=suffix+prediction")
    if not equals or not members.strip():
        raise ConfigError("mix: of names no drafter; for example mix:of=suffix+prediction")
    return _mix_of(members.split("+"))


def _mix_of(specs: list[str]) -> DrafterConfig:
    """A mix of these; the members of a mix among them are taken in."""
    from outrider.drafters.mix import MixConfig

    members: list[DrafterConfig] = []
    for spec in specs:
        config = _parse_one(spec)
        members += config.of if isinstance(config, MixConfig) else (config,)
    return MixConfig(of=tuple(members))


def _parse_one(spec: str) -> DrafterConfig:
    written, _, rest = spec.partition(":")
    name = _canonical(written)
    if name not in DRAFTERS:
        raise ConfigError(
            f"no drafter called {written.strip()!r}{_choices(name, [*DRAFTERS, *_ALIASES], list(DRAFTERS))}"
        )
    if name == "mix" and rest.strip():
        return _parse_mix(rest)
    config = DRAFTERS[name]
    known, hints = _options(config), get_type_hints(config)
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        written, equals, value = item.partition("=")
        key = written.strip().replace("-", "_")
        if key not in known:
            raise ConfigError(f"{name} has no option {written.strip()!r}{_choices(key, list(known), list(known))}")
        if not equals:
            raise ConfigError(f"{name}: {key} has no value; write {key}={_default(known[key])}")
        if key in values:
            raise ConfigError(f"{name}: {key} is given twice")
        values[key] = _read_value(f"{name}: {key}", hints[key], value.strip())
    return config(**values)


def _choices(name: str, close_to: list[str], choices: list[str]) -> str:
    """The end of an error message: the likeliest name, and all of them."""
    close = get_close_matches(name, close_to, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} choose one of: {', '.join(choices)}" if choices else "; it has no options"


def _read_value(where: str, hint: Any, text: str) -> Any:
    """The text as the field's type; `auto` is None where that is one of its types."""
    kinds = get_args(hint) or (hint,)
    if NoneType in kinds and text.lower() == _AUTO:
        return None
    kind = kinds[0]
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ConfigError(f"{where} must be true or false, got {text!r}")
        return _BOOLS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{where} must be a {'whole ' if kind is int else ''}number, got {text!r}") from None
    return text


def _options(config: Any) -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(config)}


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return _AUTO if option.default is None else option.default


def _field_docs(config: type) -> dict[str, str]:
    """The string below each field in the class's source; the interpreter itself does not keep them."""
    try:
        body = ast.parse(dedent(inspect.getsource(config))).body[0]
    except (OSError, SyntaxError):
        return {}  # installed without sources
    docs: dict[str, str] = {}
    statements = body.body if isinstance(body, ast.ClassDef) else []
    for field, below in pairwise(statements):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(ast.literal_eval(below.value))
    return docs
