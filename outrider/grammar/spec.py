"""Grammar specs: what a text must match, validated and of bounded size, not compiled yet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import RequestError
from outrider.grammar.schema import MAX_SOURCE_CHARS, check_lark, check_schema, rewrite_schema

GrammarKind = Literal["json_schema", "regex", "lark", "choice"]
Whitespace = Literal["any", "line"]

MAX_CHOICE_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a text must match. Made by the class methods below, which validate it."""

    kind: GrammarKind
    source: str
    """The schema as JSON, the pattern, the grammar, or the choices as a JSON list."""
    whitespace: Whitespace = "any"
    """JSON only. any: line breaks and indentation are allowed. line: one line, as Python's json.dumps writes it."""
    parts: tuple[str, ...] = ()
    """For a grammar made from tools: what each line, from the second on, is made from; used in error messages."""

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
        check_schema(schema)
        try:
            source = json.dumps(rewrite_schema(schema), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RequestError(f"the JSON schema is not JSON itself: {error}") from error
        return cls("json_schema", _check_source(source, "the JSON schema"), whitespace)

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """Text that the whole pattern matches (Rust's regex syntax: no look-around, no back-references)."""
        return cls("regex", _check_source(pattern, "the regex"))

    @classmethod
    def lark(cls, grammar: str, parts: tuple[str, ...] = ()) -> GrammarSpec:
        """Text of a context-free grammar in llguidance's Lark syntax, whose first rule is `start`."""
        return cls("lark", _check_source(grammar, "the list of tools" if parts else "the grammar"), parts=parts)

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
        check_lark(_text(source, kind))
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
