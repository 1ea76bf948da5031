"""npm's `ai` with `@ai-sdk/openai-compatible`, unchanged, against a running server; judged by the offline engine.

npm installs them as it does `openai`: see test_client_npm.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
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
    TIMEOUT,
    TOKENIZER,
    VLLM,
    Served,
    expect_call,
    expect_json,
    offline,
    one_tool,
)
from server_world import NAME
from test_client_npm import CLIENTS, installed, node_of

__all__ = ["installed"]  # the fixture
RECORD_BIAS = (
    {} if VLLM else NO_SPACE | {"9": -100, "13": -100, str(ord('"')): 60, str(ord("}")): 10}
)  # entries, and an end to them


@pytest.fixture(scope="module")
def told(installed: Path, served: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the client was answered, case by case."""
    folder = tmp_path_factory.mktemp("ai-sdk")
    (folder / "node_modules").symlink_to(installed / "node_modules")
    shutil.copy(CLIENTS / "ai_sdk.mjs", folder)
    system, prompt = (message["content"] for message in MESSAGES)
    given = {"url": f"{served.url}/v1", "model": NAME, "system": system, "prompt": prompt, "seed": SEED}
    given |= {
        "temperature": TEMPERATURE,
        "max_tokens": MAX_TOKENS,
        "parameters": PARAMETERS,
        "no_space": NO_SPACE,
        "long": LONG,
        "record_bias": RECORD_BIAS,
    }
    command = [node_of(installed), "ai_sdk.mjs"]
    done = subprocess.run(
        command, cwd=folder, input=json.dumps(given), capture_output=True, text=True, timeout=2 * TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_whole_chat(told: dict[str, Any]):
    wanted = offline()
    assert (told["whole"]["text"], told["whole"]["finishReason"]) == (wanted.text, wanted.finish_reason)
    assert told["whole"]["usage"]["outputTokens"] == len(wanted.tokens)
    assert told["whole"]["usage"]["inputTokens"] == len(TOKENIZER.encode_chat(MESSAGES))


def test_a_streamed_chat(told: dict[str, Any]):
    wanted = offline()
    assert "".join(told["streamed"]["pieces"]) == wanted.text
    assert len(told["streamed"]["pieces"]) > 2
    assert told["streamed"]["finishReason"] == wanted.finish_reason
    assert told["streamed"]["usage"]["outputTokens"] == len(wanted.tokens)


@pytest.mark.parametrize("case", ["tool", "named", "tool_streamed"])
def test_tools(told: dict[str, Any], case: str):
    ((name, arguments),) = told[case]["call"]
    expect_call((name, arguments), tools=one_tool("look"))
    assert told[case]["result"] == [f"{arguments['at']} {arguments['times']}"]
    assert told[case]["finish"] == ("stop" if VLLM and case == "named" else "tool-calls")


@pytest.mark.parametrize("case", ["plain", "object_streamed"])
def test_a_structured_answer(told: dict[str, Any], case: str):
    expect_json(told[case])


def expect_empty(told: dict[str, Any]) -> None:
    """vLLM's grammars hold a record neither to its keys nor to having them all, and the model ends it at once."""
    assert told == {} or json.loads(told["text"]) == {}


@pytest.mark.parametrize("case", ["record", "open_record"])
def test_a_record(told: dict[str, Any], case: str):
    """zod writes a record with `propertyNames` and `additionalProperties`."""
    schema = told["schemas"][case]
    if VLLM:
        expect_empty(told[case])
        return
    assert {"propertyNames", "additionalProperties"} <= schema.keys()
    jsonschema.validate(told[case], schema)
    assert told[case]
    bias = {int(token): bias for token, bias in RECORD_BIAS.items()}
    wanted = {"type": "json_schema", "json_schema": {"name": "response", "schema": schema, "strict": True}}
    assert told[case] == json.loads(offline(response_format=wanted, max_tokens=100, logit_bias=bias).text)


def test_a_record_of_named_keys_ends(told: dict[str, Any]):
    """The bias leaves the toy its liking for commas."""
    if VLLM:
        expect_empty(told["comma"])
        return
    jsonschema.validate(told["comma"], told["schemas"]["record"])


def test_errors(told: dict[str, Any]):
    wrong, long = told["wrong_model"], told["too_long"]
    assert (wrong["name"], wrong["status"]) == ("AI_APICallError", 404)
    assert "gpt-4" in wrong["message"]
    assert (long["name"], long["status"]) == ("AI_APICallError", 400)
    assert str(CONTEXT) in long["message"]
