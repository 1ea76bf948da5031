"""What a field does: each answer against the offline engine's on the same model and seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from server_world import END, Running, ToyWriter, chunks_of, make_llm, make_tokenizer

from outrider.core.sampling import SamplingParams
from outrider.server.openai import response_schema
from outrider.server.openai.chat_prompt import template_message
from outrider.server.openai.request_schema import ChatRequest, MessageParam

TOKENIZER = make_tokenizer()
PROMPT = "tell me of the sea"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 3},
    {"min_p": 0.2},
    {"typical_p": 0.6},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.5},
    {"logit_bias": {"101": 50.0, "32": -100.0}},
    {"allowed_token_ids": [97, 98, 99]},
    {"banned_token_ids": [32, 101, 116]},
    {"min_tokens": 15, "temperature": 1.6},
    {"stop": "e"},
    {"stop": ["th", "\n"]},
    {"stop_token_ids": [115]},
    {"ignore_eos": True, "logit_bias": {str(END): 8.0}},
    {"seed": -1},
    {"seed": (1 << 63) - 1},
    {"max_tokens": 3},
    {"n": 3},
]


def offline(prompt: Any, given: dict[str, Any], **more: Any):
    options = {"temperature": 1.0, "max_tokens": 24, "seed": 11} | given | more
    options["seed"] &= (1 << 64) - 1
    options["logit_bias"] = {int(token): bias for token, bias in options.get("logit_bias", {}).items()}
    return make_llm(drafter="none").generate(prompt, SamplingParams(**options))


@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: ",".join(given) or "defaults")
def test_every_option_has_the_effect_it_has_offline(served: Running, given: dict[str, Any]):
    result = offline(PROMPT, given)
    answer = served.post("/v1/completions", prompt=PROMPT, **({"max_tokens": 24, "seed": 11} | given)).json()
    wanted = [result, *result.others]
    assert [choice["text"] for choice in answer["choices"]] == [each.text for each in wanted]
    assert [choice["finish_reason"] for choice in answer["choices"]] == [each.finish_reason for each in wanted]
    assert [choice["stop_reason"] for choice in answer["choices"]] == [each.stop_reason for each in wanted]
    assert answer["usage"]["completion_tokens"] == sum(len(each.tokens) for each in wanted)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)


@pytest.mark.parametrize("given", OPTIONS, ids=lambda given: ",".join(given) or "defaults")
def test_a_chat_streamed_or_whole_says_the_same_as_offline(served: Running, given: dict[str, Any]):
    result = offline(TOKENIZER.encode_chat(MESSAGES), given)
    body = {"messages": MESSAGES, "max_completion_tokens": 24, "seed": 11} | given
    if "max_tokens" in given:
        del body["max_completion_tokens"]
    whole = served.post("/v1/chat/completions", **body).json()
    wanted = [result, *result.others]
    assert [choice["message"]["content"] for choice in whole["choices"]] == [each.text for each in wanted]
    assert [choice["finish_reason"] for choice in whole["choices"]] == [each.finish_reason for each in wanted]
    texts = [""] * len(wanted)
    for chunk in chunks_of(served, "/v1/chat/completions", body | {"stream": True}):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [each.text for each in wanted]


def test_null_is_absent(served: Running):
    body = {"messages": MESSAGES, "seed": 5, "max_completion_tokens": 9}
    nulls = dict.fromkeys({*ChatRequest.model_fields, "user", "store", "service_tier"} - set(body))
    bare = served.post("/v1/chat/completions", **body).json()
    answer = served.post("/v1/chat/completions", **body, **nulls)
    assert answer.status_code == 200
    assert answer.json()["choices"] == bare["choices"]
    assert "x-outrider-ignored" not in answer.headers


def test_max_completion_tokens_counts_over_max_tokens(served: Running):
    body = {"messages": MESSAGES, "seed": 5, "ignore_eos": True, "max_tokens": 20, "max_completion_tokens": 4}
    assert served.post("/v1/chat/completions", **body).json()["usage"]["completion_tokens"] == 4


def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(served: Running):
    answer = served.post("/v1/chat/completions", messages=MESSAGES, seed=5, ignore_eos=True).json()
    assert answer["usage"]["total_tokens"] == served.target.context
    assert answer["choices"][0]["finish_reason"] == "length"


def test_four_ways_to_write_a_prompt(served: Running):
    ids = TOKENIZER.encode(PROMPT)
    asks: list[Any] = [PROMPT, ids, [PROMPT, "ab"], [ids, TOKENIZER.encode("ab")]]
    told = [served.post("/v1/completions", prompt=ask, seed=2, max_tokens=8).json() for ask in asks]
    texts = [[choice["text"] for choice in each["choices"]] for each in told]
    first, second = (offline(text, {"seed": 2, "max_tokens": 8}).text for text in (PROMPT, "ab"))
    assert texts == [[first], [first], [first, second], [first, second]]
    assert told[2]["usage"]["prompt_tokens"] == len(PROMPT) + 2


def test_text_parts_and_the_developer_role_reach_the_template(served: Running):
    parts = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
    ]
    ids = served.post("/tokenize", messages=parts).json()["tokens"]
    assert ids == TOKENIZER.encode_chat(MESSAGES)
    tool = [*MESSAGES, {"role": "tool", "content": "42", "tool_call_id": "c1"}]
    assert served.post("/tokenize", messages=tool).json()["tokens"] == TOKENIZER.encode_chat(tool)


@pytest.mark.parametrize(("sent", "seen"), [('{"at": "sea"}', {"at": "sea"}), ("{at", "{at"), ("3", "3")])
def test_a_template_sees_the_arguments_of_earlier_calls_as_an_object(sent: str, seen: Any):
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": sent}}
    given = template_message(MessageParam.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}))
    assert given == {"role": "assistant", "tool_calls": [call | {"function": {"name": "look", "arguments": seen}}]}


def test_chat_logprobs_are_the_targets_own(served: Running):
    body = {"messages": MESSAGES, "seed": 3, "max_tokens": 12, "logprobs": True, "top_logprobs": 4}
    choice = served.post("/v1/chat/completions", **body).json()["choices"][0]
    text = TOKENIZER.encode_chat(MESSAGES)
    judge = ToyWriter()
    for entry in choice["logprobs"]["content"]:
        log_probs = judge.logits_after(text).double().log_softmax(-1)
        (token,) = entry["bytes"] if len(entry["bytes"]) == 1 else (END,)
        assert entry["logprob"] == pytest.approx(float(log_probs[token]), abs=1e-5)
        best = log_probs.topk(4)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(best.values.tolist(), abs=1e-5)
        text.append(token)
    told = bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"])
    assert told.decode(errors="replace").replace("<|end|>", "") == choice["message"]["content"]


def test_echo_scores_the_prompt_itself(served: Running):
    """As lm-eval asks: nothing is written, and the prompt's own tokens come with their log-probabilities."""
    answer = served.post("/v1/completions", prompt=PROMPT, echo=True, logprobs=2, max_tokens=0).json()
    choice, judge = answer["choices"][0], ToyWriter()
    assert choice["text"] == PROMPT
    scores = choice["logprobs"]
    assert scores["tokens"] == list(PROMPT)
    assert scores["text_offset"] == list(range(len(PROMPT)))
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
    ids = TOKENIZER.encode(PROMPT)
    for i in range(1, len(ids)):
        log_probs = judge.logits_after(ids[:i]).double().log_softmax(-1)
        assert scores["token_logprobs"][i] == pytest.approx(float(log_probs[ids[i]]), abs=1e-5)
        assert max(scores["top_logprobs"][i].values()) == pytest.approx(float(log_probs.max()), abs=1e-5)
    assert answer["usage"] | {"prompt_tokens_details": {}, "completion_tokens_details": {}} == {
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 0,
        "total_tokens": len(PROMPT),
        "prompt_tokens_details": {},
        "completion_tokens_details": {},
    }
    served.llm.engine.check()


