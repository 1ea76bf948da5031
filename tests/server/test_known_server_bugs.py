"""Bugs that other servers had where a round commits several tokens, each with drafts that are accepted and without.

The server drafts from the client's prediction, which here is the very text to come, so that stops, limits and
grammars fall into the middle of accepted drafts. Numbers are the issues of the projects that had the bug.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from client_world import LONG_TOKENS, Serve, watched
from server_world import END, Running, lines_of, make_llm

from outrider.core.sampling import SamplingParams
from outrider.engine.results import Result

PROMPT = "tell me of the sea"
PLAIN = (0xC3, 0xA9, END)  # banned, so that every token is a letter and the text has a character for each
BODY: dict[str, Any] = {"prompt": PROMPT, "seed": 5, "max_tokens": 40, "banned_token_ids": PLAIN}


def offline(prompt: Any = PROMPT, **given: Any) -> Result:
    options = {"temperature": 1.0, "seed": 5, "max_tokens": 40, "banned_token_ids": PLAIN} | given
    return make_llm(drafter="none").generate(prompt, SamplingParams(**options))


FREE = offline().text  # 40 letters


def drafted(served: Running, predicted: str = FREE, **more: Any) -> dict[str, Any]:
    """The answer with drafts, once it is clear that it says what it says without them."""
    body = BODY | {"include_provenance": True, "logprobs": 2} | more
    plain = served.post("/v1/completions", **body, speculation={"off": True}).json()
    prediction = {"type": "content", "content": predicted}
    answer = served.post("/v1/completions", **body, prediction=prediction).json()
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    for told, wanted in zip(answer["choices"], plain["choices"], strict=True):
        for name in ("text", "finish_reason", "stop_reason"):
            assert told[name] == wanted[name], name
        assert told["logprobs"]["tokens"] == wanted["logprobs"]["tokens"]
        assert told["logprobs"]["token_logprobs"] == pytest.approx(wanted["logprobs"]["token_logprobs"], abs=1e-5)
        assert [each["token_id"] for each in told["provenance"]] == [each["token_id"] for each in wanted["provenance"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][name] == plain["usage"][name]
    return answer


def ends_inside_a_draft(choice: dict[str, Any]) -> bool:
    """Whether the last token was accepted and its draft went on behind it."""
    last = choice["provenance"][-1]
    return last["origin"] == "accepted" and last["position"] < last["drafted"] - 1


@pytest.mark.parametrize("size", [1, 3])
def test_nothing_is_kept_past_a_stop(served: Running, size: int):
    """vLLM #47616, SGLang #27637: wherever in a draft the stop stands."""
    inside = 0
    for at in range(3, 30, 3):
        stop = FREE[at : at + size]
        end = FREE.index(stop)
        choice = drafted(served, stop=[stop])["choices"][0]
        assert choice["text"] == FREE[:end]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert len(choice["logprobs"]["tokens"]) == len(choice["provenance"]) == end + size
        inside += ends_inside_a_draft(choice)
    assert inside >= 3


def test_the_first_stop_in_the_text_counts_whatever_its_place_in_the_list(served: Running):
    """vLLM #49391: both stand in one draft."""
    first, second = FREE[6:9], FREE[9:12]
    assert FREE.index(first) < FREE.index(second)
    for stops in ([first, second], [second, first]):
        choice = drafted(served, stop=stops)["choices"][0]
        assert (choice["text"], choice["stop_reason"]) == (FREE[: FREE.index(first)], first)


def test_a_stop_across_the_end_of_a_draft(served: Running):
    """Half of it was drafted, half of it was not."""
    choice = drafted(served, predicted=FREE[:7] + "zzzz", stop=[FREE[5:9]])["choices"][0]
    assert choice["text"] == FREE[: FREE.index(FREE[5:9])]


def test_max_tokens_cuts_a_draft_short(served: Running):
    accepted = 0
    for most in range(3, 25):
        answer = drafted(served, max_tokens=most)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (FREE[:most], "length")
        assert answer["usage"]["completion_tokens"] == most
        accepted += answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted > 100


def test_a_limit_hides_no_earlier_stop(served: Running):
    """SGLang #31599: the stop ends before the limit, with it, and after it."""
    stop = FREE[8:11]
    end = FREE.index(stop) + len(stop)
    reasons = {
        most: drafted(served, max_tokens=most, stop=[stop])["choices"][0]["finish_reason"]
        for most in (end - 1, end, end + 1)
    }
    assert reasons == {end - 1: "length", end: "stop", end + 1: "stop"}


def test_usage_adds_up(served: Running):
    """vLLM #39826: no part is larger than the whole, over several choices too."""
    for n in (1, 3):
        answer = drafted(served, n=n, stop=[FREE[12:14]])
        usage, details = answer["usage"], answer["usage"]["completion_tokens_details"]
        assert usage["completion_tokens"] == sum(len(choice["logprobs"]["tokens"]) for choice in answer["choices"])
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        accepted = answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
        assert details["reasoning_tokens"] == 0
        assert details["accepted_prediction_tokens"] <= accepted <= usage["completion_tokens"]


