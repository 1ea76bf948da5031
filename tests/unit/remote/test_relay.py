"""Plain chunks that are passed on unparsed, against a relay that parses every one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.remote.figures import Figures
from outrider.remote.plain_chunks import plain_chunks
from outrider.remote.relay import Relay
from outrider.server.openai.request_schema import ChatRequest, CompletionRequest

HEAD: dict[str, Any] = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "theirs"}
LAYOUTS: list[dict[str, Any]] = [{"separators": (",", ":"), "ensure_ascii": False}, {"ensure_ascii": True}]
CHAT = ChatRequest.model_validate({"messages": [{"role": "user", "content": "a"}], "stream": True})
TEXT = CompletionRequest.model_validate({"prompt": "a", "stream": True})


def event(chunk: dict[str, Any], layout: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk, **layout)}\n\n".encode()


def chat(text: str, finish: str | None = None) -> dict[str, Any]:
    return HEAD | {"choices": [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}]}


def completion(text: str, finish: str | None = None) -> dict[str, Any]:
    return HEAD | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": finish}]}


def told(relay: Relay, wire: bytes, cuts: list[int]) -> tuple[bytes, Exception | None]:
    out = b""
    for a, b in itertools.pairwise([0, *sorted(cut % (len(wire) + 1) for cut in cuts), len(wire)]):
        if relay.ended or relay.error is not None:
            break
        out += relay.feed(wire[a:b]) if a < b else b""
    return out, relay.error


def values(out: bytes) -> list[Any]:
    data = [each.removeprefix("data: ") for each in out.decode().split("\n\n")[:-1]]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


TRICKY = st.sampled_from(['"', "\\", '","text":"x"}', '"model":"theirs"', "data: ", "\n\n", "é", "😀", "\x00", "{}"])


@given(
    st.lists(st.text(max_size=6) | TRICKY, min_size=1, max_size=8),
    st.lists(st.integers(0, 5000), max_size=6),
    st.sampled_from(LAYOUTS),
    st.sampled_from([(CHAT, chat), (TEXT, completion)]),
    st.sampled_from(["theirs", 'o"urs\\']),
)
def test_a_stream_is_the_same_parsed_or_not(
    texts: list[str], cuts: list[int], layout: dict[str, Any], kind: tuple[Any, Any], name: str
):
    body, make = kind
    usage = HEAD | {"choices": [], "usage": {"completion_tokens": len(texts), "prompt_tokens": 3}}
    chunks = [*map(make, texts), make("end", "length"), usage]
    wire = b"".join(event(chunk, layout) for chunk in chunks) + b"data: [DONE]\n\n"
    fast, parsed = Figures(), Figures()
    out, error = told(Relay(body, name, fast), wire, cuts)
    wanted, _ = told(Relay(body, name, parsed, max_templates=0), wire, cuts)
    assert error is None
    assert values(out) == values(wanted) == [*(chunk | {"model": name} for chunk in chunks[:-1]), "[DONE]"]
    assert fast == parsed
    assert (fast.finishes, fast.usage["completion_tokens"]) == ({0: "length"}, len(texts))


@pytest.mark.parametrize(
    "spoilt",
    [
        b'data: {"id": "cmpl-1"\n\n',
        b"data: 5\n\n",
        b"nonsense\n\n",
        event(completion("A"), LAYOUTS[1]).replace(b'"A"', b'"A\xff"'),
        event(completion("A"), LAYOUTS[1]).replace(b'"A"', b'"A\\x"'),
        event(completion("A"), LAYOUTS[1]).replace(b'"A"', b'"A\t"'),
        event(completion("A"), LAYOUTS[1]).replace(b'"A"', b'"A"B"'),
        b'data: {"error": {"message": "broken", "code": 500}}\n\n',
    ],
)
def test_what_is_malformed_is_found_after_plain_chunks(spoilt: bytes):
    good = [event(completion(text), LAYOUTS[1]) for text in "abc"]
    for relay in (Relay(TEXT, "theirs", Figures()), Relay(TEXT, "theirs", Figures(), max_templates=0)):
        assert b"".join(map(relay.feed, good)) == b"".join(good)
        assert relay.feed(good[0] + spoilt + good[0]) == good[0]
        assert relay.error is not None


@pytest.mark.parametrize(
    "chunk",
    [
        completion("a", "stop"),
        completion("a") | {"usage": {"completion_tokens": 1}},
        completion("a") | {"choices": completion("a")["choices"] * 2},
        chat("a") | {"choices": [{"index": 0, "delta": {"tool_calls": []}}]},
        HEAD | {"text": "x", "choices": [{"index": 0, "text": "a"}]},
    ],
    ids=["its end", "usage", "two choices", "a call", "another text before it"],
)
def test_a_chunk_that_is_not_plain(chunk: dict[str, Any]):
    assert plain_chunks(json.dumps(chunk), chunk, "theirs") is None


def test_plain_chunks_are_passed_on_as_they_came():
    made = plain_chunks(json.dumps(completion("a")), completion("a"), "theirs")
    assert made is not None
    data = event(completion("b"), LAYOUTS[1]) + event(completion('"c'), LAYOUTS[1])
    assert made.passed(data) is data
    for other in (data[:-1], data[1:], event(completion("b", "stop"), LAYOUTS[1]), data.replace(b"cmpl-1", b"cmpl-2")):
        assert made.passed(other) is None
