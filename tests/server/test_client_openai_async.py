"""The async client of the `openai` package, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

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
    TOKENIZER,
    TOOLS,
    VLLM,
    Serve,
    Served,
    a_stop,
    expect_call,
    expect_json,
    expect_two,
    offline,
    offline_logprobs,
    refused,
    told_length,
    watched,
)
from openai import AsyncOpenAI
from server_world import NAME


def ask(running: Served, what: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
    """Run what is asked with a client of its own, in a loop of its own."""

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
            return await what(client)

    return asyncio.run(run())


def chat(running: Served, **more: Any) -> Any:
    return ask(running, lambda client: client.chat.completions.create(model=NAME, **ASK | more))


def stream(running: Served, **more: Any) -> list[Any]:
    async def read(client: AsyncOpenAI) -> list[Any]:
        chunks: Any = await client.chat.completions.create(model=NAME, stream=True, **ASK | more)
        return [chunk async for chunk in chunks]

    return ask(running, read)


def test_models(served: Served):
    async def names(client: AsyncOpenAI) -> list[str]:
        return [model.id async for model in client.models.list()]

    assert ask(served, names) == [NAME]


def test_a_whole_chat(served: Served):
    answer, wanted = chat(served), offline()
    assert answer.choices[0].message.content == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason


def test_where_each_token_comes_from(served: Served):
    more = {"extra_body": {"include_provenance": True}}
    if VLLM:
        with pytest.raises(openai.BadRequestError, match=refused("include_provenance")):
            chat(served, **more)
        return
    assert tuple(each["token_id"] for each in chat(served, **more).choices[0].provenance) == offline().tokens


def test_a_streamed_chat(served: Served):
    chunks, wanted = stream(served), offline()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason


def test_usage_in_a_stream(served: Served):
    *chunks, last = stream(served, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == len(offline().tokens)
    assert last.usage.prompt_tokens == len(TOKENIZER.encode_chat(MESSAGES))


def test_two_choices(served: Served):
    expect_two([choice.message.content for choice in chat(served, n=2, temperature=1).choices])


def test_many_at_once_with_seeds_of_their_own(served: Served):
    """Sixteen requests share the batch, and each gets the text it would get alone."""
    seeds = [*range(SEED, SEED + 8), *range(SEED, SEED + 8)]

    async def all_of_them(client: AsyncOpenAI) -> list[Any]:
        asks: list[dict[str, Any]] = [ASK | {"seed": seed} for seed in seeds]
        return await asyncio.gather(*(client.chat.completions.create(model=NAME, **each) for each in asks))

    texts = [answer.choices[0].message.content for answer in ask(served, all_of_them)]
    assert texts[:8] == texts[8:] == [offline(seed=seed).text for seed in seeds[:8]]


def test_a_stop_string(served: Served):
    stop, text = a_stop(), offline().text
    chunks = stream(served, stop=stop)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs(served: Served):
    chunks = stream(served, logprobs=True, top_logprobs=3)
    told = [each for chunk in chunks if (scores := chunk.choices[0].logprobs) for each in scores.content]
    wanted = offline_logprobs(3)
    assert [bytes(each.bytes) for each in told] == [token for token, _, _ in wanted]
    assert [each.logprob for each in told] == pytest.approx([logprob for _, logprob, _ in wanted], abs=LOGPROB_ERROR)
    for each, (_, _, top) in zip(told, wanted, strict=True):
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(top, abs=LOGPROB_ERROR)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(served: Served, choice: Any):
    answer = chat(served, tools=TOOLS, tool_choice=choice, max_tokens=100).choices[0]
    (call,) = answer.message.tool_calls
    expect_call((call.function.name, json.loads(call.function.arguments)), choice)


def test_a_json_schema(served: Served):
    answer = chat(served, response_format=FORMAT, max_tokens=100, logit_bias=NO_SPACE)
    expect_json(json.loads(answer.choices[0].message.content))


def test_errors(served: Served):
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(served, lambda client: client.chat.completions.create(model="gpt-4", messages=MESSAGES))
    assert unknown.value.code == "model_not_found"
    long_messages = [{"role": "user", "content": LONG}]
    with pytest.raises(openai.BadRequestError) as long:
        chat(served, messages=long_messages, stream=True)
    assert long.value.code == "context_length_exceeded"
    assert str(CONTEXT) in long.value.message
    assert told_length(long_messages) in long.value.message


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_cancelled_task_frees_the_request(serve: Serve, streamed: bool):
    server = watched(serve)

    async def leave(client: AsyncOpenAI) -> None:
        asked = ASK | {"max_tokens": LONG_TOKENS, "logit_bias": ENDLESS}
        task = asyncio.create_task(_read(client, asked, streamed))
        await asyncio.to_thread(server.wait_begun)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ask(server, leave)
    server.expect_cancelled()


async def _read(client: AsyncOpenAI, asked: dict[str, Any], streamed: bool) -> None:
    answer: Any = await client.chat.completions.create(model=NAME, **asked, stream=streamed)
    async for _ in answer:
        pass


def test_a_prediction_is_counted(served: Served):
    wanted = offline()
    if VLLM:
        with pytest.raises(openai.BadRequestError, match=refused("prediction")):
            chat(served, prediction={"type": "content", "content": wanted.text})
        return
    answer = chat(served, prediction={"type": "content", "content": wanted.text})
    assert answer.choices[0].message.content == wanted.text
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > len(wanted.text) // 2
