"""/v1/responses as OpenAI's own client uses it; what it generates is what a chat of the same messages does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel
from server_world import NAME, Running, ToyWriter, make_tokenizer, until

from outrider.engine.events import Event
from outrider.server.openai import response_schema
from outrider.server.openai.responses_output import OutputItems
from outrider.server.openai.token_texts import TokenTexts

Client = Any  # openai.OpenAI, whose overloads take no options as a dict
PROMPT = "tell me of the sea"
PARAMETERS = {
    "type": "object",
    "properties": {"at": {"enum": ["sea", "sky"]}},
    "required": ["at"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": PARAMETERS, "strict": True} for name in ("look", "listen")
]
CHAT_TOOLS = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
TURNS: list[Any] = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
    {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "content": [
        {"type": "output_text", "text": "let me look", "annotations": []}]},
    {"type": "function_call", "call_id": "c1", "id": "fc_1", "name": "look", "arguments": '{"at": "sea"}'},
    {"type": "function_call", "call_id": "c2", "name": "look", "arguments": '{"at": "sky"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "blue"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "grey"}]},
    {"role": "user", "content": "go on"},
]  # fmt: skip
SAME_TURNS = [
    {"role": "system", "content": "be kind"},
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": PROMPT},
    {"role": "assistant", "content": "let me look", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}},
        {"id": "c2", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "blue"},
    {"role": "tool", "tool_call_id": "c2", "content": "grey"},
    {"role": "user", "content": "go on"},
]  # fmt: skip


@pytest.fixture
def client(served: Running) -> Iterator[Client]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def strictly(model: type[BaseModel], answer: BaseModel) -> None:
    """The client's own types hold, none of them made up by its lenient reading."""
    model.model_validate(answer.model_dump(mode="json", exclude_unset=True, by_alias=True))


@pytest.mark.parametrize("given", [{}, {"temperature": 0}, {"top_p": 0.7}, {"extra_body": {"top_k": 3, "stop": "e"}}])
def test_a_string_is_answered_as_a_chat_of_it(served: Running, client: Client, given: dict[str, Any]):
    more = {name: value for name, value in given.items() if name != "extra_body"} | given.get("extra_body", {})
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": PROMPT}]
    chat = served.post("/v1/chat/completions", messages=messages, seed=3, max_tokens=24, **more).json()
    given = given | {"extra_body": {"seed": 3} | given.get("extra_body", {})}
    made = client.responses.create(model=NAME, input=PROMPT, instructions="be kind", max_output_tokens=24, **given)
    strictly(Response, made)
    assert made.output_text == chat["choices"][0]["message"]["content"]
    assert made.id.startswith("resp_")
    assert (made.instructions, made.max_output_tokens, made.tools) == ("be kind", 24, [])
    usage, same = made.usage, chat["usage"]
    assert usage is not None
    assert (usage.input_tokens, usage.output_tokens) == (same["prompt_tokens"], same["completion_tokens"])
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    cut = chat["choices"][0]["finish_reason"] == "length"
    assert made.status == ("incomplete" if cut else "completed")
    assert made.incomplete_details is None or made.incomplete_details.reason == "max_output_tokens"
    assert (made.incomplete_details is not None) == cut


def test_previous_turns_are_sent_as_items(served: Running, client: Client):
    body: dict[str, Any] = {"seed": 4, "tools": CHAT_TOOLS, "tool_choice": "none", "max_tokens": 20}
    chat = served.post("/v1/chat/completions", messages=SAME_TURNS, **body).json()
    made = client.responses.create(
        model=NAME,
        input=TURNS,
        instructions="be kind",
        tools=TOOLS,
        tool_choice="none",
        max_output_tokens=20,
        extra_body={"seed": 4},
    )
    assert made.output_text == chat["choices"][0]["message"]["content"]
    assert made.usage is not None
    assert made.usage.input_tokens == chat["usage"]["prompt_tokens"]
    again = client.responses.create(model=NAME, input=[*TURNS, *made.output, *TURNS[-1:]], max_output_tokens=2)
    assert again.usage is not None
    assert again.usage.input_tokens > made.usage.input_tokens - len("be kind") - 20


