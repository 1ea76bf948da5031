"""A thousand random schemas, a thousand random texts: each that ends is valid, by the `jsonschema` package."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
import torch

from outrider.core.errors import RequestError
from outrider.core.sampling import SamplingParams, Token
from outrider.drafters.grammar import Grammar
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.grammar import GrammarSpec, compile_constraint
from outrider.grammar.schema import MAX_SCHEMA_DEPTH, MAX_UNIQUE_VALUES
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

BYTES = ByteTokenizer()
SCHEMAS = 1000


class Brief(ToyRunner):
    """Likes what ends things, so that most texts come to an end, and letters better than other bytes."""

    def _make_row(self, tail: tuple[Token, ...]) -> torch.Tensor:
        row = super()._make_row(tail)
        for char, liking in (('"', 6.0), ("}", 6.0), ("]", 6.0), (",", -2.0), ("0", 3.0), (".", -6.0), ("e", -4.0)):
            row[ord(char)] += liking
        row[256] += 8.0
        row[:33] -= 8.0
        row[128:256] -= 4.0
        return row


def _text(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    if rng.random() < 0.5:
        made["maxLength"] = rng.randrange(1, 6)
        made["minLength"] = rng.randrange(made["maxLength"])
    elif rng.random() < 0.3:
        made["pattern"] = rng.choice(["^[a-c]+$", "^x?y{2,3}$", "[0-9]z", "^(ab|cd)*$"])
    elif rng.random() < 0.3:
        made["format"] = rng.choice(["date", "uuid", "ipv4"])
    return made


def _number(rng: random.Random) -> dict[str, Any]:
    made: dict[str, Any] = {"type": rng.choice(["integer", "number"])}
    if rng.random() < 0.6:
        low = rng.randrange(-50, 50)
        made[rng.choice(["minimum", "exclusiveMinimum"])] = low
        made[rng.choice(["maximum", "exclusiveMaximum"])] = low + rng.randrange(2, 60)
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", "items": _schema(rng, depth - 1)}
    if rng.random() < 0.5:
        made["minItems"], made["maxItems"] = sorted((rng.randrange(4), rng.randrange(1, 4)))
    if rng.random() < 0.3:
        made["prefixItems"] = [_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]
    return made


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(["name", "id", "größe", 'a"b', "x y", "tags"], rng.randrange(1, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _schema(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.8:
        made["additionalProperties"] = rng.choice([False, False, {"type": "integer"}])
    return made


def _simple(rng: random.Random, depth: int) -> dict[str, Any]:
    values = ["red", "green", 'qu"ote', 3, -1.5, True, None, "é", [1, "a"], {"k": 0}]
    return rng.choice(
        [
            {"enum": rng.sample(values, 3)},
            {"const": rng.choice(values)},
            {"type": "boolean"},
            {"type": ["null", "integer"]},
        ]
    )


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1) for _ in range(2)]}


def _referring(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": "#/$defs/leaf"}


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    flat: list[Callable[..., dict[str, Any]]] = [lambda r, d: _text(r), lambda r, d: _number(r), _simple, _referring]
    return rng.choice(flat + [_array, _object, _object, _union] * (depth > 0))(rng, depth)


def random_schema(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    leaf = {"type": "object", "properties": {"leaf": {"type": "boolean"}}, "additionalProperties": False}
    return {**_object(rng, 2), "$defs": {"leaf": leaf}}


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_every_text_that_ends_is_valid(mode: str):
    """Half of the schemas in each mode; drafted by what the grammar forces, sampled at several temperatures."""
    seeds = range(0, SCHEMAS, 2) if mode == "seeded" else range(1, SCHEMAS, 2)
    target = Brief(257, context=160, cache_tokens=1 << 15)
    verifier = make_verifier(mode)  # pyright: ignore[reportArgumentType]
    tried = Engine(target, Grammar(16), verifier, BYTES, eos_ids=BYTES.eos_ids, limits=EngineLimits(max_batch=32))
    schemas: dict[int, dict[str, Any]] = {}
    refused = 0
    for seed in seeds:
        schema = random_schema(seed)
        spec = GrammarSpec.json_schema(schema, whitespace=("any", "line")[seed // 2 % 2])
        try:
            made = compile_constraint(spec, BYTES)
        except RequestError:  # a contradiction that llguidance sees at once
            refused += 1
            continue
        params = SamplingParams(temperature=(0.0, 0.7, 1.0)[seed // 2 % 3], seed=seed, max_tokens=120)
        (seq_id,) = tried.submit(Request(prompt=(seed % 256, 1), params=params, constraint=made))
        schemas[seq_id] = schema
    texts = dict.fromkeys(schemas, "")
    ends: dict[int, str] = {}
    while tried.busy:
        for event in tried.step():
            texts[event.seq_id] += event.text
            if event.finish:
                assert not event.error, (event.error, schemas[event.seq_id])
                ends[event.seq_id] = event.finish
    ended = [i for i, finish in ends.items() if finish == "stop"]
    for i in ended:
        jsonschema.Draft202012Validator(schemas[i]).validate(json.loads(texts[i]))
    assert refused < SCHEMAS // 50
    assert len(ended) > SCHEMAS // 2 * 0.85
    assert len({texts[i] for i in ended}) > SCHEMAS // 2 * 0.7  # they do not all say the same


UNSUPPORTED: dict[str, Any] = {
    "uniqueItems": True,
    "contains": {"type": "integer"},
    "minContains": 1,
    "propertyNames": {"format": "date"},
    "if": {"type": "integer"},
    "then": {"type": "integer"},
    "not": {"type": "integer"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "unevaluatedProperties": False,
    "unevaluatedItems": False,
    "$dynamicRef": "#a",
    "nullable": True,
    "divisibleBy": 2,
    "disallow": "string",
    "extends": {},
    "x-guidance": {"lenient": True},
}


@pytest.mark.parametrize("keyword", UNSUPPORTED)
@pytest.mark.parametrize("nested", [False, True])
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(keyword: str, nested: bool):
    schema = {keyword: UNSUPPORTED[keyword]}
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": schema}}} if nested else schema
    with pytest.raises(RequestError, match=f"uses {keyword.replace('$', '[$]')}"):
        compile_constraint(GrammarSpec.json_schema(schema), BYTES)


def test_a_property_may_be_named_like_a_keyword():
    schema = {"type": "object", "properties": {"nullable": {"const": 1}, "not": {"const": 2}}}
    compile_constraint(GrammarSpec.json_schema(schema), BYTES)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "nonsense"}, "not valid"),
        ({"type": "string", "pattern": "(?=a)"}, "look-ahead"),
        ({"type": "string", "format": "nonsense"}, "format"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"$ref": "#"}, "no text at all"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
        ({"$ref": "http://example.org/schema"}, "not valid"),
        ({"required": "x"}, "required"),
        ({"type": "integer", "minimum": 10**400}, "not valid: number out of range"),
    ],
)
def test_a_wrong_schema_is_refused_with_the_reason(schema: dict[str, Any], message: str):
    with pytest.raises(RequestError, match=message):
        compile_constraint(GrammarSpec.json_schema(schema), BYTES)


@pytest.mark.parametrize("schema", [False, [1], "x", None, 3])
def test_what_is_no_schema_is_refused(schema: Any):
    with pytest.raises(RequestError, match="must be an object"):
        GrammarSpec.json_schema(schema)


def test_depth_is_bounded_before_anything_walks_down():
    def nested(levels: int) -> dict[str, Any]:
        out: dict[str, Any] = {"type": "integer"}
        for _ in range(levels):
            out = {"type": "array", "items": out}
        return out

    compile_constraint(GrammarSpec.json_schema(nested(MAX_SCHEMA_DEPTH - 2)), BYTES)
    for levels in (MAX_SCHEMA_DEPTH, 10_000):
        with pytest.raises(RequestError, match="nested more than"):
            GrammarSpec.json_schema(nested(levels))


def _matches(schema: dict[str, Any], text: str) -> bool:
    made = compile_constraint(GrammarSpec.json_schema(schema), BYTES)
    for byte in text.encode():
        if not bool(made.allowed([()], frozenset())[0, byte]):
            return False
        made.advance([byte])
    return made.done or bool(made.allowed([()], BYTES.eos_ids)[0, 256])


INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}
LETTERS = {"$defs": {"letter": {"title": "Letter", "type": "string", "enum": ["a", "b"]}}}
ENFORCED: dict[str, dict[str, Any]] = {
    "any names": {**INTEGERS, "propertyNames": {"type": "string"}},
    "true": {**INTEGERS, "propertyNames": True},
    "a pattern": {**INTEGERS, "propertyNames": {"pattern": "^[ab]"}},
    "a length": {**INTEGERS, "propertyNames": {"minLength": 1, "maxLength": 2}},
    "values": {**INTEGERS, "propertyNames": {"type": "string", "enum": ["a", "b.c", "é-"]}},
    "required values": {**INTEGERS, "propertyNames": {"enum": ["a", "b"]}, "required": ["b"]},
    "one value": {**INTEGERS, "propertyNames": {"const": "a"}, "minProperties": 1},
    "fewer than the values": {**INTEGERS, "propertyNames": {"enum": ["a", "b"]}, "maxProperties": 1},
    "a reference": {**INTEGERS, **LETTERS, "propertyNames": {"$ref": "#/$defs/letter"}},
    "names of properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "propertyNames": {"pattern": "^[ab]$"},
        "additionalProperties": False,
    },
    "a set of values": {"type": "array", "items": {"enum": ["a", 1, None]}, "uniqueItems": True},
    "a set of a reference": {**LETTERS, "type": "array", "items": {"$ref": "#/$defs/letter"}, "uniqueItems": True},
    "a set of a size": {
        "type": "array",
        "items": {"enum": [1, 2, 3]},
        "uniqueItems": True,
        "minItems": 1,
        "maxItems": 2,
    },
    "one item": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    "a list": {"type": "array", "items": {"type": "integer"}, "uniqueItems": False},
}
TEXTS = [
    *("{}", '{"a": 1}', '{"b": 1}', '{"a": "x"}', '{"a": 1, "b": 2}', '{"c": 1}', '{"b.c": 1}', '{"bxc": 1}'),
    *('{"é-": 1}', '{"": 1}', '{"abc": 1}', '{"éé": 2}', "[]", '["a"]', '["a", 1]', '[1, "a"]', '["a", "a"]'),
    *('["b", "a"]', '["b", "b"]', "[1]", "[1, 2]", "[2, 1]", "[1, 1]", "[1, 2, 3]", "[1, 1, 2]", "[null, 1]"),
]


@pytest.mark.parametrize("name", ENFORCED)
def test_names_and_sets_are_enforced_where_they_can_be(name: str):
    """Each text is allowed exactly where it is valid; llguidance writes required properties first."""
    schema = ENFORCED[name]
    for text in TEXTS:
        valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))
        ordered = not (name == "required values" and text.startswith('{"a"'))
        assert _matches(schema, text) == (valid and ordered), text


@pytest.mark.parametrize("required", [[], ["b"], ["a", "b"]])
@pytest.mark.parametrize("names", [{"enum": ["a", "b"]}, {"$ref": "#/$defs/letter"}])
def test_nothing_follows_the_last_of_the_names(names: dict[str, Any], required: list[str]):
    """A comma there would leave the text without an end."""
    schema = {**INTEGERS, **LETTERS, "propertyNames": names, "required": required}
    made = compile_constraint(GrammarSpec.json_schema(schema), BYTES)
    made.advance(list(b'{"a": 1, "b": 2' if required != ["b"] else b'{"b": 1, "a": 2'))
    allowed = made.allowed([()], frozenset())[0]
    assert bool(allowed[ord("}")])
    assert not bool(allowed[ord(",")])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        {"type": "array", "items": {"enum": list(range(MAX_UNIQUE_VALUES + 1))}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [1, 1.0]}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [1, 2]}, "prefixItems": [{}], "uniqueItems": True},
        {**INTEGERS, "properties": {"x": {}}, "propertyNames": {"pattern": "^a"}},
        {**INTEGERS, "patternProperties": {"b": {}}, "propertyNames": {"pattern": "^a"}},
        {**INTEGERS, "propertyNames": {"pattern": "^a", "maxLength": 3}},
        {**INTEGERS, "propertyNames": False},
    ],
)
def test_names_and_sets_that_cannot_be_enforced_are_refused_by_name(schema: dict[str, Any]):
    with pytest.raises(RequestError, match=r"uses (uniqueItems|propertyNames)"):
        compile_constraint(GrammarSpec.json_schema(schema), BYTES)


@pytest.mark.parametrize("bad", [{"enum": [float("nan")]}, {"default": object()}, {"const": "\ud800"}])
def test_a_schema_that_is_not_json_is_refused(bad: dict[str, Any]):
    with pytest.raises(RequestError):
        GrammarSpec.json_schema(bad)
