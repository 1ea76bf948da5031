"""From a name to a drafter's configuration: those of this package, of installed packages, and any importable class."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from itertools import pairwise
from textwrap import dedent
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterConfig

_MODULES = {
    "none": "none:NoDraftConfig",
    "prompt-lookup": "prompt_lookup:PromptLookupConfig",
    "suffix": "suffix:SuffixConfig",
    "prediction": "prediction:PredictionConfig",
    "grammar": "grammar:GrammarConfig",
    "draft-model": "draft_model:DraftModelConfig",
    "cross-model": "cross_model:CrossModelConfig",
    "layer-skip": "layer_skip:LayerSkipConfig",
    "eagle": "eagle:EagleConfig",
    "mtp": "mtp:MtpConfig",
    "block": "block:BlockConfig",
    "medusa": "medusa:MedusaConfig",
    "mix": "mix:MixConfig",
    "auto": "auto:AutoConfig",
}
_ALIASES = {"ngram": "prompt-lookup", "off": "none"}
ENTRY_POINT_GROUP = "outrider.drafters"
"""Where an installed package registers its drafters: name = "module:Config"."""
_AUTO = "auto"
"""How None is written in a spec."""
_REQUIRED = "VALUE"
"""Shown as the default of an option that has none."""
_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


class _Drafters(Mapping[str, type[DrafterConfig]]):
    """Name -> configuration class, of this package. A drafter's file is imported when its name is first looked up."""

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
    """`auto` for None, as it would be written; `VALUE` where the option must be given."""
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
    A name is one of `DRAFTERS`, one that an installed package registers, or `module:Class` of an
    importable configuration class. The last imports code: a spec never comes from a request.
    """
    one = "+" not in spec or _canonical(spec.partition(":")[0]) == "mix"
    return _parse_one(spec) if one else _mix_of(spec.split("+"))


def describe_drafters() -> list[DrafterInfo]:
    """Every drafter with its first line of documentation and its options: this package's, then the installed ones.

    One that cannot be used is listed with the reason.
    """
    described = [_describe(name, config) for name, config in DRAFTERS.items()]
    for name in sorted(_entry_points()):
        try:
            described.append(_describe(name, _load_entry_point(name)))
        except ConfigError as error:
            described.append(DrafterInfo(name, f"Cannot be used: {error}.", ()))
    return described


def _describe(name: str, config: type[DrafterConfig]) -> DrafterInfo:
    docs = _field_docs(config)
    options = tuple(OptionInfo(f.name, _default(f), docs.get(f.name, "")) for f in _options(config).values())
    return DrafterInfo(name, (config.__doc__ or "").partition("\n")[0], options)


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
    """A mix of these drafters; a mix among them is replaced by its members."""
    from outrider.drafters.mix import MixConfig

    members: list[DrafterConfig] = []
    for spec in specs:
        config = _parse_one(spec)
        members += config.of if isinstance(config, MixConfig) else (config,)
    return MixConfig(of=tuple(members))


def _parse_one(spec: str) -> DrafterConfig:
    written, _, rest = spec.partition(":")
    name = _canonical(written)
    if name == "mix" and rest.strip():
        return _parse_mix(rest)
    if name in DRAFTERS:
        config = DRAFTERS[name]
    elif name in _entry_points():
        config = _load_entry_point(name)
    else:
        module, (attribute, _, rest) = written.strip(), rest.partition(":")
        name = f"{module}:{attribute.strip()}"
        if not all(part.isidentifier() for part in (*module.split("."), attribute.strip())):
            names = [*DRAFTERS, *_entry_points()]
            choices = _choices(_canonical(written), [*names, *_ALIASES], names)
            raise ConfigError(f"no drafter called {module!r}{choices}; or one of your own as MODULE:CLASS")
        config = _import_config(name)
    values = _read_options(name, config, rest)
    try:
        return config(**values)
    except (TypeError, ValueError) as error:  # of a class that is not this package's
        raise ConfigError(f"{name}: {error}") from error


def _read_options(name: str, config: type[DrafterConfig], text: str) -> dict[str, Any]:
    """The values of `key=value,...`, each of its field's type."""
    known = _options(config)
    try:
        hints = get_type_hints(config)
    except NameError as error:
        raise ConfigError(f"{name}: the types of its options cannot be read: {error}") from error
    values: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        written, equals, value = item.partition("=")
        key = written.strip().replace("-", "_")
        if key not in known:
            raise ConfigError(f"{name} has no option {written.strip()!r}{_choices(key, list(known), list(known))}")
        if not equals:
            raise ConfigError(f"{name}: {key} has no value; write {key}={_default(known[key])}")
        if key in values:
            raise ConfigError(f"{name}: {key} is given twice")
        values[key] = _read_value(f"{name}: {key}", hints[key], value.strip())
    for key, option in known.items():
        if key not in values and option.default is option.default_factory is MISSING:
            raise ConfigError(f"{name} needs {key}; write {name}:{key}={_REQUIRED}")
    return values


