"""Structured output that cannot be used against the server or its other clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from server_world import Running

from outrider.grammar import compile as compiling

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "x"}]
KEYS = ("first-key", "second-key")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def ask(running: Running, key: str, response_format: dict[str, Any], **more: Any) -> httpx.Response:
    body = {"messages": HELLO, "max_tokens": 40, "response_format": response_format, **more}
    return httpx.post(running.url + CHAT, json=body, headers={"authorization": f"Bearer {key or '-'}"}, timeout=60)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_one_keys_endless_schemas_are_refused_and_keep_nobody_waiting(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
):
    """Four of these 60 bytes kept every key from structured output, and took 3 GB in four minutes."""
    monkeypatch.setattr(compiling, "MAX_COMPILE_SECONDS", 0.5)
    running = serve(api_keys=KEYS)
    fine = {"type": "regex", "regex": "ab"}
    assert ask(running, KEYS[1], fine).status_code == 200
    before, threads = resident(), threading.active_count()
    with ThreadPoolExecutor(8) as pool:
        schemas = [{"type": "integer", "multipleOf": 100_000_007 + 2 * i} for i in range(8)]
        evil = [pool.submit(ask, running, KEYS[0], json_schema(schema)) for schema in schemas]
        time.sleep(0.2)
        answer = ask(running, KEYS[1], {"type": "regex", "regex": "cd"})
        assert answer.json()["choices"][0]["message"]["content"] == "cd"
        assert not all(each.done() for each in evil)  # it came in turn, not last
        for each in evil:
            refused = each.result()
            assert refused.status_code == 400
            assert "took more than" in refused.json()["error"]["message"]
    assert resident() - before < 64 << 20
    assert threading.active_count() <= threads + 8  # threads of pools that are kept


def test_a_refusal_for_lack_of_slots_says_when_to_try_again(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
):
    slots = threading.BoundedSemaphore(1)
    monkeypatch.setattr(compiling, "_compile_slots", slots)
    monkeypatch.setattr(compiling, "MAX_WAIT_SECONDS", 0.05)
    running = serve()
    fine = {"type": "regex", "regex": "ab"}
    with slots:
        busy = ask(running, "", fine)
    assert busy.status_code == 503
    assert busy.json()["error"]["code"] == "compiler_unavailable"
    assert int(busy.headers["retry-after"]) >= 1
    assert ask(running, "", fine).status_code == 200


def test_no_key_and_no_salt_profits_from_anothers_grammar(
    serve: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
):
    """15 ms against 120 ms told one key which schema another had used."""
    made: list[str] = []
    original = compiling._compile
    monkeypatch.setattr(compiling, "_compile", lambda spec, vocabulary: made.append("") or original(spec, vocabulary))
    running = serve(api_keys=KEYS)
    given = json_schema(CITY)

    def compiled(key: str, **more: Any) -> int:
        made.clear()
        assert ask(running, key, given, **more).status_code == 200
        return len(made)

    assert [compiled(KEYS[0]), compiled(KEYS[1]), compiled(KEYS[0])] == [1, 1, 0]
    assert [compiled(KEYS[0], cache_salt="a"), compiled(KEYS[0], cache_salt="a"), compiled(KEYS[0])] == [1, 0, 0]
    assert [compiled(KEYS[0], tools=[WEATHER]), compiled(KEYS[1], tools=[WEATHER])] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_together_with_a_response_format(served: Running, stream: bool):
    """A call of a tool, or an answer that matches: what agents ask for. With a tool asked for, a call."""
    seen: set[str] = set()
    for seed in range(12):
        message = _message(served, seed, stream, response_format=json_schema(CITY), tools=[WEATHER])
        calls = message.get("tool_calls") or []
        seen.add("call" if calls else "answer")
        for text in [each["function"]["arguments"] for each in calls] or [message["content"]]:
            jsonschema.validate(json.loads(text), CITY)
    assert seen == {"call", "answer"}
    named = _message(served, 1, stream, response_format=json_schema(CITY), tools=[WEATHER], tool_choice="required")
    assert named["tool_calls"][0]["function"]["name"] == "weather"
    letters = {"type": "regex", "regex": "ab"}
    none = _message(served, 1, stream, response_format=letters, tools=[WEATHER], tool_choice="none")
    assert (none["content"], none.get("tool_calls") or []) == ("ab", [])


def _message(running: Running, seed: int, stream: bool, **more: Any) -> dict[str, Any]:
    body = {"messages": HELLO, "max_tokens": 200, "temperature": 2.0, "seed": seed, **more}
    if not stream:
        return running.post(CHAT, **body).json()["choices"][0]["message"]
    content, calls = "", []
    for line in running.post(CHAT, stream=True, **body).text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            content += choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls", []):
                calls += [{"function": {"name": call["function"].get("name"), "arguments": ""}}] if "id" in call else []
                calls[-1]["function"]["arguments"] += call["function"].get("arguments", "")
    return {"content": content, "tool_calls": calls}


def test_a_refusal_names_the_tool_and_not_the_grammar(served: Running):
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"not": {}}}}}}
    refused = served.post(CHAT, messages=HELLO, tools=[WEATHER, bad])
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == (
        "tool bad: the JSON schema uses not, which cannot be enforced here; leave it out"
    )
