"""The first calls people make: what is close to right is told what would be; nothing ends in internals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import ConfigError, RequestError
from outrider.core.sampling import SamplingParams
from outrider.drafters.none import NoDraft
from outrider.drafters.suffix import SuffixConfig
from outrider.engine.request import Request
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.testing.toy import ByteTokenizer, ToyRunner

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


class Told(ByteTokenizer):
    """Notes what conversations it is asked to write out."""

    def __init__(self) -> None:
        super().__init__()
        self.chats: list[Any] = []

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(char) % 64 for char in text]

    def encode_chat(self, messages: Any, **_: Any) -> list[int]:
        self.chats.append(messages)
        return [1, 2, 3]

    def template_text(self) -> str:
        return "{{ message.role }}"

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return ()


def llm(drafter: str = "suffix", **target: Any) -> LLM:
    loaded = LoadedModel("toy", Path("toy"), ToyRunner(**target), Told(), "float32")  # pyright: ignore[reportArgumentType]
    return LLM(loaded, drafter=drafter, adaptive=False)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda it: it.generate("hi", max_new_tokens=3), ["no option 'max_new_tokens'", "did you mean max_tokens?"]),
        (lambda it: it.chat([{"role": "user", "content": "hi"}], temp=1), ["did you mean temperature?"]),
        (lambda it: it.chat([{"role": "usr", "content": "hi"}]), ["message 0", "did you mean 'user'?"]),
        (lambda it: it.generate("hi", predction="x"), ["no option 'predction'", "prediction"]),
        (lambda it: it.generate([{"role": "user", "content": "hi"}]), ["chat answers messages"]),
        (lambda it: it.chat({"role": "user", "content": "hi"}), ["a list of messages"]),
        (lambda it: it.chat([3]), ["a list of messages"]),
        (lambda it: it.generate("hi", {"max_tokens": 3}), ["SamplingParams, or a list of them"]),
        (lambda it: it.generate(["a", "b"], [SHORT]), ["1 SamplingParams for 2 prompts"]),
        (lambda it: it.compare("hi", {"max_tokens": 3}), ["SamplingParams, or a list of them"]),
        (lambda it: list(it.stream("hi", max_new_tokens=3)), ["did you mean max_tokens?"]),
        (lambda it: it.generate(3), ["a prompt is text or token ids", "3"]),
        (lambda it: it.generate(None), ["a prompt is text or token ids", "None"]),
        (lambda it: it.generate("hi", SHORT, prediction="there"), ["'suffix'", "'suffix+prediction'"]),
    ],
)
def test_calls_that_are_nearly_right(call: Any, words: list[str]):
    made = llm()
    with pytest.raises(RequestError) as told:
        call(made)
    for word in words:
        assert word in str(told.value)
    assert not made.engine.busy


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (3, {}, "a model is a folder"),
        (None, {}, "a model is a folder"),
        ("demo", {"max_draft": 3}, "max_draft follows from the drafter"),
        ("demo", {"reserved": 3}, "reserved follows from the drafter"),
        (Path("no") / "such" / "folder", {}, "no/such/folder"),
    ],
)
def test_models_that_are_none(model: Any, options: dict[str, Any], words: str):
    with pytest.raises(ConfigError) as told:
        LLM(model, **options)
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (SuffixConfig, "drafter is the class SuffixConfig; give an instance of it, such as SuffixConfig()"),
        (NoDraft(), "a drafter is a name such as 'suffix:k=3', or a configuration with `build`"),
        (None, "got None"),
        ({"method": "ngram"}, "got {'method': 'ngram'}"),
    ],
)
def test_drafters_that_are_no_configuration(drafter: Any, words: str):
    with pytest.raises(ConfigError) as told:
        LLM("demo", drafter=drafter)
    assert words in str(told.value)


def test_a_text_given_to_chat_is_what_a_user_says():
    made = llm()
    said = made.chat("Say hi", SHORT)
    assert made.tokenizer.chats == [[{"role": "user", "content": "Say hi"}]]  # pyright: ignore[reportAttributeAccessIssue]
    assert said.tokens == made.generate([1, 2, 3], SHORT).tokens


def test_the_limit_that_is_short_is_the_one_reported():
    with pytest.raises(RequestError, match=r"the context holds 32: shorten the prompt$"):
        llm(context=32).generate([1] * 40)
    with pytest.raises(RequestError, match=r"the cache holds 32: .*enlarge the cache \(cache_tokens\)"):
        llm(cache_tokens=32).generate([1] * 40)


def test_a_text_submitted_to_the_engine_itself_is_nobody_else_s():
    made = llm()
    made.engine.submit(Request(prompt=(1, 2), params=SHORT))
    assert len(made.generate([1, 2, 3], SHORT).tokens) == 3


def test_a_mixture_goes_by_its_members_names():
    assert llm("suffix+prediction").drafter.traits.name == "suffix+prediction"
    assert llm("mix").drafter.traits.name == "suffix+prompt-lookup+prediction"