def _entry_points() -> dict[str, list[EntryPoint]]:
    """Name -> the drafters that installed packages register by it. Names of this package are not among them."""
    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        name = _canonical(point.name)
        if name not in DRAFTERS:
            found.setdefault(name, []).append(point)
    return found


def _load_entry_point(name: str) -> type[DrafterConfig]:
    values = sorted({point.value for point in _entry_points()[name]})
    if len(values) > 1:
        raise ConfigError(f"{name}: several packages register it; write one of {', '.join(values)} in its place")
    return _import_config(values[0])


def _import_config(path: str) -> type[DrafterConfig]:
    """The configuration class at `module:Class`; a ConfigError says what is wrong with it."""
    module, _, attribute = path.partition(":")
    try:
        config: type[DrafterConfig] | None = getattr(import_module(module), attribute, None)
    except Exception as error:  # whatever its code raises
        if not isinstance(error, ModuleNotFoundError) or not f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(f"{path}: importing {module} failed: {type(error).__name__}: {error}") from error
        close = get_close_matches(_canonical(module), DRAFTERS, n=1)
        hint = f"; did you mean the drafter {close[0]!r}?" if close else ""
        raise ConfigError(
            f"{path}: no module called {error.name!r}; install it, or put its folder on PYTHONPATH{hint}"
        ) from None
    if config is None:
        raise ConfigError(f"{path}: module {module} has no {attribute!r}")
    if not (inspect.isclass(config) and is_dataclass(config)):
        raise ConfigError(f"{path} is no dataclass; a drafter is given by its configuration class")
    missing = [name for name in ("traits", "build") if not hasattr(config, name) and name not in _options(config)]
    if missing:
        raise ConfigError(f"{path} has no {' and no '.join(missing)}; a configuration has `traits` and `build`")
    return config


def _choices(name: str, close_to: list[str], choices: list[str]) -> str:
    """The end of an error message: the likeliest name, and all of them."""
    close = get_close_matches(name, close_to, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    return f"{hint} choose one of: {', '.join(choices)}" if choices else "; it has no options"


def _read_value(where: str, hint: Any, text: str) -> Any:
    """The text as the field's type; `auto` is None where that is one of its types."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if NoneType in kinds and text.lower() == _AUTO:
        return None
    kind = next(each for each in kinds if each is not NoneType)
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ConfigError(f"{where} must be true or false, got {text!r}")
        return _BOOLS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ConfigError(f"{where} must be a {'whole ' if kind is int else ''}number, got {text!r}") from None
    if kind is str:
        return text
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ConfigError(f"{where} must be one of {', '.join(map(str, get_args(kind)))}, got {text!r}")
        return text
    raise ConfigError(f"{where} cannot be written as text; make the configuration in Python: LLM(drafter=Config(...))")


def _options(config: Any) -> dict[str, Field[Any]]:
    return {f.name: f for f in fields(config) if f.init}


def _default(option: Field[Any]) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    if option.default is MISSING:
        return _REQUIRED
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
