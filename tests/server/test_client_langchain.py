"""`langchain-openai`, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
import pytest
from client_world import (
    CONTEXT,
    ENDLESS,
    LOGPROB_ERROR,
    LONG,
    LONG_TOKENS,
    MAX_TOKENS,
    MESSAGES,
    NAMED,
    NO_SPACE,
    SEED,
    TEMPERATURE,
    TIMEOUT,
    TOKENIZER,
    TOOLS,
    VLLM,
    Serve,
    Served,
    a_stop,
    expect_call,
    expect_seeded,
    expect_two,
    judge,
    offline,
    offline_logprobs,
    refused,
    told_length,
    watched,
)
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr
from server_world import NAME

from outrider.core.sampling import SamplingParams

KEY = SecretStr("none")
PROMPT = [(message["role"], message["content"]) for message in MESSAGES]


def make_model(running: Served, **more: Any) -> ChatOpenAI:
    options: dict[str, Any] = {"model": NAME, "seed": SEED, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE} | more
    return ChatOpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0, timeout=TIMEOUT, **options)


def test_a_whole_chat(served: Served):
    answer, wanted = make_model(served).invoke(PROMPT), offline()
    assert answer.content == wanted.text
    assert answer.response_metadata["finish_reason"] == wanted.finish_reason
    assert answer.response_metadata["model_name"] == NAME
    assert answer.usage_metadata
    assert answer.usage_metadata["output_tokens"] == len(wanted.tokens)
    assert answer.usage_metadata["input_tokens"] == len(TOKENIZER.encode_chat(MESSAGES))


def test_a_streamed_chat(served: Served):
    chunks = list(make_model(served).stream(PROMPT))
    assert "".join(str(chunk.content) for chunk in chunks) == offline().text
    assert len(chunks) > 2


def test_usage_in_a_stream(served: Served):
    told = [chunk.usage_metadata for chunk in make_model(served, stream_usage=True).stream(PROMPT)]
    (usage,) = [each for each in told if each]
    assert usage["output_tokens"] == len(offline().tokens)
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def test_two_choices(served: Served):
    model = make_model(served, n=2, temperature=1)
    (told,) = model.generate([[SystemMessage(PROMPT[0][1]), HumanMessage(PROMPT[1][1])]]).generations
    expect_two([each.text for each in told])


def test_the_same_seed_gives_the_same_text(served: Served):
    models = (make_model(served, seed=seed, temperature=1) for seed in (SEED, SEED, SEED + 1))
    expect_seeded(*(str(model.invoke(PROMPT).content) for model in models))


def test_a_stop_string(served: Served):
    stop, text = a_stop(), offline().text
    answer = make_model(served).invoke(PROMPT, stop=[stop])
    assert answer.content == text[: text.index(stop)]
    assert answer.response_metadata["finish_reason"] == "stop"


def test_logprobs(served: Served):
    answer = make_model(served, logprobs=True, top_logprobs=3).invoke(PROMPT)
    told, wanted = answer.response_metadata["logprobs"]["content"], offline_logprobs(3)
    assert [bytes(each["bytes"]) for each in told] == [token for token, _, _ in wanted]
    assert [each["logprob"] for each in told] == pytest.approx([logprob for _, logprob, _ in wanted], abs=LOGPROB_ERROR)
    for each, (_, _, top) in zip(told, wanted, strict=True):
        assert [other["logprob"] for other in each["top_logprobs"]] == pytest.approx(top, abs=LOGPROB_ERROR)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(served: Served, choice: Any):
    model = make_model(served, max_tokens=100).bind_tools(TOOLS, tool_choice=choice)
    (call,) = model.invoke(PROMPT).tool_calls
    expect_call((call["name"], call["args"]), choice)
    whole = AIMessageChunk(content="")
    for chunk in model.stream(PROMPT):
        assert isinstance(chunk, AIMessageChunk)
        whole += chunk
    assert [(each["name"], each["args"]) for each in whole.tool_calls] == [(call["name"], call["args"])]


@tool
def look(at: Literal["sea", "sky"]) -> str:
    """Look somewhere."""
    return at


@pytest.mark.parametrize("responses", [False, True])
def test_a_python_function_as_a_tool(served: Served, responses: bool):
    """LangChain's schema of it allows other arguments; the function takes none."""
    model = make_model(served, max_tokens=100, seed=None, use_responses_api=responses, extra_body={"seed": SEED})
    bound = model.bind_tools([look], tool_choice="any")
    answer = bound.invoke(PROMPT)
    turns: list[Any] = [*PROMPT, answer, *(look.invoke(call) for call in answer.tool_calls), ("user", "go on")]
    streamed = sum(bound.stream(PROMPT), AIMessageChunk(content=""))
    for told in (answer, streamed, bound.invoke(turns)):
        assert [call["name"] for call in told.tool_calls] == ["look"]
        assert told.tool_calls[0]["args"] in ({"at": "sea"}, {"at": "sky"})


class Glance(BaseModel, extra="forbid"):
    """A look at something."""

    at: Literal["sea", "sky"]
    times: Literal[1, 2, 3]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_structured_answer(served: Served, method: Any):
    bias = NO_SPACE if method == "json_schema" else None
    model = make_model(served, max_tokens=150, logit_bias=bias)
    model = model.with_structured_output(Glance, method=method, include_raw=True)
    told: Any = model.invoke(PROMPT)
    assert told["parsing_error"] is None
    raw = told["raw"].content if method == "json_schema" else json.dumps(told["raw"].tool_calls[0]["args"])
    assert Glance.model_validate_json(raw) == told["parsed"]


def test_errors(served: Served):
    with pytest.raises(openai.NotFoundError) as unknown:
        make_model(served, model="gpt-4").invoke(PROMPT)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        make_model(served).invoke(LONG)
    assert str(CONTEXT) in str(long.value)
    assert told_length([{"role": "user", "content": LONG}]) in str(long.value)


def test_leaving_a_stream_frees_the_request(serve: Serve):
    server = watched(serve)
    stream: Any = make_model(server, max_tokens=LONG_TOKENS, logit_bias=ENDLESS).stream(PROMPT)
    next(stream)
    stream.close()
    server.expect_cancelled()


def test_async_whole_streamed_and_in_a_batch(served: Served):
    async def ask() -> tuple[str, str, list[str]]:
        model = make_model(served)
        whole = await model.ainvoke(PROMPT)
        streamed = [str(chunk.content) async for chunk in model.astream(PROMPT)]
        batch = await model.abatch([PROMPT, PROMPT, PROMPT])
        return str(whole.content), "".join(streamed), [str(each.content) for each in batch]

    text = offline().text
    assert asyncio.run(ask()) == (text, text, [text] * 3)


def test_a_prediction_is_counted(served: Served):
    wanted = offline()
    prediction = {"type": "content", "content": wanted.text}
    model = make_model(served, model_kwargs={"prediction": prediction})
    if VLLM:
        with pytest.raises(openai.BadRequestError, match=refused("prediction")):
            model.invoke(PROMPT)
        return
    answer = model.invoke(PROMPT)
    assert answer.content == wanted.text
    details = answer.response_metadata["token_usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > len(wanted.text) // 2


def test_plain_completions(served: Served):
    model = OpenAI(base_url=f"{served.url}/v1", api_key=KEY, model=NAME, seed=SEED, max_tokens=8, temperature=0)
    whole = model.invoke("the sea")
    assert "".join(model.stream("the sea")) == whole
    assert whole == judge().generate("the sea", SamplingParams(max_tokens=8)).text
