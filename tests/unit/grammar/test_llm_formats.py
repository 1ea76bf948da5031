"""Structured output from Python: `response_format` and `constraint` of generate, chat and stream."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import RequestError
from outrider.core.sampling import SamplingParams, Token
from outrider.grammar import GrammarSpec, compile_constraint
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.testing.toy import ByteTokenizer, ToyRunner

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "on": {"type": "boolean"}},
    "required": ["kind", "on"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
WARM = SamplingParams(temperature=1.0, seed=4, max_tokens=400)


class Bytes(ByteTokenizer):
    tokens = tuple(map(str, range(257)))
    bos_id = None

    def encode(self, text: str, *, special: bool = True) -> list[Token]:
        return list(text.encode())

    def encode_chat(self, messages: Seq[Any]) -> list[Token]:
        return self.encode("".join(message["content"] for message in messages))


def llm(drafter: str = "suffix") -> LLM:
    loaded = LoadedModel("toy", Path("toy"), ToyRunner(257), Bytes(), "float32")  # pyright: ignore[reportArgumentType]
    return LLM(loaded, drafter=drafter, adaptive=False)


def assert_thing(text: str) -> None:
    found = json.loads(text)
    assert found.keys() == {"kind", "on"}
    assert found["kind"] in ("a", "b")
    assert isinstance(found["on"], bool)


def test_generate_chat_and_stream_take_a_format():
    tried = llm()
    first, second = tried.generate(["x", "y"], WARM, response_format=FORMAT)
    assert_thing(first.text)
    assert_thing(second.text)
    assert_thing(tried.chat([{"role": "user", "content": "x"}], WARM, response_format=FORMAT).text)
    assert "".join(event.text for event in tried.stream("x", WARM, response_format=FORMAT)) == first.text
    assert first.finish_reason == "stop"
    assert tried.generate("x", WARM, response_format={"type": "text"}).text == tried.generate("x", WARM).text


def test_a_spec_and_a_constraint_will_do():
    tried, spec = llm(), GrammarSpec.json_schema(SCHEMA)
    text = tried.generate("x", WARM, response_format=FORMAT).text
    assert tried.generate("x", WARM, constraint=spec).text == text
    assert tried.generate("x", WARM, constraint=compile_constraint(spec, tried.tokenizer)).text == text


@pytest.mark.parametrize("drafter", ["grammar", "suffix", "mix"])
def test_compare_is_identical_and_forced_tokens_save_passes(drafter: str):
    found = llm(drafter).compare("x", WARM, constraint=GrammarSpec.json_schema(SCHEMA, whitespace="line"))
    assert found.identical
    assert_thing(found.plain.text)
    assert found.speculative.stats.all.rounds < found.plain.stats.all.rounds / 2
    forced = [p for p in found.speculative.provenance if p.drafter == "grammar" and p.origin == "accepted"]
    assert len(forced) == found.speculative.stats.all.accepted > 20


def test_two_ways_to_say_it_are_one_too_many():
    with pytest.raises(RequestError, match="give one of them"):
        llm().generate("x", response_format=FORMAT, constraint=GrammarSpec.json_object())


def test_a_bad_format_is_refused_and_nothing_is_left_behind():
    tried = llm()
    with pytest.raises(RequestError, match="uniqueItems"):
        tried.generate("x", response_format={"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}})
    tried.engine.check()
    assert_thing(tried.generate("x", WARM, response_format=FORMAT).text)
