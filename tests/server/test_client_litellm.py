"""`litellm`, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from client_world import (
    ASK,
    CONTEXT,
    FORMAT,
    LOGPROB_ERROR,
    LONG,
    MESSAGES,
    NAMED,
    NO_SPACE,
    TIMEOUT,
    TOKENIZER,
    TOOLS,
    Served,
    a_stop,
    expect_call,
    expect_json,
    expect_two,
    finish_of,
    judge,
    offline,
    offline_logprobs,
)
from server_world import NAME

from outrider.core.sampling import SamplingParams

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # importing it would fetch prices
litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed here: make test-clients")


def options(served: Served, **more: Any) -> dict[str, Any]:
    to = {
        "model": f"openai/{NAME}",
        "api_base": f"{served.url}/v1",
        "api_key": "none",
        "num_retries": 0,
        "timeout": TIMEOUT,
    }
    return to | ASK | more


def ask(served: Served, **more: Any) -> Any:
    return litellm.completion(**options(served, **more))


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_whole_chat(served: Served, provider: str):
    answer, wanted = ask(served, model=f"{provider}/{NAME}"), offline()
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.tokens)
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode_chat(MESSAGES))


def test_a_streamed_chat_and_its_usage(served: Served):
    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}))
    wanted = offline()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].finish_reason == wanted.finish_reason
    assert whole.usage.completion_tokens == len(wanted.tokens)


def test_two_choices(served: Served):
    expect_two([choice.message.content for choice in ask(served, n=2, temperature=1).choices])


def test_a_stop_string(served: Served):
    stop, text = a_stop(), offline().text
    (choice,) = ask(served, stop=[stop]).choices
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_logprobs(served: Served):
    told = ask(served, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    wanted = offline_logprobs(3)
    assert [bytes(each.bytes) for each in told] == [token for token, _, _ in wanted]
    assert [each.logprob for each in told] == pytest.approx([logprob for _, logprob, _ in wanted], abs=LOGPROB_ERROR)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(served: Served, choice: Any):
    more = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    streamed = litellm.stream_chunk_builder(list(ask(served, stream=True, **more)))
    for answer in (ask(served, **more), streamed):
        (call,) = answer.choices[0].message.tool_calls
        expect_call((call.function.name, json.loads(call.function.arguments)), choice)
        assert answer.choices[0].finish_reason in {"tool_calls", finish_of(choice)}  # the client may tell it itself


def test_a_json_schema(served: Served):
    answer = ask(served, response_format=FORMAT, max_tokens=100, logit_bias=NO_SPACE)
    expect_json(json.loads(answer.choices[0].message.content))


def test_async_whole_and_streamed(served: Served):
    async def read() -> tuple[str, str]:
        whole = await litellm.acompletion(**options(served))
        stream = await litellm.acompletion(**options(served, stream=True))
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(read()) == (offline().text,) * 2


def test_responses(served: Served):
    to = {"model": f"openai/{NAME}", "api_base": f"{served.url}/v1", "api_key": "none"}
    answer = litellm.responses(**to, input=MESSAGES, temperature=0, max_output_tokens=24)
    (item,) = answer.output
    assert item.content[0].text == offline(temperature=0).text


def test_plain_completions(served: Served):
    to = {"model": f"text-completion-openai/{NAME}", "api_base": f"{served.url}/v1", "api_key": "none"}
    answer = litellm.text_completion(**to, prompt="the sea", max_tokens=8, temperature=0)
    assert answer.choices[0].text == judge().generate("the sea", SamplingParams(max_tokens=8)).text


def test_errors(served: Served):
    with pytest.raises(litellm.NotFoundError, match="gpt-4"):
        ask(served, model="openai/gpt-4")
    with pytest.raises(litellm.ContextWindowExceededError, match=str(CONTEXT)):
        ask(served, messages=[{"role": "user", "content": LONG}])
