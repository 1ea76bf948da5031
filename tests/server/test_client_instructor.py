"""`instructor`, unchanged, against a running server; judged by the offline engine.

Its modes JSON and MD_JSON put the schema in the prompt and leave the model to keep to it, which a toy does not.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from client_world import (
    ASK,
    MESSAGES,
    NO_SPACE,
    TIMEOUT,
    VLLM,
    Serve,
    Served,
    expect_call,
    expect_json,
    offline_call,
    one_tool,
)
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, field_validator
from server_world import NAME, ToyWriter

instructor: Any = pytest.importorskip("instructor", reason="instructor is not installed here: make test-clients")


class Glance(BaseModel, extra="forbid"):
    """A look at something."""

    at: Literal["sea", "sky"]
    times: Literal[1, 2, 3]


OPTIONS: dict[str, Any] = ASK | {"model": NAME, "max_tokens": 100, "response_model": Glance, "max_retries": 0}
CALL: Any = {"type": "function", "function": {"name": "Glance"}}
MODES = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"]


def expect(told: Glance, mode: str) -> None:
    if mode == "JSON_SCHEMA":
        expect_json(told.model_dump())
    else:
        expect_call(("Glance", told.model_dump()), CALL, one_tool("Glance"))


def bias(mode: str) -> dict[str, Any]:
    return {"logit_bias": NO_SPACE} if mode == "JSON_SCHEMA" else {}


def make_client(served: Served, mode: str) -> Any:
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
    return instructor.from_openai(client, mode=instructor.Mode[mode])


@pytest.mark.parametrize("mode", MODES)
def test_a_structured_answer(served: Served, mode: str):
    told, raw = make_client(served, mode).create_with_completion(**OPTIONS, **bias(mode))
    expect(told, mode)
    assert raw.usage.completion_tokens > 0


@pytest.mark.parametrize("mode", MODES)
def test_a_structured_answer_as_it_grows(served: Served, mode: str):
    told = list(make_client(served, mode).create_partial(**OPTIONS, **bias(mode)))
    expect(told[-1], mode)
    assert any(each.times is None for each in told)  # it came in pieces


@pytest.mark.parametrize("mode", MODES)
def test_async(served: Served, mode: str):
    async def ask() -> Any:
        async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT) as client:
            made = instructor.from_openai(client, mode=instructor.Mode[mode])
            return await made.create(**OPTIONS, **bias(mode))

    expect(asyncio.run(ask()), mode)


def test_responses(served: Served):
    client = make_client(served, "RESPONSES_TOOLS")
    more = {"temperature": 0, "max_output_tokens": 100, "max_retries": 0}
    told = client.create(model=NAME, messages=MESSAGES, response_model=Glance, **more)
    expect_call(("Glance", told.model_dump()), CALL, one_tool("Glance"), temperature=0)


def test_an_answer_that_is_not_valid_is_asked_for_again(serve: Serve):
    """The second request holds the call that was refused and why: roles `assistant`, with tool calls, and `tool`."""
    running = serve() if VLLM else serve(ToyWriter(context=4096))
    refused: list[str] = []

    class Second(Glance):
        @field_validator("at")
        @classmethod
        def _refuse_once(cls, value: str) -> str:
            if not refused:
                refused.append(value)
                raise ValueError("look again")
            return value

    client = make_client(running, "TOOLS")
    told, raw = client.create_with_completion(**OPTIONS | {"response_model": Second, "max_retries": 1})
    assert len(refused) == 1
    if not VLLM:
        assert refused == [offline_call(CALL, one_tool("Glance"))[1]["at"]]
    assert told.at in ("sea", "sky")
    assert raw.usage.prompt_tokens > 0
