"""What clients do, with vLLM behind our server; greedy answers are judged by this package's own engine."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from client_world import FORMAT, NAMED, PARAMETERS, TOOLS
from openai import OpenAI
from process_world import Process
from pydantic import BaseModel
from server_world import until
from vllm_world import KEY, NAME

from outrider.core.sampling import SamplingParams
from outrider.llm import LLM

pytestmark = pytest.mark.vllm

MESSAGES: list[Any] = [{"role": "user", "content": "Name three rivers of Europe."}]
TOKENS = 24


@pytest.fixture(scope="module")
def client(vllm: Process) -> OpenAI:
    return OpenAI(base_url=f"{vllm.url}/v1", api_key=KEY, max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def wanted(ours: LLM) -> Any:
    return ours.chat(MESSAGES, SamplingParams(max_tokens=TOKENS, logprobs=3))


def chat(client: OpenAI, **more: Any) -> Any:
    asked = {"model": NAME, "messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
    return client.chat.completions.create(**asked | more)


def test_models(client: OpenAI):
    (card,) = client.models.list()
    assert (card.id, card.drafter, card.max_model_len) == (NAME, "ngram", 1024)
    assert {"prediction", "logit_bias", "min_p"} <= card.missing.keys()
    assert "not repeated" in card.different["seed"]
    assert client.models.retrieve(NAME).object == "model"


def test_a_whole_chat(client: OpenAI, wanted: Any):
    answer = chat(client)
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.tokens)


def test_a_streamed_chat(client: OpenAI, wanted: Any):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [wanted.finish_reason]
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_and_speculation_in_a_stream(client: OpenAI, wanted: Any):
    repeated = [{"role": "user", "content": "Repeat: one two three one two three one two three"}]
    last = list(chat(client, messages=repeated, stream=True, stream_options={"include_usage": True}))[-1]
    assert last.choices == []
    record = last.metrics["speculative_decoding"]
    assert record["num_spec_tokens"] == 3
    assert 0 <= record["num_accepted_draft_tokens"] <= record["num_draft_tokens"]
    assert record["num_spec_steps"] > 0
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens


def test_two_choices(client: OpenAI):
    answer = chat(client, n=2, temperature=1, seed=7)  # vLLM refuses two greedy ones
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.completion_tokens > TOKENS
    streamed = ["", ""]
    for chunk in chat(client, n=2, temperature=1, seed=7, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert all(streamed)
    with pytest.raises(openai.BadRequestError, match="greedy"):
        chat(client, n=2)


def test_a_stop_string(client: OpenAI, wanted: Any):
    stop = wanted.text[6:9]
    choice = chat(client, stop=[stop]).choices[0]
    assert choice.message.content == wanted.text[: wanted.text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_logprobs(client: OpenAI, wanted: Any):
    told = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [each.logprob for each in told] == pytest.approx([each.logprob for each in wanted.logprobs], abs=1e-3)
    for each, ours in zip(told, wanted.logprobs, strict=True):
        best = [logprob for _, logprob in ours.top]
        assert [other.logprob for other in each.top_logprobs][: len(best)] == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(client: OpenAI, choice: Any):
    """A function of those given, with arguments by its schema: --tool-strict-level=parameter."""
    answer = chat(client, tools=TOOLS, tool_choice=choice, max_tokens=100).choices[0]
    (call, *_) = answer.message.tool_calls
    assert call.function.name in (("look", "wait") if choice == "required" else ("wait",))
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


class Glance(BaseModel):
    at: Literal["sea", "sky"]
    times: Literal[1, 2, 3]


def test_a_json_schema_and_a_parsed_answer(client: OpenAI):
    answer = chat(client, response_format=FORMAT, max_tokens=100)
    jsonschema.validate(json.loads(answer.choices[0].message.content), PARAMETERS)
    parsed = client.chat.completions.parse(
        model=NAME, messages=MESSAGES, max_tokens=100, temperature=0, response_format=Glance
    )
    assert isinstance(parsed.choices[0].message.parsed, Glance)


def test_errors(client: OpenAI):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        chat(client, messages=[{"role": "user", "content": "river " * 3000}])
    assert long.value.code == "context_length_exceeded"
    assert "1024" in long.value.message
    with pytest.raises(openai.BadRequestError) as range_:
        chat(client, temperature=-1)
    assert range_.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as missing:
        chat(client, prediction={"type": "content", "content": "x"})
    assert (missing.value.code, missing.value.param) == ("not_supported", "prediction")
    with pytest.raises(openai.BadRequestError) as drafting:
        chat(client, logit_bias={"5": 1})
    assert (drafting.value.code, drafting.value.param) == ("not_supported", "logit_bias")


def test_a_wrong_key(vllm: Process):
    wrong = OpenAI(base_url=f"{vllm.url}/v1", api_key="wrong-key-1", max_retries=0)
    with pytest.raises(openai.AuthenticationError) as refused:
        chat(wrong)
    assert refused.value.code == "invalid_api_key"


def test_leaving_a_stream_frees_the_request(vllm: Process, client: OpenAI):
    before = vllm.metric("outrider_requests_total", finish_reason="cancelled")
    stream = chat(client, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    until(lambda: vllm.metric("outrider_requests_total", finish_reason="cancelled") == before + 1)
    assert vllm.metric("outrider_requests_running") == 0


def test_a_completion_with_the_prompt_scored(client: OpenAI):
    answer = client.completions.create(model=NAME, prompt="the sea", echo=True, logprobs=1, max_tokens=1)
    assert answer.choices[0].text.startswith("the sea")
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.token_logprobs is not None
    assert scores.token_logprobs[0] is None


def test_a_response(client: OpenAI, wanted: Any):
    content = MESSAGES[0]["content"]
    asked: Any = {"model": NAME, "input": content, "max_output_tokens": TOKENS, "temperature": 0}
    assert client.responses.create(**asked).output_text == wanted.text
    events = list(client.responses.create(**asked, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted.text
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_langchain(vllm: Process, wanted: Any):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=NAME, base_url=f"{vllm.url}/v1", api_key=KEY, temperature=0, max_tokens=TOKENS, max_retries=0
    )
    assert model.invoke(MESSAGES[0]["content"]).content == wanted.text
    assert "".join(str(chunk.content) for chunk in model.stream(MESSAGES[0]["content"])) == wanted.text


def test_tokenize(vllm: Process, ours: LLM):
    told = vllm.http.post("/tokenize", json={"prompt": "the sea"}).json()
    assert told["tokens"] == ours.tokenizer.encode("the sea")
    assert vllm.http.post("/detokenize", json={"tokens": told["tokens"]}).json()["prompt"] == "the sea"
