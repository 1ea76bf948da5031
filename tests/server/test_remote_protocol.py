"""Our protocol with vLLM behind it: what it is sent, what clients get, and what is refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
from fake_vllm import PER_POSITION, SPEC, FakeVllm, words_of
from openai import OpenAI
from remote_world import NAME, RemoteRunning, Stream, running_world
from server_world import until

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def remote():
    yield from running_world()


@pytest.fixture(scope="module")
def shared():
    made = running_world()
    yield next(made)()
    next(made, None)


@pytest.fixture
def spoiled(shared: RemoteRunning):
    """The shared server, whose replica may be told to go wrong; it is well again afterwards."""
    until(lambda: shared.states() == ["ready"])
    yield shared
    shared.fake.refuse = shared.fake.spoil = None
    until(lambda: shared.states() == ["ready"])


def test_a_whole_chat_is_the_replica_s_under_our_name(shared: RemoteRunning):
    answer = shared.chat("hello", max_tokens=4).json()
    assert answer["choices"][0]["message"]["content"] == "".join(words_of(MESSAGES, 4))
    assert answer["model"] == NAME
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


def test_a_stream_has_no_usage_unless_it_is_asked_for(shared: RemoteRunning):
    plain = Stream(shared, {"prompt": "hello", "max_tokens": 4}).read()
    assert plain.text == "".join(words_of("hello", 4))
    assert (plain.status, plain.error, plain.broken) == (200, None, False)
    assert all(chunk["choices"] and chunk["model"] == NAME for chunk in plain.chunks)
    told = Stream(shared, {"prompt": "hello", "max_tokens": 4, "stream_options": {"include_usage": True}}).read()
    assert told.text == plain.text
    assert told.chunks[-1]["usage"]["completion_tokens"] == 4
    assert told.chunks[-1]["choices"] == []


def test_obfuscated_chunks_hide_their_length(shared: RemoteRunning):
    body = {"prompt": "hello", "max_tokens": 4, "stream_options": {"include_obfuscation": True}}
    stream = Stream(shared, body).read()
    assert {len(line.removeprefix("data: ")) % 512 for line in stream.lines[:-1]} == {0}
    assert stream.text == "".join(words_of("hello", 4))


def test_the_replica_is_told_our_defaults_and_never_the_model_s(shared: RemoteRunning):
    shared.chat("hello", max_tokens=9, max_completion_tokens=4, top_k=-1, nonsense=1)
    body = shared.fake.bodies[-1]
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")} == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }
    assert body["max_completion_tokens"] == 4
    assert body["model"] == "fake"
    assert not {"max_tokens", "nonsense", "cache_salt", "stream_options"} & body.keys()
    shared.post("/v1/completions", prompt="a", temperature=0)
    assert (shared.fake.bodies[-1]["temperature"], shared.fake.bodies[-1]["max_tokens"]) == (0, 16)


def test_unknown_fields_are_named(shared: RemoteRunning):
    assert shared.chat("hello", nonsense=1).headers["x-outrider-ignored"] == "nonsense"


@pytest.mark.parametrize(
    ("asked", "sent"),
    [
        ({"type": "regex", "regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
        ({"type": "choice", "choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"type": "json_object"}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_formats_in_vllm_s_words(shared: RemoteRunning, asked: Any, sent: dict[str, Any]):
    assert shared.chat("hello", response_format=asked).status_code == 200
    body = shared.fake.bodies[-1]
    assert {name: body[name] for name in ("response_format", "structured_outputs") if name in body} == sent


def test_a_schema_keeps_its_name(shared: RemoteRunning):
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
    shared.chat("hello", response_format=wanted)
    assert shared.fake.bodies[-1]["response_format"] == wanted


LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "look"}}]}


@pytest.mark.parametrize(
    ("param", "more"),
    [
        ("prediction", {"prediction": {"type": "content", "content": "x"}}),
        ("include_provenance", {"include_provenance": True}),
        ("speculation", {"speculation": {"off": True}}),
        ("typical_p", {"typical_p": 0.5}),
        ("banned_token_ids", {"banned_token_ids": [1]}),
        ("response_format.grammar", {"response_format": {"type": "grammar", "grammar": "start: /a/"}}),
        (
            "tool_choice.allowed_tools",
            {"tools": [LOOK], "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        ),
    ],
)
def test_what_vllm_lacks_is_refused_by_name_and_listed(shared: RemoteRunning, param: str, more: dict[str, Any]):
    asked = len(shared.fake.bodies)
    answer = shared.chat("hello", **more)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "not_supported", param)
    assert len(shared.fake.bodies) == asked
    (card,) = shared.http.get("/v1/models").json()["data"]
    assert card["missing"][param] in error["message"]
    assert (card["engine"], card["max_model_len"]) == ("vllm 0.32.0", 512)


def test_more_is_missing_on_responses(shared: RemoteRunning):
    answer = shared.post("/v1/responses", input="hello", min_tokens=3)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")


def test_our_own_validation_comes_first(shared: RemoteRunning):
    asked = len(shared.fake.bodies)
    assert shared.chat("hello", temperature=-1).json()["error"]["param"] == "temperature"
    assert shared.chat("hello", model="gpt-4").json()["error"]["code"] == "model_not_found"
    assert shared.post("/v1/completions", prompt="a", best_of=3).json()["error"]["param"] == "best_of"
    assert shared.post("/v1/responses", input="a", store=True).json()["error"]["param"] == "store"
    assert (
        shared.http.post("/v1/completions", content="{", headers={"content-type": "application/json"}).status_code
        == 400
    )
    assert len(shared.fake.bodies) == asked


def test_a_response_whole_and_streamed(shared: RemoteRunning):
    client = OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0)
    wanted = "".join(words_of("hello", 4))
    whole = client.responses.create(model=NAME, input="hello", max_output_tokens=4)
    assert (whole.output_text, whole.model) == (wanted, NAME)
    assert shared.fake.bodies[-1]["store"] is False
    events = list(client.responses.create(model=NAME, input="hello", max_output_tokens=4, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted
    assert events[-1].type == "response.completed"
    assert events[-1].response.model == NAME


def test_tokenize_is_the_replica_s(shared: RemoteRunning):
    assert shared.post("/tokenize", prompt="ab").json()["tokens"] == [1, 2]
    assert shared.fake.bodies[-1] == {"prompt": "ab", "model": "fake"}
    assert shared.post("/tokenize").status_code == 400


@pytest.mark.parametrize(
    ("status", "told", "seen"),
    [
        (400, {"message": "bad top_p", "param": "top_p", "code": 400}, (400, "engine_error", "top_p")),
        (
            400,
            {"message": "This model's maximum context length is 512 tokens.", "param": "input_tokens", "code": 400},
            (400, "context_length_exceeded", None),
        ),
        (404, {"message": "no such route", "code": 404}, (502, "engine_error", None)),
        (500, {"message": "EngineCore died", "code": 500}, (500, "engine_error", None)),
        (503, {"message": "overloaded", "code": 503}, (503, "engine_error", None)),
        (429, {"message": "full", "code": "queue_full"}, (429, "queue_full", None)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_in_our_words(
    spoiled: RemoteRunning, status: int, told: dict[str, Any], seen: tuple[Any, ...], stream: bool
):
    spoiled.fake.refuse = (status, {"error": told})
    answer = spoiled.post("/v1/completions", prompt="a", stream=stream)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == seen
    assert told["message"] in error["message"]
    assert ("retry-after" in answer.headers) == (seen[0] in (429, 503))


@pytest.mark.parametrize("body", [b"<html>", b"[]", b""], ids=["html", "list", "empty"])
def test_an_error_that_is_none(spoiled: RemoteRunning, body: bytes):
    spoiled.fake.refuse = (500, body.decode())
    answer = spoiled.post("/v1/completions", prompt="a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")


@pytest.mark.parametrize(
    "spoil",
    [b"data: {not json\n\n", b"data: 5\n\n", b"nonsense\n\n", b"data: \xff\n\n", b"", b'data: {"choices": [{"in'],
    ids=["not json", "no object", "no event", "not UTF-8", "ended", "cut"],
)
def test_a_stream_that_goes_wrong_ends_with_an_error(spoiled: RemoteRunning, spoil: bytes):
    spoiled.fake.spoil = spoil
    failed = 'outrider_requests_total{finish_reason="error"}'
    before = float(spoiled.metric(failed))
    stream = Stream(spoiled, {"prompt": "hello", "max_tokens": 4}).read()
    assert stream.text == words_of("hello", 4)[0]
    assert not stream.broken
    assert stream.error is not None
    assert stream.error["code"] == "engine_failed"
    assert float(spoiled.metric(failed)) == before + 1
    assert spoiled.front.queue.running == 0


def test_an_error_that_the_engine_streams_is_passed_on(spoiled: RemoteRunning):
    spoiled.fake.spoil = b'data: {"error": {"message": "grammar failed", "code": 500}}\n\ndata: [DONE]\n\n'
    stream = Stream(spoiled, {"prompt": "hello", "max_tokens": 4}).read()
    assert stream.error is not None
    assert "grammar failed" in stream.error["message"]


def test_a_named_stream_ends_with_a_named_error(remote):
    running = remote()
    running.fake.hold_after = 2
    stream = Stream(running, {"input": "hello", "max_output_tokens": 4}, "/v1/responses").begin()
    until(lambda: len([line for line in stream.lines if "delta" in line]) >= 4)
    running.fakes[0].kill()
    assert stream.end().lines[-2] == "event: error"
    assert (stream.chunks[-1]["type"], stream.chunks[-1]["code"]) == ("error", "engine_failed")


def test_keys_and_salts_separate_caches_and_are_not_told(remote):
    running = remote(api_keys=("first-key-1", "second-key-2"))
    assert running.http.post("/v1/completions", json={"prompt": "a"}, headers={"Authorization": "x"}).status_code == 401
    salts: list[str] = []
    for key, salt in (("first-key-1", None), ("second-key-2", None), ("first-key-1", "x"), ("first-key-1", None)):
        more = {"cache_salt": salt} if salt else {}
        told = {"Authorization": f"Bearer {key}"}
        assert running.http.post("/v1/completions", json={"prompt": "a"} | more, headers=told).status_code == 200
        salts.append(running.fake.bodies[-1]["cache_salt"])
    assert len(set(salts)) == 3
    assert salts[0] == salts[3]
    assert all(len(salt) == hashlib.sha256().digest_size * 2 for salt in salts)
    assert all("authorization" not in headers for headers in running.fake.headers)


def test_two_requests_of_one_id_are_two_for_the_engine(remote):
    running = remote()
    for _ in range(2):
        running.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    first, second = (headers["x-request-id"] for headers in running.fake.headers)
    assert first.startswith("mine-")
    assert first != second


def test_figures_are_the_replica_s_own(remote):
    running = remote()
    running.post("/v1/completions", prompt="hello", max_tokens=4, n=2)
    Stream(running, {"prompt": "hello", "max_tokens": 4}).read()
    assert running.metric("outrider_prompt_tokens_total") == "14.0"
    assert running.metric("outrider_cached_prompt_tokens_total") == "6.0"
    assert running.metric("outrider_generation_tokens_total") == "12.0"
    assert running.metric('outrider_requests_total{finish_reason="length"}') == "3.0"
    assert running.metric("outrider_time_to_first_token_seconds_count") == "1.0"
    assert running.metric('outrider_replica_requests_total{replica="0"}') == "2.0"


def test_vllm_s_counters_of_speculation_are_summed(remote):
    running = remote(count=2)
    label = f'engine="0",model_name="{NAME}"'
    for name, value in SPEC.items():
        lines = running.http.get("/metrics").text.splitlines()
        (line,) = [each for each in lines if each.startswith(f"vllm:spec_decode_{name}_total{{")]
        assert float(line.split()[-1]) == 2 * value
        assert set(line[line.index("{") + 1 : line.index("}")].split(",")) == set(label.split(","))
    positions = [each for each in running.http.get("/metrics").text.splitlines() if 'position="' in each]
    assert [float(line.split()[-1]) for line in positions] == [2 * value for value in PER_POSITION]


def test_nothing_is_counted_that_the_engine_does_not_tell(remote):
    running = remote(FakeVllm(spec=False))
    text = running.http.get("/metrics").text
    for absent in ("pages_used", "target_passes", "outrider_spec_", "inter_token", "preemptions"):
        assert absent not in text


def test_leaving_a_stream_ends_it_at_the_engine(remote):
    running = remote()
    running.fake.hold_after = 2
    with running.http.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True}) as answer:
        next(answer.iter_lines())
    until(lambda: running.fake.cancelled == 1)
    until(lambda: running.front.queue.running == 0)
    assert running.metric('outrider_requests_total{finish_reason="cancelled"}') == "1.0"
    assert running.states() == ["ready"]


def test_a_request_s_time_is_bounded(remote):
    running = remote(deadline=0.4)
    running.fake.hold_after = 0
    whole = running.post("/v1/completions", prompt="a")
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "deadline_exceeded")
    running.fake.hold_after = 2
    stream = Stream(running, {"prompt": "a", "max_tokens": 5}).read()
    assert stream.error is not None
    assert stream.error["code"] == "deadline_exceeded"
    assert running.states() == ["ready"]


def test_the_openapi_document_has_the_routes(shared: RemoteRunning):
    paths = json.loads(shared.http.get("/openapi.json").text)["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/health", "/metrics"} <= paths.keys()