def streamed(client: Client, **given: Any) -> tuple[list[Any], Any]:
    events = list(client.responses.create(model=NAME, stream=True, **given))
    for event in events:
        strictly(type(event), event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


def timeless(response: Response) -> dict[str, Any]:
    """The response without what differs each time."""
    out = response.model_dump(mode="json", exclude={"id", "created_at", "metrics"})
    for item in out["output"]:
        item["id"] = item["call_id"] = "X"
    for details in (out["usage"]["input_tokens_details"], out["usage"]["output_tokens_details"]):
        details.clear()
    return out


@pytest.mark.parametrize(
    "given",
    [
        {"input": PROMPT, "max_output_tokens": 24},
        {"input": PROMPT, "max_output_tokens": 1},
        {"input": TURNS, "top_logprobs": 2, "include": ["message.output_text.logprobs"], "max_output_tokens": 12},
        {"input": PROMPT, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 200},
        {"input": PROMPT, "tools": TOOLS, "tool_choice": "required", "max_output_tokens": 50},
        {"input": PROMPT, "tools": TOOLS, "max_output_tokens": 100},
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_is_the_whole_response_in_pieces(client: Client, given: dict[str, Any], seed: int):
    given = given | {"extra_body": {"seed": seed}}
    whole = client.responses.create(model=NAME, **given)
    strictly(Response, whole)
    events, last = streamed(client, **given)
    assert timeless(last) == timeless(whole)
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    texts: dict[int, str] = {}
    logprobs: dict[int, int] = {}
    added, done = [], []
    for event in events:
        if event.type.endswith(".delta"):
            assert event.item_id == added[-1].id
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
            logprobs[event.output_index] = logprobs.get(event.output_index, 0) + len(getattr(event, "logprobs", ()))
        elif event.type == "response.output_item.added":
            assert event.output_index == len(added) == len(done)
            added.append(event.item)
        elif event.type == "response.output_item.done":
            done.append(event.item)
            assert event.item.id == added[-1].id
    assert [item.model_dump() for item in done] == [item.model_dump() for item in last.output]
    for index, item in enumerate(last.output):
        said = item.arguments if item.type == "function_call" else item.content[0].text
        assert texts.get(index, "") == said
        if given.get("top_logprobs"):
            assert logprobs[index] in (len(item.content[0].logprobs), len(item.content[0].logprobs) - 1)  # the end


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_text_and_calls_come_in_the_order_in_which_they_are_written(size: int):
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "%s"}}\n</tool_call>'
    text = f"first {call % 'sea'}\n{call % 'sky'} then <tool_call>no call</tool_call>"
    output = OutputItems(TokenTexts(make_tokenizer()), "hermes")
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    for at, piece in enumerate(pieces):
        list(output.push(Event(0, text=piece, finish="stop" if at == len(pieces) - 1 else None)))
    said = [item.get("arguments") or item["content"][0]["text"] for item in output.items]
    assert said == ["first ", '{"at": "sea"}', '{"at": "sky"}', " then <tool_call>no call</tool_call>"]
    assert {item["status"] for item in output.items} == {"completed"}


def test_log_probabilities_are_those_of_the_chat(served: Running, client: Client):
    messages = [{"role": "user", "content": PROMPT}]
    body = {"messages": messages, "seed": 3, "max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    chat = served.post("/v1/chat/completions", **body).json()["choices"][0]
    made = client.responses.create(
        model=NAME, input=PROMPT, max_output_tokens=8, top_logprobs=2, extra_body={"seed": 3}
    ).model_dump(mode="json")
    assert made["output"][0]["content"][0]["logprobs"] == chat["logprobs"]["content"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"look", "listen"}),
        ({"type": "function", "name": "listen"}, {"listen"}),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}, {"look"}),
    ],
)
def test_functions_are_called(client: Client, choice: Any, names: set[str]):
    called: set[str] = set()
    for seed in range(5):
        made = client.responses.create(
            model=NAME, input=PROMPT, tools=TOOLS, tool_choice=choice, extra_body={"seed": seed}
        )
        strictly(Response, made)
        assert made.status == "completed"
        assert made.model_dump()["tool_choice"] == choice
        for item in made.output:
            assert item.type == "function_call"
            assert json.loads(item.arguments)["at"] in ("sea", "sky")
            assert item.call_id
            called.add(item.name)
    assert called == names


class Sight(BaseModel):
    at: str
    far: bool