def test_a_long_prompt_is_scored_in_pieces_beside_other_texts(serve):
    running = serve(ToyWriter(context=2048))
    prompt = [(i * 7) % 256 for i in range(1000)]
    answer = running.post("/v1/completions", prompt=prompt, echo=True, logprobs=0, max_tokens=2, seed=1).json()
    scores, judge = answer["choices"][0]["logprobs"]["token_logprobs"], ToyWriter()
    for i in (1, 127, 128, 129, 500, 999):
        log_probs = judge.logits_after(prompt[:i]).double().log_softmax(-1)
        assert scores[i] == pytest.approx(float(log_probs[prompt[i]]), abs=1e-5)
    assert len(scores) == 1002
    running.llm.engine.check()


def test_echo_with_text_and_several_choices(served: Running):
    body = {"prompt": [PROMPT, "ab"], "echo": True, "logprobs": 1, "max_tokens": 5, "n": 2, "seed": 4}
    choices = served.post("/v1/completions", **body).json()["choices"]
    for start, prompt in ((0, PROMPT), (2, "ab")):
        result = offline(prompt, {"seed": 4, "max_tokens": 5, "n": 2, "logprobs": 1})
        for choice, wanted in zip(choices[start : start + 2], [result, *result.others], strict=True):
            assert choice["text"] == prompt + wanted.text
            told = choice["logprobs"]["token_logprobs"][len(prompt) :]
            assert told == pytest.approx([each.logprob for each in wanted.logprobs], abs=1e-6)


