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
    ENDLESS,
    FORMAT,
    LONG,
    LONG_TOKENS,
    MESSAGES,
    NAMED,
    NO_SPACE,
    SEED,
    TOKENIZER,
    TOOLS,
    Serve,
    a_stop,
    offline,
    offline_call,
    offline_json,
    offline_logprobs,
    watched,
)
from openai import AsyncOpenAI
from server_world import NAME, Running


def ask(running: Running, what: Callable[[AsyncOpenAI], Awaitable[Any]]) -> Any:
    """Run what is asked with a client of its own, in a loop of its own."""

    async def run() -> Any:
        async with AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
            return await what(client)

    return asyncio.run(run())


def chat(running: Running, **more: Any) -> Any:
    return ask(running, lambda client: client.chat.completions.create(model=NAME, **ASK | more))


def stream(running: Running, **more: Any) -> list[Any]:
    async def read(client: AsyncOpenAI) -> list[Any]:
        chunks: Any = await client.chat.completions.create(model=NAME, stream=True, **ASK | more)
        return [chunk async for chunk in chunks]

    return ask(running, read)


def test_models(served: Running):
    async def names(client: AsyncOpenAI) -> list[str]:
        return [model.id async for model in client.models.list()]

    assert ask(served, names) == [NAME]


def test_a_whole_chat_token_by_token(served: Running):
    answer, wanted = chat(served, extra_body={"include_provenance": True}), offline()
    assert answer.choices[0].message.content == wanted.text
    assert tuple(each["token_id"] for each in answer.choices[0].provenance) == wanted.tokens


def test_a_streamed_chat(served: Running):
    chunks, wanted = stream(served), offline()
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted.text
    assert chunks[-1].choices[0].finish_reason == wanted.finish_reason


def test_usage_in_a_stream(served: Running):
    *chunks, last = stream(served, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == len(offline().tokens)
    assert last.usage.prompt_tokens == len(TOKENIZER.encode_chat(MESSAGES))


def test_two_choices(served: Running):
    wanted = offline(n=2)
    told = [choice.message.content for choice in chat(served, n=2).choices]
    assert told == [wanted.text, wanted.others[0].text]


def test_many_at_once_with_seeds_of_their_own(served: Running):
    """Sixteen requests share the batch, and each gets the text it would get alone."""
    seeds = [*range(SEED, SEED + 8), *range(SEED, SEED + 8)]

    async def all_of_them(client: AsyncOpenAI) -> list[Any]:
        asks: list[dict[str, Any]] = [ASK | {"seed": seed} for seed in seeds]
        return await asyncio.gather(*(client.chat.completions.create(model=NAME, **each) for each in asks))

    texts = [answer.choices[0].message.content for answer in ask(served, all_of_them)]
    assert texts[:8] == texts[8:] == [offline(seed=seed).text for seed in seeds[:8]]


def test_a_stop_string(served: Running):
    stop, text = a_stop(), offline().text
    chunks = stream(served, stop=stop)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs(served: Running):
    chunks = stream(served, logprobs=True, top_logprobs=3)
    told = [each for chunk in chunks if (scores := chunk.choices[0].logprobs) for each in scores.content]
    wanted = offline_logprobs(3)
    assert [bytes(each.bytes) for each in told] == [token for token, _, _ in wanted]
    assert [each.logprob for each in told] == pytest.approx([logprob for _, logprob, _ in wanted], abs=1e-5)
    for each, (_, _, top) in zip(told, wanted, strict=True):
        assert [other.logprob for other in each.top_logprobs] == pytest.approx(top, abs=1e-5)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_tools(served: Running, choice: Any):
    answer = chat(served, tools=TOOLS, tool_choice=choice, max_tokens=100).choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == offline_call(choice)


def test_a_json_schema(served: Running):
    answer = chat(served, response_format=FORMAT, max_tokens=100, logit_bias=NO_SPACE)
    assert json.loads(answer.choices[0].message.content) == offline_json()


def test_errors(served: Running):
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(served, lambda client: client.chat.completions.create(model="gpt-4", messages=MESSAGES))
    assert unknown.value.code == "model_not_found"
    long_messages = [{"role": "user", "content": LONG}]
    with pytest.raises(openai.BadRequestError) as long:
        chat(served, messages=long_messages, stream=True)
    assert long.value.code == "context_length_exceeded"
    assert "256" in long.value.message
    assert str(len(TOKENIZER.encode_chat(long_messages))) in long.value.message


@pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "whole"])
def test_a_cancelled_task_frees_the_request(serve: Serve, streamed: bool):
    server = watched(serve)

    async def leave(client: AsyncOpenAI) -> None:
        asked = ASK | {"max_tokens": LONG_TOKENS, "logit_bias": ENDLESS}
        task = asyncio.create_task(_read(client, asked, streamed))
        await asyncio.to_thread(server.running.target.entered.wait, 20)  # the model has begun
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ask(server.running, leave)
    server.expect_cancelled()


async def _read(client: AsyncOpenAI, asked: dict[str, Any], streamed: bool) -> None:
    answer: Any = await client.chat.completions.create(model=NAME, **asked, stream=streamed)
    async for _ in answer:
        pass


def test_a_prediction_is_counted(served: Running):
    wanted = offline()
    answer = chat(served, prediction={"type": "content", "content": wanted.text})
    assert answer.choices[0].message.content == wanted.text
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens > len(wanted.text) // 2
