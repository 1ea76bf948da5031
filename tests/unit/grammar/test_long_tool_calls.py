"""Long answers with tool calls: read in time that grows with their length, not with its square."""

from __future__ import annotations

import json
import time

import pytest

from outrider.grammar import ToolParser, parse_tool_calls

LONG = 400_000  # characters: a tenth of a second, or over five where each is paid for with a copy of those before
MOST_SECONDS = 2.0
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "y"}}\n</tool_call>'


def test_long_arguments():
    arguments = json.dumps({"x": "a" * LONG})
    began = time.thread_time()
    parsed = parse_tool_calls(f'{{"name": "f", "arguments": {arguments}}}', "json")
    assert time.thread_time() - began < MOST_SECONDS
    assert [call.arguments for call in parsed.calls] == [arguments]
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("after", "content", "calls"),
    [
        (" " * LONG, "", 1),
        (" " * LONG + CALL, "", 2),
        (" " * LONG + "so", " " * LONG + "so", 1),
        ("b" * LONG, "b" * LONG, 1),
    ],
    ids=["space", "space and a call", "space and text", "text"],
)
def test_much_after_a_call(after: str, content: str, calls: int):
    began = time.thread_time()
    parsed = parse_tool_calls(CALL + after, "hermes")
    assert time.thread_time() - began < MOST_SECONDS
    assert parsed.content == content
    assert [call.arguments for call in parsed.calls] == ['{"x": "y"}'] * calls


def test_a_call_that_is_never_closed():
    began = time.thread_time()
    parsed = parse_tool_calls(CALL.removesuffix("</tool_call>") + "c" * LONG, "hermes")
    assert time.thread_time() - began < MOST_SECONDS
    assert (parsed.content, [call.arguments for call in parsed.calls]) == ("", ['{"x": "y"}'])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_pieces_make_no_difference(size: int):
    text = f"well {CALL} \n {CALL}  and <tool_"
    parser = ToolParser("hermes", new_id=lambda: "id")
    parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    assert "".join(part.content for part in parts) == "well   and <tool_"
    told = [delta for part in parts for delta in part.calls]
    for index in (0, 1):
        own = [delta for delta in told if delta.index == index]
        assert (own[0].id, own[0].name) == ("id", "f")
        assert "".join(delta.arguments for delta in own) == '{"x": "y"}'
        assert not any(delta.id or delta.name for delta in own[1:])
