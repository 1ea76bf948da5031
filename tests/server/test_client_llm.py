"""The `llm` tool, told of the server in its extra-openai-models.yaml; judged by the offline engine.

It has no word for n, tool_choice or prediction, and no way to leave a stream but to end, so those cases are not
here; logprobs it knows for plain completions only.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Literal

import llm
import llm.cli
import pytest
from click.testing import CliRunner, Result
from client_world import (
    CONTEXT,
    LOGPROB_ERROR,
    LONG,
    MAX_TOKENS,
    MESSAGES,
    NO_SPACE,
    PARAMETERS,
    SEED,
    TEMPERATURE,
    TOKENIZER,
    VLLM,
    Served,
    a_stop,
    expect_json,
    expect_seeded,
    judge,
    offline,
    told_length,
)
from server_world import NAME

from outrider.core.sampling import SamplingParams
from outrider.grammar import tool_constraint

SYSTEM, PROMPT = (message["content"] for message in MESSAGES)
MODELS = """
- model_id: outrider
  model_name: {name}
  api_base: "{url}/v1"
  supports_schema: true
  supports_tools: true
- model_id: outrider-plain
  model_name: {name}
  api_base: "{url}/v1"
  completion: true
- model_id: outrider-wrong
  model_name: gpt-4
  api_base: "{url}/v1"
"""


@pytest.fixture
def tool(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    """The command line, with a folder of its own."""
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(name=NAME, url=served.url))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    return CliRunner()


def run(tool: CliRunner, *words: str) -> Result:
    return tool.invoke(llm.cli.cli, words, catch_exceptions=True)


def ask(
    tool: CliRunner, *words: str, seed: int = SEED, most: int = MAX_TOKENS, temperature: float = TEMPERATURE
) -> Result:
    options = ["-o", "seed", str(seed), "-o", "max_tokens", str(most), "-o", "temperature", str(temperature)]
    done = run(tool, "prompt", "-m", "outrider", "-s", SYSTEM, PROMPT, *options, *words)
    assert done.exit_code == 0, done.output
    return done


def test_models(tool: CliRunner):
    assert "OpenAI Chat: outrider\n" in run(tool, "models").output


def test_a_whole_chat(tool: CliRunner):
    assert ask(tool, "--no-stream").output == offline().text + "\n"


def test_a_streamed_chat(tool: CliRunner):
    assert ask(tool).output == offline().text + "\n"


def test_usage_of_a_stream(tool: CliRunner):
    told = ask(tool, "--usage").stderr
    prompt = len(TOKENIZER.encode_chat(MESSAGES))
    assert f"{prompt} input, {len(offline().tokens)} output" in told


def test_the_same_seed_gives_the_same_text(tool: CliRunner):
    told = (ask(tool, seed=seed, temperature=1).output for seed in (SEED, SEED, SEED + 1))
    expect_seeded(*(text.removesuffix("\n") for text in told))


def test_a_stop_string(tool: CliRunner):
    stop, text = a_stop(), offline().text
    assert ask(tool, "-o", "stop", stop).output == text[: text.index(stop)] + "\n"


def test_a_json_schema(tool: CliRunner):
    schema = json.dumps(PARAMETERS)
    told = ask(tool, "--schema", schema, "-o", "logit_bias", json.dumps(NO_SPACE), most=100).output
    expect_json(json.loads(told))


def test_a_conversation_goes_on(tool: CliRunner):
    ask(tool)
    options = ["-o", "seed", "5", "-o", "max_tokens", "9", "-o", "temperature", str(TEMPERATURE)]
    told = run(tool, "prompt", "--continue", "and of the sky", *options)
    earlier = [*MESSAGES, {"role": "assistant", "content": offline().text}]
    wanted = offline([*earlier, {"role": "user", "content": "and of the sky"}], seed=5, max_tokens=9)
    assert told.output == wanted.text + "\n"


def look(at: Literal["sea", "sky"]) -> str:
    """Look somewhere."""
    return f"the {at} is blue"


def test_tools(tool: CliRunner):
    """tool_choice cannot be set, so the model is free to call or not: a bias makes it begin a call, and end it.

    vLLM's parser reads a call after a word that no bias makes the model write; there it writes text.
    """
    bias = {} if VLLM else {ord("{"): 100, ord("}"): 50}
    offered = llm.Tool.function(look)
    function = {"name": offered.name, "parameters": offered.input_schema}
    constraint, _ = tool_constraint([{"type": "function", "function": function}], "auto", TOKENIZER)
    wanted = offline(constraint=constraint, temperature=0, max_tokens=80, logit_bias=bias)
    model: Any = llm.get_model("outrider")
    options = {"temperature": 0, "max_tokens": 80, "logit_bias": bias}
    for stream in (False, True):
        answer = model.prompt(PROMPT, system=SYSTEM, tools=[look], stream=stream, **options)
        if VLLM:
            assert not answer.tool_calls()
            assert answer.text() == offline(temperature=0, max_tokens=80, logit_bias=bias).text
            continue
        (call,) = answer.tool_calls()
        assert {"name": call.name, "arguments": call.arguments} == json.loads(wanted.text)
        (result,) = answer.execute_tool_calls()
        assert result.output == f"the {call.arguments['at']} is blue"


def test_errors(tool: CliRunner):
    wrong = run(tool, "prompt", "-m", "outrider-wrong", "hi")
    assert wrong.exit_code == 1
    assert "'gpt-4' does not exist" in wrong.output
    long = run(tool, "prompt", "-m", "outrider", LONG)
    assert long.exit_code == 1
    assert str(CONTEXT) in long.output
    assert told_length([{"role": "user", "content": LONG}]) in long.output


def test_async(tool: CliRunner):
    async def read() -> str:
        model: Any = llm.get_async_model("outrider")
        answer = model.prompt(PROMPT, system=SYSTEM, seed=SEED, max_tokens=MAX_TOKENS, temperature=TEMPERATURE)
        return "".join([piece async for piece in answer])

    assert asyncio.run(read()) == offline().text


def test_plain_completions_with_logprobs(tool: CliRunner):
    model: Any = llm.get_model("outrider-plain")
    answer = model.prompt("the sea", seed=SEED, max_tokens=8, temperature=0, logprobs=2, stream=False)
    wanted = judge().generate("the sea", SamplingParams(max_tokens=8, logprobs=2))
    assert answer.text() == wanted.text
    scores = answer.response_json["choices"][0]["logprobs"]
    assert scores["token_logprobs"] == pytest.approx([each.logprob for each in wanted.logprobs], abs=LOGPROB_ERROR)
    best = [max(each.values()) for each in scores["top_logprobs"]]
    assert best == pytest.approx([each.top[0][1] for each in wanted.logprobs], abs=LOGPROB_ERROR)