def test_a_prediction_is_drafted_from_and_counted(served: Running):
    expected = offline(PROMPT, {"max_tokens": 40, "seed": 6})
    body = {"prompt": PROMPT, "seed": 6, "max_tokens": 40}
    prediction = {"type": "content", "content": [{"type": "text", "text": expected.text[:-3] + "zzz"}]}
    answer = served.post("/v1/completions", **body, prediction=prediction, include_provenance=True).json()
    assert answer["choices"][0]["text"] == expected.text
    details = answer["usage"]["completion_tokens_details"]
    origin = answer["choices"][0]["provenance"]
    accepted = sum(each["drafter"] == "prediction" and each["origin"] == "accepted" for each in origin)
    assert details["accepted_prediction_tokens"] == accepted > 20
    assert details["rejected_prediction_tokens"] > 0
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["drafters"]["prediction"] == accepted
    assert figures["num_target_passes"] < 20


def test_provenance_tells_of_every_token(served: Running):
    body = {"prompt": PROMPT, "seed": 9, "max_tokens": 30, "include_provenance": True, "logprobs": 0}
    choice = served.post("/v1/completions", **body).json()["choices"][0]
    assert "".join(each["token"] for each in choice["provenance"]) == choice["text"]
    result = offline(PROMPT, {"seed": 9, "max_tokens": 30})
    assert tuple(each["token_id"] for each in choice["provenance"]) == result.tokens
    probs = [math.exp(each) for each in choice["logprobs"]["token_logprobs"]]
    assert [each["target_prob"] for each in choice["provenance"]] == pytest.approx(probs)
    rounds = [each["round"] for each in choice["provenance"]]
    assert rounds == sorted(rounds)


