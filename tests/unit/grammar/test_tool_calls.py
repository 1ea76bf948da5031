"""Tools: what the model may write, by each choice and format, and what is read back from it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from test_matcher import BPE, BYTES

from outrider.core.errors import RequestError
from outrider.core.sequence import Constraint
from outrider.grammar import GrammarSpec, ToolParser, compile_constraint, parse_tool_calls, tool_format
from outrider.grammar.tools import (
    MAX_TOOLS,
    ToolFormat,
    read_tool_choice,
    read_tools,
    tool_constraint,
    tool_grammar,
    tools_prompt,
)

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"$ref": "#/$defs/few"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"few": {"enum": [1, 2, 3]}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "description": "…", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "now"}}
FORMATS: tuple[ToolFormat, ...] = ("hermes", "llama3_json", "json")
PARIS = '{"city": "Paris", "days": 2}'


def call(form: ToolFormat, name: str = "get_weather", arguments: str = PARIS) -> str:
    body = f'{{"name": "{name}", "{"parameters" if form == "llama3_json" else "arguments"}": {arguments}}}'
    return f"<tool_call>\n{body}\n</tool_call>" if form == "hermes" else body


def accepts(form: ToolFormat, choice: Any, text: str, *, parallel: bool = True) -> bool:
    """Whether the grammar lets the whole text through and then end."""
    mode, tools = read_tool_choice(choice, read_tools(TOOLS))
    source = tool_grammar(tools, form, free=mode == "auto", parallel=parallel and mode != "named")
    return _ends(compile_constraint(GrammarSpec.lark(source), BYTES), text)


def _ends(made: Constraint, text: str) -> bool:
    for byte in text.encode():
        if not bool(made.allowed([()], frozenset())[0, byte]):
            return False
        made.advance([byte])
    return made.done or bool(made.allowed([()], BYTES.eos_ids)[0, 256])


@pytest.mark.parametrize("form", FORMATS)
def test_what_each_choice_lets_the_model_write(form: ToolFormat):
    weather, now, text = call(form), call(form, "now", "{}"), "Hello {you}, 3 < 4."
    assert [accepts(form, "auto", t) for t in (weather, now, text, "")] == [True] * 4
    assert [accepts(form, "required", t) for t in (weather, now, text, "")] == [True, True, False, False]
    assert [accepts(form, NAMED, t) for t in (weather, now, text, "")] == [False, True, False, False]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_arguments_are_held_to_the_schema(form: ToolFormat, choice: str):
    wrong = ['{"city": 5}', '{"days": 2}', '{"city": "Paris", "days": 9}', '{"city": "Paris", "more": 1}', "[]", "{}"]
    assert not any(accepts(form, choice, call(form, arguments=each)) for each in wrong)
    assert not accepts(form, choice, call(form, name="other"))
    assert not accepts(form, choice, call(form, name="now", arguments='{"a": 1}'))


def test_several_calls_and_text_before_them():
    two = f"{call('hermes')}\n{call('hermes', 'now', '{}')}"
    assert accepts("hermes", "auto", f"Let me look.\n{two}")
    assert accepts("hermes", "required", two)
    assert not accepts("hermes", "required", f"Let me look.\n{two}")
    assert not accepts("hermes", "auto", two, parallel=False)
    assert not accepts("hermes", NAMED, f"{call('hermes', 'now', '{}')}\n{call('hermes', 'now', '{}')}")
    assert not accepts("hermes", "auto", "Look: <tool_call>\nno call")
    assert not accepts("hermes", "auto", f"{call('hermes')} and more text")


def test_the_format_goes_by_the_template():
    assert tool_format("{% for t in tools %}<tool_call>{% endfor %}") == "hermes"
    assert tool_format('<|start_header_id|>system {"name": x, "parameters": y}') == "llama3_json"
    assert tool_format("{{ messages }}") == "json"


class WithTemplate:
    """A tokenizer and the text of its template."""

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.vocab_size, self.eos_ids = tokenizer.vocab_size, tokenizer.eos_ids
        self._template = template
        self.to_json = tokenizer.to_json

    def template_text(self, *, tools: bool = False) -> str:
        return self._template


def test_a_mark_that_is_a_token_is_drafted_as_one_and_counts_when_spelled_out_too():
    tokenizer = WithTemplate(BPE, "<tool_call>")
    made, form = tool_constraint(TOOLS, "required", tokenizer)
    assert form == "hermes"
    assert made is not None
    mark = BPE.encode("<tool_call>", special=False)
    assert len(mark) == 1
    assert made.forced()[0] == mark[0]
    free, _ = tool_constraint(TOOLS, "auto", tokenizer)
    assert free is not None
    for opening in (mark, [BPE.tokens.index(c) for c in "<tool_call>"]):
        twin = free.fork()
        twin.advance(BPE.encode("Hi ", special=False))
        twin.advance(opening)
        assert BPE.decode(list(twin.forced())).startswith('\n{"name": "')


def test_none_leaves_the_answer_free():
    assert tool_constraint(TOOLS, "none", WithTemplate(BPE, "")) == (None, "json")


def test_random_calls_come_back_valid():
    """Random bytes through the grammar, read back by the parser: a known name, and arguments its schema accepts."""
    for seed in range(60):
        form = FORMATS[seed % 3]
        rng, text = random.Random(seed), b""
        source = tool_grammar(read_tools(TOOLS), form, free=False, parallel=False)
        made = compile_constraint(GrammarSpec.lark(source), BYTES)
        while not made.done:
            text += bytes([rng.choice(made.allowed([()], frozenset())[0].nonzero()[:, 0].tolist())])
            made.advance(text[-1:])
        found = parse_tool_calls(text.decode(), form)
        assert found.content == ""
        (one,) = found.calls
        schema = {"get_weather": WEATHER, "now": {"maxProperties": 0}}[one.name]
        jsonschema.Draft202012Validator(schema).validate(json.loads(one.arguments))


ANSWERS: dict[str, tuple[ToolFormat, str, str, list[tuple[str, str]]]] = {
    "text": ("hermes", "Plain <b>text</b> with <tool and {braces}.", "Plain <b>text</b> with <tool and {braces}.", []),
    "one": ("hermes", call("hermes"), "", [("get_weather", PARIS)]),
    "text and two": (
        "hermes",
        f"Let me see.\n{call('hermes')}\n{call('hermes', 'now', '{}')}\n",
        "Let me see.\n",
        [("get_weather", PARIS), ("now", "{}")],
    ),
    "text between": (
        "hermes",
        f"{call('hermes', 'now', '{}')}\n <b> {call('hermes', 'now', '{}')}",
        "\n <b> ",
        [("now", "{}"), ("now", "{}")],
    ),
    "marks and brackets in strings": (
        "hermes",
        call("hermes", "now", '{"a": "}]\\"</tool_call>\\\\", "b": [{"c": "{"}]}'),
        "",
        [("now", '{"a": "}]\\"</tool_call>\\\\", "b": [{"c": "{"}]}')],
    ),
    "no call after all": ("hermes", "a <tool_call>\nnothing</tool_call> b", "a <tool_call>\nnothing</tool_call> b", []),
    "a head without end": ("hermes", f"<tool_call>{' ' * 300}x", f"<tool_call>{' ' * 300}x", []),
    "cut in the head": ("hermes", 'Hi <tool_call>\n{"name": "no', 'Hi <tool_call>\n{"name": "no', []),
    "cut in the arguments": ("hermes", '<tool_call>\n{"name": "now", "arguments": {"a": [1', "", [("now", '{"a": [1')]),
    "cut in the mark": ("hermes", "Hi <tool_ca", "Hi <tool_ca", []),
    "half a mark twice": (
        "hermes",
        f"<tool_<tool_call{call('hermes', 'now', '{}')}",
        "<tool_<tool_call",
        [("now", "{}")],
    ),
    "llama": ("llama3_json", call("llama3_json"), "", [("get_weather", PARIS)]),
    "llama text": ("llama3_json", 'I say {"name": 1}', 'I say {"name": 1}', []),
    "json": ("json", call("json", "now", "{}"), "", [("now", "{}")]),
    "json that is no call": ("json", '{"answer": 42}', '{"answer": 42}', []),
    "empty": ("json", "", "", []),
}


def _counted() -> Any:
    names = iter(range(1000))
    return lambda: f"call_{next(names)}"


@pytest.mark.parametrize("name", ANSWERS)
def test_a_whole_answer(name: str):
    form, text, content, calls = ANSWERS[name]
    found = parse_tool_calls(text, form, new_id=_counted())
    assert found.content == content
    assert [(one.name, one.arguments) for one in found.calls] == calls
    assert [one.id for one in found.calls] == [f"call_{i}" for i in range(len(calls))]


@pytest.mark.parametrize("name", ANSWERS)
def test_cut_anywhere_it_is_the_same(name: str):
    """Cut in two at every place, and into single characters: the deltas add up to the same."""
    form, text, *_ = ANSWERS[name]
    whole = parse_tool_calls(text, form, new_id=_counted())
    cuts = [[text[:i], text[i:]] for i in range(len(text) + 1)] + [list(text)]
    for pieces in cuts:
        parser = ToolParser(form, new_id=_counted())
        parts = [*(parser.push(piece) for piece in pieces), parser.finish()]
        assert "".join(part.content for part in parts) == whole.content
        deltas = [delta for part in parts for delta in part.calls]
        for one in whole.calls:
            mine = [delta for delta in deltas if delta.index == one.index]
            assert [bool(delta.id) for delta in mine] == [True] + [False] * (len(mine) - 1)
            assert (mine[0].id, mine[0].name) == (one.id, one.name)
            assert "".join(delta.arguments for delta in mine) == one.arguments
        assert len({delta.index for delta in deltas}) == parser.calls == len(whole.calls)


def test_openai_shapes():
    parser = ToolParser("json", new_id=lambda: "call_1")
    (first,) = parser.push('{"name": "now", "arguments": {"a"').calls
    (more,) = parser.push(": 1}}").calls
    function = {"name": "now", "arguments": '{"a"'}
    assert first.as_delta() == {"index": 0, "id": "call_1", "type": "function", "function": function}
    assert more.as_delta() == {"index": 0, "function": {"arguments": ": 1}"}}
    (whole,) = parse_tool_calls(call("json", "now", "{}"), "json", new_id=lambda: "x").calls
    assert whole.as_call() == {"id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "list of 1"),
        ("x", "list of 1"),
        (TOOLS * MAX_TOOLS, "list of 1"),
        ([*TOOLS, TOOLS[0]], "two tools"),
        ([{"type": "code"}], "must be"),
        ([{"type": "function", "function": {"name": "a b"}}], "a name has"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}], "type object"),
        ([{"type": "function", "function": {"name": "a", "parameters": {"nullable": True}}}], "nullable"),
    ],
)
def test_wrong_tools_are_refused(tools: Any, message: str):
    with pytest.raises(RequestError, match=message):
        read_tools(tools)


@pytest.mark.parametrize("choice", ["some", {"type": "function", "function": {"name": "other"}}, {"type": "x"}, 3])
def test_a_wrong_choice_is_refused(choice: Any):
    with pytest.raises(RequestError, match="get_weather, now"):
        read_tool_choice(choice, read_tools(TOOLS))


def test_a_model_whose_template_knows_no_tools_can_be_told():
    told = tools_prompt(TOOLS, "hermes")
    assert all(json.dumps(tool, ensure_ascii=False) in told for tool in TOOLS)
    assert '<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>' in told


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def fits(form: ToolFormat, content: GrammarSpec, text: str, tools: list[dict[str, Any]] = TOOLS) -> bool:
    """Whether a text is allowed with tools and a response format."""
    source = tool_grammar(read_tools(tools), form, free=True, content=content)
    return _ends(compile_constraint(GrammarSpec.lark(source, ("tools",)), BYTES), text)


@pytest.mark.parametrize("form", FORMATS)
def test_with_a_response_format_an_output_is_calls_or_matches_it(form: ToolFormat):
    content = GrammarSpec.json_schema(CITY)
    answer = '{"city": "Rome"}'
    assert [fits(form, content, text) for text in (call(form), call(form, "now", "{}"), answer)] == [True] * 3
    wrong = (
        "Hello",
        "",
        f" {answer}",
        f"{answer}\n",
        f" {call(form)}",
        '{"city": 5}',
        call(form, arguments='{"city": 5}'),
        f"Hello {call(form)}",
        '{"name": "x"}',
    )
    assert not any(fits(form, content, text) for text in wrong)
    (read,) = parse_tool_calls(call(form), form).calls
    assert (read.name, read.arguments) == ("get_weather", PARIS)
    assert parse_tool_calls(answer, form).content == answer


@pytest.mark.parametrize("form", FORMATS)
def test_a_response_format_may_begin_like_a_call(form: ToolFormat):
    content = GrammarSpec.json_schema(PERSON)
    assert fits(form, content, call(form))
    for text in ('{"name": "now"}', '{"name": "get_weather", "age": 3}'):
        assert fits(form, content, text)
        found = parse_tool_calls(text, form)
        assert (found.content, found.calls) == (text, [])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "content",
    [
        GrammarSpec.regex("ab|c/d"),
        GrammarSpec.choice(["ab", "c/d"]),
        GrammarSpec.lark('start: "a" end | "c/d"\nend: "b"'),
    ],
)
def test_any_response_format_goes_with_tools(form: ToolFormat, content: GrammarSpec):
    assert [fits(form, content, text) for text in ("ab", "c/d", call(form), "a", "x")] == [True] * 3 + [False] * 2


def test_a_schema_that_refers_to_itself_goes_with_a_response_format():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
    properties = {"$ref": {"$ref": "#/$defs/node"}}  # a property may have that name
    tools = tool_of({"type": "object", "properties": properties, "$defs": {"node": node}})
    content = GrammarSpec.json_schema(CITY)
    for arguments, right in (('{"$ref": {"next": {"next": {}}}}', True), ('{"$ref": {"next": 5}}', False)):
        assert fits("json", content, call("json", "save", arguments), tools) is right


def test_json_that_is_no_call_is_streamed_as_soon_as_that_is_known():
    parser = ToolParser("json")
    assert [parser.push(char).content for char in '{ "cit'] == ["", "", "", '{ "c', "i", "t"]
    parser = ToolParser("json")
    assert [parser.push(text).content for text in ('{"nam', 'es"')] == ["", '{"names"']


def tool_of(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "save", "parameters": parameters}}]


def test_sets_and_records_are_never_a_reason_to_refuse_a_tool():
    """uniqueItems of every pydantic set, propertyNames of every zod record."""
    properties = {
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "map": {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        "dates": {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": {"type": "integer"}},
    }
    tools = tool_of({"type": "object", "properties": properties, "additionalProperties": False})
    text = call("json", "save", '{"tags": ["a", "b"], "map": {"x": 1}, "dates": {"2026-01-01": 2}}')
    source = tool_grammar(read_tools(tools), "json", free=False)
    assert _ends(compile_constraint(GrammarSpec.lark(source), BYTES), text)


A = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("parameters", "strict", "open_"),
    [
        (A, None, False),
        (A, True, False),
        (A, False, True),
        ({**A, "additionalProperties": True}, None, True),
        ({**A, "patternProperties": {"^b$": {}}}, None, True),
        ({**A, "allOf": [{"properties": {"b": {"type": "integer"}}}]}, None, True),
        ({"type": "object"}, None, True),
    ],
)
def test_arguments_that_are_not_listed_are_written_where_the_schema_asks_for_them(
    parameters: dict[str, Any], strict: bool | None, open_: bool
):
    (tool,) = tool_of(parameters)
    tool["function"]["strict"] = strict
    source = tool_grammar(read_tools([tool]), "json", free=False)
    assert _ends(compile_constraint(GrammarSpec.lark(source), BYTES), call("json", "save", '{"a": 1, "b": 2}')) == open_
    assert _ends(compile_constraint(GrammarSpec.lark(source), BYTES), call("json", "save", '{"a": 1}'))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"properties": {"a": {"not": {}}}}, "^tool save: the JSON schema uses not, which cannot be enforced here"),
        ({"properties": {"a": {"type": "nonsense"}}}, "^tool save: the schema is not valid: .*nonsense"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)"}}}, "^tool save: .*look-ahead"),
    ],
)
def test_a_refusal_names_the_tool_and_shows_no_grammar(parameters: dict[str, Any], message: str):
    tools = [*TOOLS, *tool_of(parameters)]
    for content in (None, GrammarSpec.json_schema(CITY)):
        with pytest.raises(RequestError, match=message) as caught:
            tool_constraint(tools, "auto", WithTemplate(BPE, "{}"), content=content)
        assert not any(sign in str(caught.value) for sign in ("%", "args_", "call_", "start:", " | ", "at 4"))


def test_a_refusal_of_a_response_format_beside_tools_names_it():
    for content, message in (
        (GrammarSpec.json_schema({"not": {}}), "^response_format: the JSON schema uses not"),
        (GrammarSpec.lark("start: other"), "^response_format: .*other"),
        (GrammarSpec.lark("start: x }"), "^response_format: the format is not valid: at EOF"),
    ):
        with pytest.raises(RequestError, match=message):
            tool_constraint(TOOLS, "auto", WithTemplate(BPE, "<tool_call>"), content=content)
