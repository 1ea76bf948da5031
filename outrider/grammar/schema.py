"""JSON schemas: bounded in size, and written in the keywords that llguidance enforces."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain, permutations
from typing import Any

from outrider.core.errors import RequestError

MAX_SOURCE_CHARS = 1 << 17  # of a schema, pattern or grammar
MAX_SCHEMA_DEPTH = 64  # of a schema's nesting
MAX_COMBINED_PATTERNS = 12  # patterns combined on one text; llguidance's time and memory double with each
MAX_UNIQUE_VALUES = 5  # in the items of a list without duplicates; 5 can be arranged in 326 ways

# Keywords that restrict a value and that llguidance silently ignores; it reports all others itself.
_UNENFORCED = frozenset({"nullable", "divisibleBy", "disallow", "extends", "x-guidance"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_SCHEMAS = frozenset({"items", "additionalProperties", "additionalItems"})


def check_schema(schema: Mapping[str, Any]) -> None:
    """Raise RequestError where a schema is too large, or uses what cannot be enforced."""
    _check_depth(schema)
    _check_keywords(schema)
    _check_combined(schema)


def rewrite_schema(schema: Mapping[str, Any], *, relaxed: bool = False) -> dict[str, Any]:
    """The schema with `propertyNames` and `uniqueItems` in keywords that llguidance enforces.

    Where they always hold, they are left out. Where they cannot be rewritten, they are left out if
    `relaxed`, and else kept: compiling then refuses them by name.
    """

    def rewrite(part: Mapping[str, Any]) -> dict[str, Any]:
        out = {key: _map_inside(key, value, rewrite) for key, value in part.items()}
        for keyword, enforce in (("propertyNames", _enforce_names), ("uniqueItems", _enforce_unique)):
            if keyword in out:
                rest = {key: value for key, value in out.items() if key != keyword}
                enforced = enforce(out[keyword], rest, schema)
                out = enforced if enforced is not None else rest if relaxed else out
        return out

    return rewrite(schema)


def nest_schema(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The schema as part of another one, at this place (such as `/properties/a`): its references to itself follow."""

    def nest(part: Mapping[str, Any]) -> dict[str, Any]:
        out = {key: _map_inside(key, value, nest) for key, value in part.items()}
        reference = out.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            out["$ref"] = f"#{place}{reference[1:]}"
        return out

    return nest(schema)


_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$comment", "$schema", "$id"})


def _enforce_names(names: Any, rest: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rest of a schema, with names that match `propertyNames`; None where that cannot be written."""
    if names is True:
        return rest
    names = _resolve(names, root)
    if names is None or names.pop("type", "string") != "string":
        return None
    if not names:
        return rest
    pattern = _names_pattern(names)
    if pattern is None or "patternProperties" in rest:
        return None
    properties, others = rest.get("properties") or {}, rest.get("additionalProperties", True)
    if not properties:
        closed = {**rest, "patternProperties": {pattern: others}, "additionalProperties": False}
        return closed if (values := _values(names)) is None else _at_most(len(set(values)), closed)
    try:
        fits = others is False and all(re.search(pattern, name) for name in properties)
    except re.error:
        return None
    return rest if fits else None


def _at_most(count: int, schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of objects with at most this many properties.

    Once every name that a pattern allows is written, llguidance still allows a comma, and then nothing.
    """
    given = schema.get("maxProperties", count)
    return schema if isinstance(given, (int, float)) and given < count else {**schema, "maxProperties": count}


def _names_pattern(names: Mapping[str, Any]) -> str | None:
    """The pattern of a schema of strings; None where it has more than a pattern, values or a length."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if names.keys() <= {"minLength", "maxLength"} and all(isinstance(each, int) for each in names.values()):
        return f"^(?s:.){{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    values = _values(names)
    if not values or not all(isinstance(each, str) for each in values):
        return None
    return "^(?:" + "|".join(re.sub(r"[][\\.+*?(){}|^$/-]", r"\\\g<0>", each) for each in values) + ")$"


def _enforce_unique(unique: Any, rest: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rest of a schema whose lists have no duplicates; None where that cannot be written."""
    low, high = rest.get("minItems", 0), rest.get("maxItems", MAX_UNIQUE_VALUES)
    if unique is False or (rest.get("type") == "array" and high in (0, 1)):
        return rest
    values = _values(_resolve(rest.get("items"), root) or {})
    plain = rest.get("type") == "array" and rest.keys().isdisjoint(("prefixItems", "enum", "const"))
    if not plain or not values or len(values) > MAX_UNIQUE_VALUES or not isinstance(low, int):
        return None
    if not isinstance(high, int) or any(a == b for a, b in permutations(values, 2)):
        return None
    lists = chain.from_iterable(permutations(values, size) for size in range(low, min(high, len(values)) + 1))
    return {**rest, "enum": [list(each) for each in lists]}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that only lists values, all of its type; None for any other schema."""
    keys = schema.keys() - {"type"}
    values = [schema["const"]] if keys == {"const"} else schema["enum"] if keys == {"enum"} else None
    given = schema.get("type")
    kind = object if given is None else str if given == "string" else int if given == "integer" else ()
    return values if isinstance(values, list) and all(isinstance(each, kind) for each in values) else None


def _resolve(schema: Any, root: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema without its annotations; of a reference to the root's definitions, the schema it refers to."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        _, _, place = schema["$ref"].partition("#/")
        where, _, name = place.partition("/")
        definitions = root.get(where) if where in ("$defs", "definitions") else None
        schema = definitions.get(name) if isinstance(definitions, Mapping) else None
    if not isinstance(schema, Mapping):
        return None
    return {key: value for key, value in schema.items() if key not in _ANNOTATIONS}


def _map_inside(key: str, value: Any, change: Callable[[Mapping[str, Any]], Any]) -> Any:
    """A keyword's value, with each schema in it changed."""

    def changed(each: Any) -> Any:
        return change(each) if isinstance(each, Mapping) else each

    if key in _SCHEMA_MAPS and isinstance(value, Mapping):
        return {name: changed(each) for name, each in value.items()}
    if key in _SCHEMA_LISTS and isinstance(value, (list, tuple)):
        return [changed(each) for each in value]
    return changed(value) if key in _SCHEMAS else value


def _check_depth(schema: Mapping[str, Any]) -> None:
    """Check the depth level by level, since recursion into a deep schema would overflow the stack."""
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


def check_lark(source: str) -> None:
    """The check of `_check_combined` for a Lark grammar, by its text alone: its `&` operators and its schemas."""
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


def _schemas_in(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The schema and every schema inside it. Depth is checked before."""
    found: list[Mapping[str, Any]] = []

    def visit(part: Mapping[str, Any]) -> None:
        found.append(part)
        for key, value in part.items():
            _map_inside(key, value, visit)

    visit(schema)
    return found