@pytest.mark.parametrize("asked", [{"off": True}, {"drafter": "none"}, {"max_tokens": 0}])
def test_speculation_can_be_turned_off_for_one_request(served: Running, asked: dict[str, Any]):
    prediction = {"type": "content", "content": "the sea the sea the sea"}
    body = {"prompt": PROMPT, "seed": 9, "max_tokens": 30, "prediction": prediction}
    plain = served.post("/v1/completions", **body, speculation=asked).json()
    drafted = served.post("/v1/completions", **body).json()
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert drafted["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_salt_keeps_caches_apart(served: Running):
    long = "a prompt of more than one page of the cache, which is sixteen tokens"
    counts = []
    for salt in ("one", "one", "two"):
        answer = served.post("/v1/completions", prompt=long, max_tokens=1, cache_salt=salt).json()
        counts.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert counts == [0, len(long) // 16 * 16, 0]


def test_the_figures_add_up(served: Running):
    figures = served.post("/v1/completions", prompt="abababababab", max_tokens=60, seed=1).json()["metrics"]
    told = figures["speculative_decoding"]
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] > 0
    assert sum(i * n for i, n in enumerate(told["acceptance_histogram"])) == told["num_accepted_draft_tokens"]
    assert sum(told["num_accepted_tokens_per_pos"]) == told["num_accepted_draft_tokens"]
    mean = 1 + told["num_accepted_draft_tokens"] / told["num_spec_steps"]
    assert told["mean_acceptance_length"] == pytest.approx(mean)


def test_whole_answers_are_as_the_document_says(served: Running):
    chat = served.post("/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=1, max_tokens=5)
    response_schema.ChatCompletion.model_validate(chat.json(), strict=True)
    body = {"prompt": ["a", "b"], "echo": True, "logprobs": 1, "include_provenance": True, "max_tokens": 5}
    response_schema.Completion.model_validate(served.post("/v1/completions", **body).json(), strict=True)
    response_schema.ModelList.model_validate(served.http.get("/v1/models").json(), strict=True)
    response_schema.Tokenized.model_validate(
        served.post("/tokenize", prompt="a", return_token_strs=True).json(), strict=True
    )


def test_tokenize_and_detokenize(served: Running):
    told = served.post("/tokenize", prompt="hé<|end|>", return_token_strs=True).json()
    assert told == {
        "count": 4,
        "max_model_len": 256,
        "tokens": [104, 195, 169, END],
        "token_strs": ["h", "\ufffd", "\ufffd", "<|end|>"],
    }
    assert served.post("/detokenize", tokens=told["tokens"]).json() == {"prompt": "hé<|end|>"}


def test_structured_output_is_what_was_asked_for(served: Running):
    body = {"messages": MESSAGES, "seed": 2, "response_format": {"type": "choice", "choice": ["north", "south"]}}
    answer = served.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] in ("north", "south")
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


def test_a_tool_call_whole_and_streamed(served: Running):
    function = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}}}
    function["parameters"] |= {"required": ["at"], "additionalProperties": False}
    body = {"messages": MESSAGES, "seed": 2, "tools": [{"type": "function", "function": function}]}
    body["tool_choice"] = "required"
    choice = served.post("/v1/chat/completions", **body).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert call["function"]["name"] == "look"
    assert call["function"]["arguments"] in ('{"at": "sea"}', '{"at": "sky"}')
    arguments, reasons = "", []
    for chunk in chunks_of(served, "/v1/chat/completions", body | {"stream": True}):
        for told in chunk["choices"]:
            reasons.append(told["finish_reason"])
            arguments += "".join(each["function"]["arguments"] for each in told["delta"].get("tool_calls", ()))
    assert arguments == call["function"]["arguments"]
    assert reasons[-1] == "tool_calls"


def look_tools(*names: str) -> list[dict[str, Any]]:
    parameters = {"type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"]}
    parameters["additionalProperties"] = False
    return [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in names]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_of_the_tools_only_the_allowed_ones_are_called(served: Running):
    body = {"messages": MESSAGES, "tools": look_tools("look", "listen", "smell"), "max_tokens": 120}
    called = {
        call["function"]["name"]
        for seed in range(6)
        for call in served.post(
            "/v1/chat/completions", **body, seed=seed, tool_choice=allowed("required", "look", "smell")
        ).json()["choices"][0]["message"]["tool_calls"]
    }
    assert called == {"look", "smell"}
    auto = served.post("/v1/chat/completions", **body, seed=1, tool_choice=allowed("auto", "smell"))
    assert auto.status_code == 200
    everything = served.post("/v1/chat/completions", **body, seed=1, tool_choice="auto").json()
    assert auto.json()["usage"]["prompt_tokens"] == everything["usage"]["prompt_tokens"]  # all are shown


@pytest.mark.parametrize("tools", [look_tools("look"), None])
def test_a_tool_that_is_allowed_and_not_there_is_named(served: Running, tools: Any):
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": allowed("auto", "touch")}
    error = served.post("/v1/chat/completions", **body).json()["error"]
    assert error["param"] == "tool_choice"
    assert "touch" in error["message"]


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("begun", ["the se", "the se ", "", "<|start|>assistant"])
def test_a_final_message_goes_on_where_it_stops(served: Running, begun: str, parts: bool):
    content = [{"type": "text", "text": "so"}, {"type": "text", "text": begun}] if parts else begun
    messages = [*MESSAGES, {"role": "assistant", "content": content}]
    said = ("so\n" if parts else "") + begun
    prompt = [*TOKENIZER.encode_chat(MESSAGES), *TOKENIZER.encode(said, special=False, allow_special_tokens=False)]
    body = {"messages": messages, "continue_final_message": True}
    assert served.post("/tokenize", **body).json()["tokens"] == prompt
    result = offline(prompt, {"seed": 3})
    answer = served.post("/v1/chat/completions", **body, seed=3, max_tokens=24, add_generation_prompt=False).json()
    assert answer["choices"][0]["message"]["content"] == result.text
    assert answer["usage"]["prompt_tokens"] == len(prompt)


