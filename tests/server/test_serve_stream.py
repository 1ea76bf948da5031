"""Streams, byte for byte but for what differs each time."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_world import Running, chunks_of, lines_of

CHAT = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 6, "temperature": 0, "stream": True}


def masked(lines: list[str]) -> list[str]:
    """The transcript with what differs each time written as X."""
    out = []
    for line in lines:
        if line != "data: [DONE]":
            chunk = json.loads(line.removeprefix("data: "))
            chunk |= {"id": "X", "created": 0, "system_fingerprint": "X"}
            if "metrics" in chunk:
                assert chunk["metrics"]["speculative_decoding"]["num_target_passes"] > 0
                chunk["metrics"] = "X"
            line = f"data: {json.dumps(chunk, ensure_ascii=False)}"
        out.append(line)
    return out


def frame(kind: str, choices: str, usage: str = "") -> str:
    head = f'data: {{"id": "X", "object": "{kind}", "created": 0, "model": "toy", "system_fingerprint": "X", '
    return f'{head}"choices": [{choices}]{usage}}}'


def test_the_transcript_of_a_chat(served: Running):
    whole = served.post("/v1/chat/completions", **CHAT | {"stream": False, "speculation": {"off": True}}).json()
    text = whole["choices"][0]["message"]["content"]
    told = masked(lines_of(served, "/v1/chat/completions", CHAT | {"speculation": {"off": True}}))
    kind, rest = "chat.completion.chunk", '"logprobs": null, "finish_reason": null'
    assert told == [
        frame(kind, f'{{"index": 0, "delta": {{"role": "assistant", "content": "", "refusal": null}}, {rest}}}'),
        *(frame(kind, f'{{"index": 0, "delta": {{"content": {json.dumps(c)}}}, {rest}}}') for c in text),
        frame(
            kind,
            '{"index": 0, "delta": {}, "logprobs": null, "finish_reason": "length", "stop_reason": null}',
            ', "metrics": "X"',
        ),
        "data: [DONE]",
    ]


def test_the_transcript_of_a_completion_with_usage(served: Running):
    body = {"prompt": "hi", "seed": 1, "max_tokens": 3, "temperature": 0, "stream": True, "echo": True}
    body |= {"speculation": {"off": True}, "stream_options": {"include_usage": True}}
    text = served.post("/v1/completions", **body | {"stream": False}).json()["choices"][0]["text"]
    told = masked(lines_of(served, "/v1/completions", body))
    rest, usage = '"logprobs": null, "finish_reason": null', ', "usage": null'
    details = '"completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, '
    assert told == [
        *(
            frame("text_completion", f'{{"index": 0, "text": {json.dumps(part)}, {rest}}}', usage)
            for part in ("hi", *text[2:])
        ),
        frame(
            "text_completion",
            '{"index": 0, "text": "", "logprobs": null, "finish_reason": "length", "stop_reason": null}',
            ', "usage": null',
        ),
        frame(
            "text_completion",
            "",
            ', "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5, "prompt_tokens_details": '
            '{"cached_tokens": 0}, ' + details + '"rejected_prediction_tokens": 0}}, "metrics": "X"',
        ),
        "data: [DONE]",
    ]


def test_chunks_put_together_are_the_whole_answer(served: Running):
    body = {"prompt": ["the sea ", "ab"], "n": 2, "seed": 8, "max_tokens": 40, "logprobs": 2, "echo": True}
    body |= {"include_provenance": True}
    whole = served.post("/v1/completions", **body).json()
    made: list[dict[str, Any]] = [{"text": "", "provenance": [], "logprobs": {}} for _ in range(4)]
    figures: dict[int, Any] = {}
    for chunk in chunks_of(served, "/v1/completions", body | {"stream": True}):
        (choice,) = chunk["choices"]
        into = made[choice["index"]]
        into["text"] += choice["text"]
        into["provenance"] += choice.get("provenance", [])
        for name, values in (choice["logprobs"] or {}).items():
            into["logprobs"].setdefault(name, []).extend(values)
        if choice["finish_reason"]:
            figures[choice["index"]] = chunk["metrics"]["speculative_decoding"]
            into |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    for choice, told in zip(whole["choices"], made, strict=True):
        for name in ("text", "finish_reason", "stop_reason", "logprobs"):
            assert told[name] == choice[name], name
        assert [each["token_id"] for each in told["provenance"]] == [each["token_id"] for each in choice["provenance"]]
    assert sorted(figures) == [0, 1, 2, 3]


def test_an_echo_alone_streams_too(served: Running):
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": True}
    first, last = chunks_of(served, "/v1/completions", body)
    assert first["choices"][0]["text"] == "abc"
    assert len(first["choices"][0]["logprobs"]["tokens"]) == 3
    assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("provenance", [False, True])
def test_obfuscated_chunks_are_all_as_long_as_blocks(served: Running, provenance: bool):
    prediction = {"type": "content", "content": "the sea " * 20}
    body = CHAT | {"max_tokens": 60, "prediction": prediction, "include_provenance": provenance}
    plain = lines_of(served, "/v1/chat/completions", body)
    padded = lines_of(served, "/v1/chat/completions", body | {"stream_options": {"include_obfuscation": True}})
    assert len({len(line) for line in plain[1:-2]}) > 1
    sizes = {len(line.removeprefix("data: ").encode()) for line in padded[:-1]}
    assert all(size % 512 == 0 for size in sizes)
    chunks = [json.loads(line.removeprefix("data: ")) for line in padded[:-1]]
    assert all("obfuscation" in chunk for chunk in chunks)
    assert len({chunk["obfuscation"][:16] for chunk in chunks if chunk["obfuscation"]}) > 1
