"""Tools: what the model may write, by each choice and format, and what is read back from it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest
from test_matcher import BPE, BYTES

from outrider.core.errors import RequestError
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
    made = compile_constraint(GrammarSpec.lark(source), BYTES)
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
