"""`openai-agents`, unchanged, against a running server; judged by the offline engine."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from client_world import (
    MAX_TOKENS,
    MESSAGES,
    NO_SPACE,
    SEED,
    TEMPERATURE,
    TIMEOUT,
    TOKENIZER,
    VLLM,
    Served,
    expect_call,
    expect_json,
    offline,
    one_tool,
)
from pydantic import BaseModel
from server_world import NAME

pytest.importorskip("agents", reason="openai-agents is not installed here: make test-clients")

from agents import (
    Agent,
    AgentOutputSchema,
    ModelBehaviorError,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
)
from openai.types.responses import ResponseTextDeltaEvent

SYSTEM, PROMPT = (message["content"] for message in MESSAGES)
UNTRACED = RunConfig(tracing_disabled=True)  # traces would go to OpenAI
MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


class Glance(BaseModel, extra="forbid"):
    """A look at something."""

    at: Literal["sea", "sky"]
    times: Literal[1, 2, 3]


@function_tool
def look(at: Literal["sea", "sky"], times: Literal[1, 2, 3]) -> str:
    """Look somewhere."""
    return f"{at} {times}"


def make_agent(served: Served, api: str = "chat", name: str = NAME, **more: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT)
    chosen = {"temperature": 0.0, "max_tokens": MAX_TOKENS} | more.pop("settings", {})
    model: Any = MODELS[api](model=name, openai_client=client)
    return Agent("sailor", instructions=SYSTEM, model=model, model_settings=ModelSettings(**chosen), **more)


def run(agent: Agent[Any], asked: Any = PROMPT) -> Any:
    return asyncio.run(Runner.run(agent, asked, run_config=UNTRACED))


async def deltas(agent: Agent[Any]) -> tuple[list[str], Any]:
    """The pieces of text of a stream, and its final output, or the error it ended with."""
    streamed, pieces = Runner.run_streamed(agent, PROMPT, run_config=UNTRACED), list[str]()
    try:
        async for event in streamed.stream_events():
            if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent):
                pieces.append(event.data.delta)
    except ModelBehaviorError as error:
        return pieces, error
    return pieces, streamed.final_output


@pytest.mark.parametrize("api", MODELS)
def test_a_whole_chat(served: Served, api: str):
    told, wanted = run(make_agent(served, api)), offline(temperature=0)
    assert told.final_output == wanted.text
    (answer,) = told.raw_responses
    assert answer.usage.output_tokens == len(wanted.tokens)
    assert answer.usage.input_tokens == len(TOKENIZER.encode_chat(MESSAGES))


@pytest.mark.parametrize("api", MODELS)
def test_a_streamed_chat(served: Served, api: str):
    """A text that is cut off is an error to this client where it streams responses, and none otherwise.

    vLLM says that such a response is complete.
    """
    pieces, final = asyncio.run(deltas(make_agent(served, api)))
    wanted = offline(temperature=0)
    assert wanted.finish_reason == "length"
    assert "".join(pieces) == wanted.text
    assert len(pieces) > 2
    assert "max_output_tokens" in str(final) if api == "responses" and not VLLM else final == wanted.text


def test_a_seed(served: Served):
    settings = {"temperature": TEMPERATURE, "extra_args": {"seed": SEED}}
    assert run(make_agent(served, settings=settings)).final_output == offline().text


@pytest.mark.parametrize("api", MODELS)
def test_a_conversation_goes_on(served: Served, api: str):
    first = run(make_agent(served, api))
    second = run(make_agent(served, api), [*first.to_input_list(), {"role": "user", "content": "and of the sky"}])
    text = offline(temperature=0).text
    turns = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "and of the sky"}]
    assert second.final_output == offline(turns, temperature=0).text


def test_a_structured_answer(served: Served):
    settings = {"temperature": TEMPERATURE, "max_tokens": 100, "extra_args": {"seed": SEED, "logit_bias": NO_SPACE}}
    told = run(make_agent(served, settings=settings, output_type=AgentOutputSchema(Glance)))
    expect_json(told.final_output.model_dump())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", MODELS)
def test_a_tool_is_called_and_run(served: Served, api: str, streamed: bool):
    settings = {"max_tokens": 100, "tool_choice": "required"}
    more: Any = {"tools": [look], "tool_use_behavior": "stop_on_first_tool"}
    agent = make_agent(served, api, settings=settings, **more)
    told = asyncio.run(deltas(agent))[1] if streamed else run(agent).final_output
    at, times = told.split()
    expect_call(("look", {"at": at, "times": int(times)}), tools=one_tool("look"), temperature=0)


@pytest.mark.parametrize("api", MODELS)
def test_the_result_of_a_tool_goes_back(served: Served, api: str):
    """After the first call the client lets the model choose, and the toy writes text."""
    settings = {"max_tokens": 100 if VLLM else 60, "tool_choice": "required"}  # vLLM's calls are longer
    told = run(make_agent(served, api, settings=settings, tools=[look]))
    kinds = [item.type for item in told.new_items]
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert told.final_output == told.new_items[-1].raw_item.content[0].text


@pytest.mark.parametrize("api", MODELS)
def test_errors(served: Served, api: str):
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        run(make_agent(served, api, "gpt-4"))