def test_without_a_generation_prompt_the_template_begins_no_message(served: Running):
    prompt = TOKENIZER.encode_chat(MESSAGES, add_generation_prompt=False)
    answer = served.post("/v1/chat/completions", messages=MESSAGES, add_generation_prompt=False, seed=3, max_tokens=9)
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
    assert answer.json()["choices"][0]["message"]["content"] == offline(prompt, {"seed": 3, "max_tokens": 9}).text
    assert "x-outrider-ignored" not in answer.headers


@pytest.mark.parametrize(
    ("last", "more", "says"),
    [
        ({"content": "the"}, {"add_generation_prompt": True}, "add_generation_prompt"),
        ({"content": []}, {}, "must have text"),
        ({"tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}, {}, "must have text"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_a_final_message_that_cannot_go_on(served: Running, path: str, last: Any, more: Any, says: str):
    messages = [*MESSAGES, {"role": "assistant"} | last]
    answer = served.post(path, messages=messages, continue_final_message=True, **more)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "continue_final_message"
    assert says in answer.json()["error"]["message"]


WHOLE_FIELDS = ("max_tokens", "n", "seed", "top_k", "min_tokens", "logprobs", "best_of")


def test_a_whole_number_may_be_written_with_a_point(served: Running):
    body: dict[str, Any] = {"prompt": [97, 98], "max_tokens": 5, "n": 1, "seed": 7, "top_k": 9, "min_tokens": 2}
    body |= {"logprobs": 1, "best_of": 1, "stop_token_ids": [99], "speculation": {"max_tokens": 3}}
    with_points = body | {name: float(body[name]) for name in WHOLE_FIELDS}
    with_points |= {"prompt": [97.0, 98], "stop_token_ids": [99.0], "speculation": {"max_tokens": 3.0}}
    wanted, got = (served.post("/v1/completions", **each) for each in (body, with_points))
    assert got.status_code == 200, got.text
    assert got.json()["choices"] == wanted.json()["choices"]
    chat = served.post("/v1/chat/completions", messages=MESSAGES, max_completion_tokens=5.0, ignore_eos=True)
    assert chat.json()["usage"]["completion_tokens"] == 5
    assert served.post("/detokenize", tokens=[97.0, 98.0]).json() == {"prompt": "ab"}
    for name in WHOLE_FIELDS:
        assert served.post("/v1/completions", **body | {name: 1.5}).json()["error"]["param"] == name
        assert served.post("/v1/completions", **body | {name: "1"}).json()["error"]["param"] == name


@pytest.mark.parametrize("kind", ["image_url", "input_image", "input_audio", "file", "video_url", "{types}"])
def test_a_part_that_is_no_text_is_named_with_what_works(served: Running, kind: str):
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "http://127.0.0.1:1/a.png"}}]
    error = served.post("/v1/chat/completions", messages=[*MESSAGES, {"role": "user", "content": parts}]).json()[
        "error"
    ]
    assert error["param"] == "messages.2"
    assert error["message"] == (
        f"messages.2: the model reads text alone, and no part of type '{kind}'; send parts of type text"
    )


def test_the_fingerprint_names_the_set_up(served: Running, serve):
    other = serve(drafter="none")
    prints = [
        each.post("/v1/completions", prompt="a", max_tokens=1).json()["system_fingerprint"] for each in (served, other)
    ]
    assert prints[0] != prints[1]
    assert prints[0] == served.post("/v1/completions", prompt="b", max_tokens=1).json()["system_fingerprint"]


def test_scores_do_not_depend_on_the_pieces():
    llm = make_llm()
    text = TOKENIZER.encode("she sells sea shells " * 8)
    scores = llm.score_prompt(text, top=1)
    judge = torch.stack([ToyWriter().logits_after(text[:i]) for i in range(1, len(text))]).double().log_softmax(-1)
    wanted = judge[torch.arange(len(text) - 1), torch.tensor(text[1:])]
    assert [each.logprob for each in scores] == pytest.approx(wanted.tolist(), abs=1e-5)
    llm.engine.check()
