"""Grammar specs: what a text must match, validated and of bounded size, not compiled yet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import RequestError

GrammarKind = Literal["json_schema", "regex", "lark", "choice"]
Whitespace = Literal["any", "line"]

MAX_SOURCE_CHARS = 1 << 17  # of a schema, pattern or grammar
MAX_SCHEMA_DEPTH = 64  # of a schema's nesting
MAX_CHOICE_TEXTS = 4096
MAX_COMBINED_PATTERNS = 12  # patterns combined on one text; llguidance's time and memory double with each

# Keywords that restrict a value and that llguidance silently ignores; it reports all others itself.
_UNENFORCED = frozenset({"nullable", "divisibleBy", "disallow", "extends", "x-guidance"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems"})


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a text must match. Made by the class methods below, which validate it."""

    kind: GrammarKind
    source: str
    """The schema as JSON, the pattern, the grammar, or the choices as a JSON list."""
    whitespace: Whitespace = "any"
    """JSON only. any: line breaks and indentation are allowed. line: one line, as Python's json.dumps writes it."""

    @classmethod
    def json_object(cls, *, whitespace: Whitespace = "any") -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, whitespace=whitespace)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, *, whitespace: Whitespace = "any") -> GrammarSpec:
        """JSON that matches a schema. Raises RequestError where the schema is too large or cannot be enforced."""
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise RequestError(f"a JSON schema must be an object such as {{'type': 'object'}}, got {schema!r:.80}")
        _check_depth(schema)
        _check_keywords(schema)
        _check_combined(schema)
        try:
            source = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the JSON schema is not JSON itself: {error}") from error
        return cls("json_schema", _check_source(source, "the JSON schema"), whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that the whole pattern matches (Rust's regex syntax: no look-around, no back-references)."""
        return cls("regex", _check_source(pattern, "the regex"))

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """Text of a context-free grammar in llguidance's Lark syntax, whose first rule is `start`."""
        return cls("lark", _check_source(grammar, "the grammar"))

    @classmethod
    def choice(cls, choices: Seq[str]) -> GrammarSpec:
        """One of these texts."""
        if isinstance(choices, str) or not isinstance(choices, Seq) or not 1 <= len(choices) <= MAX_CHOICE_TEXTS:
            raise RequestError(f"choices must be a list of 1 to {MAX_CHOICE_TEXTS} texts, got {choices!r:.80}")
        for each in choices:
            if not isinstance(each, str) or not each:
                raise RequestError(f"each of the choices must be a text of at least one character, got {each!r:.80}")
        return cls("choice", _check_source(json.dumps(list(choices), ensure_ascii=False), "the list of choices"))


def read_response_format(given: Mapping[str, Any] | None) -> GrammarSpec | None:
    """The spec of an OpenAI `response_format`; None for plain text.

    Besides `text`, `json_object` (with an optional `schema`) and `json_schema` it may be
    `{"type": "regex", "regex": ...}`, `{"type": "grammar", "grammar": ...}` (Lark) or
    `{"type": "choice", "choice": [...]}`.
    """
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec.json_schema(given.get("schema", {"type": "object"}))
    if kind == "json_schema":
        wrapped = given.get("json_schema")
        if not isinstance(wrapped, Mapping) or not isinstance(wrapped.get("schema"), (Mapping, bool)):
            raise RequestError('response_format needs {"json_schema": {"name": ..., "schema": {...}}}')
        return GrammarSpec.json_schema(wrapped["schema"])
    if kind == "choice":
        return GrammarSpec.choice(given.get("choice", ()))
    if kind in ("regex", "grammar"):
        source = given.get(kind)
        if kind == "regex":
            return GrammarSpec.regex(_text(source, kind))
        _check_lark(_text(source, kind))
        return GrammarSpec.lark(_text(source, kind))
    raise RequestError(
        f"response_format has no type {kind!r:.80}; choose one of: "
        "text, json_object, json_schema, regex, grammar, choice"
    )


def _text(source: Any, name: str) -> str:
    if not isinstance(source, str):
        raise RequestError(f"response_format: {name} must be a string, got {type(source).__name__}")
    return source


def _check_source(source: str, what: str) -> str:
    if not isinstance(source, str) or not source:
        raise RequestError(f"{what} must be a string of at least one character")
    if len(source) > MAX_SOURCE_CHARS:
        raise RequestError(f"{what} has {len(source)} characters; at most {MAX_SOURCE_CHARS} are taken")
    try:
        source.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} holds half of a surrogate pair; send whole characters") from error
    return source


def _check_depth(schema: Mapping[str, Any]) -> None:
    """Level by level, since recursion into a deep schema would overflow the stack."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        held = [each for each in level if isinstance(each, (Mapping, list, tuple))]
        level = [inner for each in held for inner in (each.values() if isinstance(each, Mapping) else each)]
        if not level:
            return
        if len(level) > MAX_SOURCE_CHARS:
            raise RequestError(f"the JSON schema holds more than {MAX_SOURCE_CHARS} values; send a smaller one")
    raise RequestError(
        f"the JSON schema is nested more than {MAX_SCHEMA_DEPTH} deep; use $defs and $ref, or flatten it"
    )


def _check_keywords(schema: Mapping[str, Any]) -> None:
    for part in _schemas_in(schema):
        unknown = sorted(_UNENFORCED & part.keys())
        if unknown:
            raise RequestError(
                f"the JSON schema uses {', '.join(unknown)}, which cannot be enforced here; leave it out"
            )


_PATTERNS = ("pattern", "format")
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")


def _check_combined(schema: Mapping[str, Any]) -> None:
    """Count patterns anywhere in the schema, since a $ref may refer to any part. Depth is checked before."""
    patterns, combines = 0, False
    level: list[Any] = [schema]
    while level:
        for each in level:
            if isinstance(each, Mapping):
                own = sum(isinstance(each.get(key), str) for key in _PATTERNS)
                patterns += own
                combines |= "allOf" in each or (own > 0 and not {"anyOf", "oneOf", "$ref"}.isdisjoint(each))
        held = [each for each in level if isinstance(each, (Mapping, list, tuple))]
        level = [inner for each in held for inner in (each.values() if isinstance(each, Mapping) else each)]
    if combines and patterns > MAX_COMBINED_PATTERNS:
        raise _too_combined(f"the JSON schema has {patterns} patterns and formats, and combines some")


def _check_lark(source: str) -> None:
    """The same for a Lark grammar, by its text alone: its `&` operators, and the schemas in it."""
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), source)
    if _STRING.sub("", source).count("&") >= MAX_COMBINED_PATTERNS:
        raise _too_combined("the grammar combines patterns with &")
    patterns = sum(plain.count(f'"{key}"') for key in _PATTERNS)
    if patterns > MAX_COMBINED_PATTERNS and any(f'"{key}"' in plain for key in ("allOf", "anyOf", "oneOf", "$ref")):
        raise _too_combined("the JSON schemas in the grammar have many patterns and formats, and combine some")


def _too_combined(what: str) -> RequestError:
    return RequestError(
        f"{what}; at most {MAX_COMBINED_PATTERNS} can be combined, so write fewer, or each where it holds alone"
    )


def _schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """The schema and every schema inside it. Depth is checked before."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for key, value in schema.items():
        inside: list[Any] = []
        if key in _SCHEMA_MAPS and isinstance(value, Mapping):
            inside = list(value.values())
        elif key in _SCHEMA_LISTS and isinstance(value, (list, tuple)):
            inside = list(value)
        elif key in _SCHEMAS:
            inside = [value]
        for each in inside:
            yield from _schemas_in(each)