def test_text_of_a_schema_whole_streamed_and_parsed(client: Client):
    schema = {
        "type": "object",
        "properties": {"at": {"enum": ["sea", "sky"]}, "far": {"type": "boolean"}},
        "required": ["at", "far"],
        "additionalProperties": False,
    }
    wanted: Any = {"format": {"type": "json_schema", "name": "sight", "schema": schema, "strict": True}}
    extra = {"seed": 1, "banned_token_ids": list(b" \n")}  # the toy likes them, and JSON allows any number
    made = client.responses.create(model=NAME, input=PROMPT, text=wanted, extra_body=extra)
    strictly(Response, made)
    assert Sight.model_validate_json(made.output_text).at in ("sea", "sky")
    assert made.text is not None
    assert made.text.model_dump(by_alias=True, exclude_none=True) == wanted
    _, last = streamed(client, input=PROMPT, text=wanted, extra_body=extra)
    assert last.output_text == made.output_text
    with client.responses.stream(model=NAME, input=PROMPT, text=wanted, extra_body=extra) as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == made.output_text


def test_metrics_and_provenance_are_there(served: Running, client: Client):
    extra = {"include_provenance": True, "prediction": {"type": "content", "content": "the sea the sea"}, "seed": 1}
    made = client.responses.create(model=NAME, input=PROMPT, max_output_tokens=20, extra_body=extra)
    body = made.model_dump()
    assert body["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert "".join(token["token"] for token in body["provenance"]) == made.output_text
    answer = served.post("/v1/responses", input=PROMPT, max_output_tokens=20, **extra)
    response_schema.ResponseObject.model_validate(answer.json(), strict=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("previous_response_id", "resp_1"),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("store", True),
        ("background", True),
    ],
)
def test_what_would_have_to_be_stored_is_refused_by_name(client: Client, name: str, value: Any):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=NAME, input=PROMPT, **{name: value})
    assert caught.value.param == name
    assert "stored here" in caught.value.message
    for allowed in (None, False) if name in ("store", "background") else (None,):
        client.responses.create(model=NAME, input=PROMPT, max_output_tokens=1, **{name: allowed})


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "input", "required"),
        ({"input": []}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "sent whole"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0", "an item is a message"),
        ({"input": [{"type": ["message"]}]}, "input.0", "an item is a message"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input.0", "developer"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1:1/"}]}]},
         "input.0", "text alone"),
        ({"input": [*TURNS, {"role": "user"}]}, f"input.{len(TURNS)}", "required"),
        ({"input": [*TURNS, {"role": "user", "content": 5}]}, f"input.{len(TURNS)}", "valid list"),
        ({"input": 5}, "input", "valid list"),
        ({"input": "a" * 300}, "input", "maximum context length"),
        ({"input": "a", "n": 2}, "n", "one output"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools", "'web_search' is not offered"),
        ({"input": "a", "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"input": "a", "text": {"format": {"type": "json_schema", "schema": {"type": "what"}}}}, None, ""),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"}] * 129}, "input", "128"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", "greater"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_400_that_says_why(served: Running, body: Any, param: str | None, says: str):
    answer = served.post("/v1/responses", **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert param is None or error["param"] == param
    assert says in error["message"]


def test_fields_without_effect_are_named(served: Running):
    body = {"input": "a", "max_output_tokens": 2, "truncation": "disabled", "store": False, "service_tier": "auto"}
    assert "x-outrider-ignored" not in served.post("/v1/responses", **body).headers
    body |= {"truncation": "auto", "text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"]}
    named = served.post("/v1/responses", **body, reasoning={"effort": "low"}, max_tokens=3).headers
    assert named["x-outrider-ignored"] == "include, max_tokens, reasoning, text.verbosity, truncation"


def test_the_events_as_sent(served: Running):
    body = {"input": "a", "max_output_tokens": 2, "seed": 1, "stream": True}
    with served.http.stream("POST", "/v1/responses", json=body) as answer:
        raw = answer.read().decode()
    events = raw.removesuffix("\n\n").split("\n\n")
    for event in events:
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
    assert events[-1].startswith("event: response.incomplete\n")


def test_a_stream_that_fails_says_so(serve: Any):
    target = ToyWriter()
    target.poison = ord("z")
    running = serve(target)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        last: Any = list(client.responses.create(model=NAME, input="z", stream=True))[-1]
    assert last.type == "error"
    assert last.code == "model_error"


def test_a_client_that_leaves_frees_the_pages(served: Running):
    with served.http.stream("POST", "/v1/responses", json={"input": PROMPT, "stream": True}) as answer:
        assert next(answer.iter_text())
    until(lambda: served.engine_thread.snapshot().pages_used == 0)
