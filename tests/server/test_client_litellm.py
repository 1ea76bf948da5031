"""`litellm`, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest
from client_world import (
    ASK,
    FORMAT,
    LONG,
    MESSAGES,
    NAMED,
    NO_SPACE,
    TOKENIZER,
    TOOLS,
    a_stop,
    offline,
    offline_call,
    offline_json,
    offline_logprobs,
)
from server_world import NAME, Running, make_llm

from outrider.core.sampling import SamplingParams

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # importing it would fetch prices
litellm: Any = pytest.importorskip("litellm", reason="litellm is not installed here: make test-clients")


def options(served: Running, **more: Any) -> dict[str, Any]:
    to = {"model": f"openai/{NAME}", "api_base": f"{served.url}/v1", "api_key": "none", "num_retries": 0, "timeout": 30}
    return to | ASK | more


def ask(served: Running, **more: Any) -> Any:
    return litellm.completion(**options(served, **more))


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_a_whole_chat(served: Running, provider: str):
    answer, wanted = ask(served, model=f"{provider}/{NAME}"), offline()
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage.completion_tokens == len(wanted.tokens)
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode_chat(MESSAGES))


def test_a_streamed_chat_and_its_usage(served: Running):
    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}))
    wanted = offline()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].finish_reason == wanted.finish_reason
    assert whole.usage.completion_tokens == len(wanted.tokens)


def test_two_choices(served: Running):
    wanted = offline(n=2)
    told = [choice.message.content for choice in ask(served, n=2).choices]
    assert told == [wanted.text, wanted.others[0].text]


def test_a_stop_string(served: Running):
    stop, text = a_stop(), offline().text
    (choice,) = ask(served, stop=[stop]).choices
    assert (choice.message.content, choice.finish_reason) == (text[: text.index(stop)], "stop")


def test_logprobs(served: Running):
    told = ask(served, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    wanted = offline_logprobs(3)
    assert [bytes(each.bytes) for each in told] == [token for token, _, _ in wanted]
    assert [each.logprob for each in told] == pytest.approx([logprob for _, logprob, _ in wanted], abs=1e-5)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(served: Running, choice: Any):
    more = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 100}
    streamed = litellm.stream_chunk_builder(list(ask(served, stream=True, **more)))
    for answer in (ask(served, **more), streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == offline_call(choice)
        assert answer.choices[0].finish_reason == "tool_calls"


def test_a_json_schema(served: Running):
    answer = ask(served, response_format=FORMAT, max_tokens=100, logit_bias=NO_SPACE)
    assert json.loads(answer.choices[0].message.content) == offline_json()


def test_async_whole_and_streamed(served: Running):
    async def read() -> tuple[str, str]:
        whole = await litellm.acompletion(**options(served))
        stream = await litellm.acompletion(**options(served, stream=True))
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return whole.choices[0].message.content, "".join(pieces)

    assert asyncio.run(read()) == (offline().text,) * 2


def test_responses(served: Running):
    to = {"model": f"openai/{NAME}", "api_base": f"{served.url}/v1", "api_key": "none"}
    answer = litellm.responses(**to, input=MESSAGES, temperature=0, max_output_tokens=24)
    (item,) = answer.output
    assert item.content[0].text == offline(temperature=0).text


def test_plain_completions(served: Running):
    to = {"model": f"text-completion-openai/{NAME}", "api_base": f"{served.url}/v1", "api_key": "none"}
    answer = litellm.text_completion(**to, prompt="the sea", max_tokens=8, temperature=0)
    assert answer.choices[0].text == make_llm(drafter="none").generate("the sea", SamplingParams(max_tokens=8)).text


def test_errors(served: Running):
    with pytest.raises(litellm.NotFoundError, match="gpt-4"):
        ask(served, model="openai/gpt-4")
    with pytest.raises(litellm.ContextWindowExceededError, match="256"):
        ask(served, messages=[{"role": "user", "content": LONG}])
