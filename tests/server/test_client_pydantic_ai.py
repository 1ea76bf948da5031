"""`pydantic-ai`, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from client_world import (
    CONTEXT,
    LONG,
    MAX_TOKENS,
    MESSAGES,
    NO_SPACE,
    PARAMETERS,
    SEED,
    TEMPERATURE,
    TOKENIZER,
    TOOLS,
    Served,
    expect_call,
    expect_json,
    offline,
    one_tool,
)
from pydantic import BaseModel
from server_world import NAME

pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed here: make test-clients")

from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolDefinition, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, SystemPromptPart, ToolCallPart, UserPromptPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

SYSTEM, PROMPT = (message["content"] for message in MESSAGES)


class Glance(BaseModel, extra="forbid"):
    """A look at something."""

    at: Literal["sea", "sky"]
    times: Literal[1, 2, 3]


def make_model(served: Served, name: str = NAME) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="none"))


def settings(**more: Any) -> Any:
    return {"seed": SEED, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE} | more


def make_agent(served: Served, **more: Any) -> Agent[None, Any]:
    return Agent(make_model(served), **{"system_prompt": SYSTEM, "model_settings": settings(), "retries": 0} | more)


def test_a_whole_chat(served: Served):
    told, wanted = make_agent(served).run_sync(PROMPT), offline()
    assert told.output == wanted.text
    assert told.response.usage.output_tokens == len(wanted.tokens)
    assert told.response.usage.input_tokens == len(TOKENIZER.encode_chat(MESSAGES))
    assert told.response.finish_reason == wanted.finish_reason


def test_a_streamed_chat(served: Served):
    async def read() -> tuple[list[str], int]:
        async with make_agent(served).run_stream(PROMPT) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
            return pieces, stream.response.usage.output_tokens

    pieces, tokens = asyncio.run(read())
    assert "".join(pieces) == offline().text
    assert tokens == len(offline().tokens)
    assert len(pieces) > 2


def test_a_conversation_goes_on(served: Served):
    agent = make_agent(served)
    first = agent.run_sync(PROMPT)
    second = agent.run_sync("and of the sky", message_history=first.all_messages(), model_settings=settings(seed=5))
    turns = [*MESSAGES, {"role": "assistant", "content": first.output}, {"role": "user", "content": "and of the sky"}]
    assert second.output == offline(turns, seed=5).text


def test_a_structured_answer_by_a_tool(served: Served):
    agent = make_agent(served, output_type=ToolOutput(Glance, name="glance"), model_settings=settings(max_tokens=100))
    expect_call(("glance", agent.run_sync(PROMPT).output.model_dump()), tools=one_tool("glance"))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_structured_answer_by_a_schema(served: Served, streamed: bool):
    bias = settings(max_tokens=100, logit_bias=NO_SPACE)
    agent = make_agent(served, output_type=NativeOutput(Glance, name="glance"), model_settings=bias)

    async def read() -> Any:
        async with agent.run_stream(PROMPT) as stream:
            return await stream.get_output()

    told = asyncio.run(read()) if streamed else agent.run_sync(PROMPT).output
    expect_json(told.model_dump())


def test_tools(served: Served):
    tools = [
        ToolDefinition(
            name=tool["function"]["name"],
            description=tool["function"]["description"],
            parameters_json_schema=PARAMETERS,
        )
        for tool in TOOLS
    ]
    asked = [ModelRequest(parts=[SystemPromptPart(SYSTEM), UserPromptPart(PROMPT)])]
    forced = ModelRequestParameters(function_tools=tools, allow_text_output=False)
    answer = model_request_sync(
        make_model(served), asked, model_settings=settings(max_tokens=100), model_request_parameters=forced
    )
    (call,) = answer.parts
    assert isinstance(call, ToolCallPart)
    expect_call((call.tool_name, call.args_as_dict()))


def test_responses(served: Served):
    model = OpenAIResponsesModel(NAME, provider=OpenAIProvider(base_url=f"{served.url}/v1", api_key="none"))
    plain: Any = {"max_tokens": MAX_TOKENS, "temperature": 0}
    told = Agent(model, system_prompt=SYSTEM, model_settings=plain).run_sync(PROMPT)
    assert told.output == offline(temperature=0).text


def test_errors(served: Served):
    with pytest.raises(ModelHTTPError) as unknown:
        Agent(make_model(served, "gpt-4")).run_sync(PROMPT)
    assert unknown.value.status_code == 404
    with pytest.raises(ModelHTTPError, match=str(CONTEXT)) as long:
        Agent(make_model(served)).run_sync(LONG)
    assert long.value.status_code == 400
