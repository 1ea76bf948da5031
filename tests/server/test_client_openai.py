"""The `openai` package, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from client_world import (
    ASK,
    CONTEXT,
    ENDLESS,
    FORMAT,
    LOGPROB_ERROR,
    LONG,
    LONG_TOKENS,
    MESSAGES,
    NAMED,
    NO_SPACE,
    SEED,
    TIMEOUT,
    TOOLS,
    VLLM,
    Serve,
    Served,
    a_stop,
    expect_call,
    expect_json,
    expect_seeded,
    expect_two,
    finish_of,
    offline,
    offline_logprobs,
    refused,
    told_length,
    watched,
)
from openai import OpenAI
from pydantic import BaseModel
from server_world import NAME


def make_client(running: Served, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT)


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with make_client(served) as made:
        yield made


def chat(client: OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(model=NAME, **ASK | more)


def test_models(client: OpenAI):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).object == "model"


def test_a_whole_chat(client: OpenAI):
    answer, wanted = chat(client), offline()
    (choice,) = answer.choices
    assert choice.message.content == wanted.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.tokens)
    assert answer.system_fingerprint.startswith("vllm-" if VLLM else "fp_")


def test_where_each_token_comes_from(client: OpenAI):
    if VLLM:
        with pytest.raises(openai.BadRequestError, match=refused("include_provenance")):
            chat(client, extra_body={"include_provenance": True})
        return
    (choice,) = chat(client, extra_body={"include_provenance": True}).choices
    assert tuple(each["token_id"] for each in choice.provenance) == offline().tokens


def test_a_streamed_chat(client: OpenAI):
    wanted = offline()
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [wanted.finish_reason]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_the_streaming_helper_puts_the_same_together(client: OpenAI):
    stop, text = a_stop(), offline().text  # the helper wants no text that was cut off
    with client.chat.completions.stream(model=NAME, **ASK, stop=stop) as stream:
        told = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert told == final.choices[0].message.content == text[: text.index(stop)]


def test_usage_in_a_stream(client: OpenAI):
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    whole = chat(client)
    assert last.usage.completion_tokens == len(offline().tokens)
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.total_tokens == whole.usage.total_tokens


def test_two_choices(client: OpenAI):
    texts = [choice.message.content for choice in chat(client, n=2, temperature=1).choices]
    expect_two(texts)
    streamed = ["", ""]
    for chunk in chat(client, n=2, temperature=1, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert all(streamed)
    if not VLLM:
        assert streamed == texts


def test_the_same_seed_gives_the_same_text(client: OpenAI):
    asked = (chat(client, seed=seed, temperature=1) for seed in (SEED, SEED, SEED + 1))
    expect_seeded(*(answer.choices[0].message.content for answer in asked))


def test_a_stop_string(client: OpenAI):
    stop, text = a_stop(), offline().text
    choice = chat(client, stop=[stop, "zzz"]).choices[0]
    assert choice.message.content == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_logprobs(client: OpenAI):
    told = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    wanted = offline_logprobs(3)
    assert [bytes(each.bytes) for each in told] == [token for token, _, _ in wanted]
    assert [each.logprob for each in told] == pytest.approx([logprob for _, logprob, _ in wanted], abs=LOGPROB_ERROR)
    for each, (_, _, top) in zip(told, wanted, strict=True):
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(top, abs=LOGPROB_ERROR)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(client: OpenAI, choice: Any):
    answer = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=100).choices[0]
    (call,) = answer.message.tool_calls
    expect_call((call.function.name, json.loads(call.function.arguments)), choice)
    assert answer.finish_reason == finish_of(choice)
    streamed = ""
    for chunk in chat(client, tools=TOOLS, tool_choice=choice, max_tokens=100, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or ():
            streamed += delta.function.arguments or ""
    assert json.loads(streamed) == json.loads(call.function.arguments)
    if not VLLM:  # which reads a whole call and writes it anew
        assert streamed == call.function.arguments


def test_a_json_schema(client: OpenAI):
    answer = chat(client, response_format=FORMAT, max_tokens=100, logit_bias=NO_SPACE)
    expect_json(json.loads(answer.choices[0].message.content))


class Glance(BaseModel):
    at: Literal["sea", "sky"]
    times: Literal[1, 2, 3]


def test_a_parsed_answer(client: OpenAI):
    ask = ASK | {"max_tokens": 100, "logit_bias": NO_SPACE}
    answer = client.chat.completions.parse(model=NAME, **ask, response_format=Glance)
    (parsed,) = [choice.message.parsed for choice in answer.choices]
    assert isinstance(parsed, Glance)
    assert json.loads(answer.choices[0].message.content or "") == parsed.model_dump()


def test_errors(client: OpenAI):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": LONG}])
    assert long.value.code == "context_length_exceeded"
    assert str(CONTEXT) in long.value.message
    assert told_length([{"role": "user", "content": LONG}]) in long.value.message
    with pytest.raises(openai.BadRequestError) as range_:
        chat(client, temperature=-1)
    assert range_.value.param == "temperature"


def test_a_wrong_key(serve: Serve):
    running = serve(api_keys=("right-key",))
    with make_client(running, "wrong-key") as wrong, pytest.raises(openai.AuthenticationError) as refused:
        chat(wrong)
    assert refused.value.code == "invalid_api_key"
    with make_client(running, "right-key") as right:
        assert chat(right).choices[0].message.content == offline().text


def test_leaving_a_stream_frees_the_request(serve: Serve):
    server = watched(serve)
    with make_client(server) as client:
        stream = chat(client, max_tokens=LONG_TOKENS, logit_bias=ENDLESS, stream=True)
        next(iter(stream))
        stream.close()
        server.expect_cancelled()


def test_a_prediction_is_counted(client: OpenAI):
    wanted = offline()
    prediction: Any = {"type": "content", "content": wanted.text[:-3] + "zzz"}
    if VLLM:
        with pytest.raises(openai.BadRequestError, match=refused("prediction")):
            chat(client, prediction=prediction)
        return
    answer = chat(client, prediction=prediction)
    assert answer.choices[0].message.content == wanted.text
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > len(wanted.text) // 2
    assert details.rejected_prediction_tokens > 0
    assert answer.metrics["speculative_decoding"]["drafters"]["prediction"] == details.accepted_prediction_tokens


def test_a_completion_with_the_prompt_scored(client: OpenAI):
    answer = client.completions.create(model=NAME, prompt="the sea", echo=True, logprobs=1, max_tokens=0)
    assert answer.choices[0].text == "the sea"
    scores = answer.choices[0].logprobs
    assert scores
    assert scores.tokens == list("the sea")
    assert scores.token_logprobs
    assert scores.token_logprobs[0] is None