def test_logprobs_of_a_stream_stay_with_their_tokens_up_to_a_stop(served: Running):
    stop = FREE[10:13]
    body = BODY | {
        "logprobs": 1,
        "stop": [stop],
        "prediction": {"type": "content", "content": FREE},
        "stream": True,
    }
    wanted = offline(stop=(stop,), logprobs=1)
    tokens, scores, text = [], [], ""
    for line in lines_of(served, "/v1/completions", body)[:-1]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        text += choice["text"]
        tokens += choice["logprobs"]["tokens"] if choice["logprobs"] else []
        scores += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
    assert text == wanted.text == FREE[: FREE.index(stop)]
    assert "".join(tokens) == FREE[: FREE.index(stop) + len(stop)]
    assert scores == pytest.approx([each.logprob for each in wanted.logprobs], abs=1e-5)


def test_min_tokens_holds_inside_a_draft(served: Running):
    """vLLM #26317: the verifier must not skip what forbids an early end; all three kinds of it."""
    letter = FREE[4]
    strings = drafted(served, min_tokens=20, stop=[letter])["choices"][0]
    wanted = offline(min_tokens=20, stop=(letter,))
    assert strings["text"] == wanted.text
    assert len(strings["provenance"]) >= 20
    ids = drafted(served, min_tokens=20, stop_token_ids=[ord(letter)])["choices"][0]
    assert ord(letter) not in [each["token_id"] for each in ids["provenance"]][:20]
    assert ids["text"] == offline(min_tokens=20, stop_token_ids=(ord(letter),)).text
    ends = drafted(served, min_tokens=20, banned_token_ids=[], logit_bias={str(END): 20})["choices"][0]
    assert [each["token_id"] for each in ends["provenance"]].index(END) == 20


@pytest.mark.parametrize("given", [{"allowed_token_ids": [97, 101, 32]}, {"banned_token_ids": [*PLAIN, 32, 101]}])
def test_allowed_ids_hold_inside_a_draft(served: Running, given: dict[str, Any]):
    """vLLM #35654: the draft is full of tokens that may not be."""
    used = {each["token_id"] for each in drafted(served, **given)["choices"][0]["provenance"]}
    assert used <= set(given.get("allowed_token_ids", used))
    assert not used & set(given.get("banned_token_ids", ()))


@pytest.mark.parametrize(
    "given",
    [{"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"logit_bias": {"101": 6}}],
    ids=lambda given: next(iter(given)),
)
def test_penalties_count_the_drafted_tokens_before(served: Running, given: dict[str, Any]):
    """CVE-2026-44223, and vLLM #26317: penalties at each place of a draft, as at each round without one."""
    params = {name: {101: 6} if name == "logit_bias" else value for name, value in given.items()}
    text = offline(**params).text
    assert drafted(served, predicted=text, **given)["choices"][0]["text"] == text


MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.mark.parametrize(
    ("pattern", "predicted"),
    [
        ("(ab|cd){6}-[0-9]{4}", "abcdabcd"),  # follows the grammar, whichever way the target turns
        ("[a-f]{4}-[0-9]{4}-[a-f]{4}", "abcdefabcdef"),  # leaves it in the middle
        ("(abc|abd|x)+-end", "abcabdabcx-end and more"),  # goes on behind its end
    ],
)
@pytest.mark.parametrize("seed", range(6))
def test_a_grammar_holds_inside_a_draft(served: Running, pattern: str, predicted: str, seed: int):
    """vLLM #44297, lmdeploy #4559: the mask follows the draft's own tokens, to where they leave the grammar."""
    body: dict[str, Any] = {"messages": MESSAGES, "seed": seed, "max_tokens": 60, "logprobs": True}
    body["response_format"] = {"type": "regex", "regex": pattern}
    plain = served.post("/v1/chat/completions", **body, speculation={"off": True}).json()["choices"][0]
    prediction = {"type": "content", "content": predicted}
    answer = served.post("/v1/chat/completions", **body, prediction=prediction).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == plain["message"]["content"]
    assert [each["bytes"] for each in choice["logprobs"]["content"]] == [
        each["bytes"] for each in plain["logprobs"]["content"]
    ]
    assert choice["finish_reason"] == plain["finish_reason"]
    if choice["finish_reason"] == "stop":
        assert re.fullmatch(pattern, choice["message"]["content"])
    assert answer["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_cancelled_text_leaves_no_page_that_another_would_read(serve: Serve):
    """lucebox #677: its prefix is shared pages of the same prompt; half a draft must not be among them."""
    server = watched(serve)
    running, prompt = server.running, "the sea " * 12
    body = BODY | {"prompt": prompt, "prediction": {"type": "content", "content": FREE * 4}}
    endless = body | {"max_tokens": LONG_TOKENS, "stream": True}
    with running.http.stream("POST", "/v1/completions", json=endless) as answer:
        next(answer.iter_lines())
    server.expect_cancelled()
    again = running.post("/v1/completions", **body).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert again["choices"][0]["text"] == offline(prompt).text
