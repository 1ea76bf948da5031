"""Compiling: what was asked for, within limits, remembered; and grammars made to do harm, which do none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from outrider.core.errors import ConfigError, RequestError
from outrider.core.sampling import SamplingParams
from outrider.drafters.grammar import Grammar
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.grammar import (
    CompilerUnavailableError,
    GrammarCostError,
    GrammarSpec,
    compile_constraint,
    read_response_format,
)
from outrider.grammar import compile as compiling
from outrider.grammar.schema import MAX_SOURCE_CHARS
from outrider.grammar.spec import MAX_CHOICE_TEXTS
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier

BYTES = ByteTokenizer()
LONGEST = 20.0
"""Seconds; nothing here comes near it unless something hangs."""


def run(spec: GrammarSpec, max_tokens: int = 12) -> list[tuple[str | None, str, str]]:
    """The evil request between two innocent ones: (finish, error, text) of each."""
    tried = Engine(ToyRunner(257), Grammar(8), make_verifier("seeded"), BYTES, eos_ids=BYTES.eos_ids)
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=3)
    plain = Request(prompt=(1, 2), params=params)
    ids = [
        *tried.submit(plain),
        *tried.submit(Request(prompt=(1, 2), params=params, constraint=compile_constraint(spec, BYTES))),
        *tried.submit(plain),
    ]
    ends: dict[int, tuple[str | None, str]] = {}
    texts = dict.fromkeys(ids, "")
    while tried.busy:
        for event in tried.step():
            texts[event.seq_id] += event.text
            if event.finish:
                ends[event.seq_id] = (event.finish, event.error)
    tried.check()
    return [(*ends[i], texts[i]) for i in ids]


def nested(levels: int) -> str:
    return "(" * levels + "a" + ")" * levels


REFUSED: dict[str, tuple[Callable[[], GrammarSpec], str]] = {
    "unclosed": (lambda: GrammarSpec.regex("(a"), "unclosed group"),
    "look-ahead": (lambda: GrammarSpec.regex("(?=a)b"), "look-ahead"),
    "back-reference": (lambda: GrammarSpec.regex(r"(a)\1"), "backreferences"),
    "deep regex": (lambda: GrammarSpec.regex(nested(5000)), "not valid"),
    "deep grammar": (lambda: GrammarSpec.lark("start: " + nested(5000).replace("a", '"a"')), "nested"),
    "endless rule": (lambda: GrammarSpec.lark("start: start"), "no text at all"),
    "no start": (lambda: GrammarSpec.lark('rule: "a"'), "start"),
    "unknown rule": (lambda: GrammarSpec.lark("start: other"), "other"),
    "exponential schema": (
        lambda: GrammarSpec.json_schema(
            {"allOf": [{"anyOf": [{"type": "object", "required": [f"p{i}{j}"]} for j in range(8)]} for i in range(8)]}
        ),
        "too complex",
    ),
    "huge enum": (lambda: GrammarSpec.json_schema({"enum": [f"v{i}" for i in range(100_000)]}), "at most|more than"),
    "half a surrogate": (lambda: GrammarSpec.regex("\ud800"), "surrogate"),
    "half a surrogate among choices": (lambda: GrammarSpec.choice(["a", "\udfff"]), "surrogate"),
    "long": (lambda: GrammarSpec.lark("a" * (MAX_SOURCE_CHARS + 1)), f"at most {MAX_SOURCE_CHARS}"),
    "many choices": (lambda: GrammarSpec.choice(["x"] * (MAX_CHOICE_TEXTS + 1)), f"1 to {MAX_CHOICE_TEXTS}"),
    "no choice": (lambda: GrammarSpec.choice([]), "1 to"),
    "an empty choice": (lambda: GrammarSpec.choice([""]), "at least one character"),
    "a string for a list": (lambda: GrammarSpec.choice("abc"), "a list"),
    "empty": (lambda: GrammarSpec.regex(""), "at least one character"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_is_refused_in_time(name: str):
    make, message = REFUSED[name]
    began = time.monotonic()
    with pytest.raises(RequestError, match=message) as caught:
        compile_constraint(make(), BYTES)
    assert time.monotonic() - began < LONGEST
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


SURVIVED = {
    "exponential": GrammarSpec.regex("(a+)+$"),
    "ambiguous": GrammarSpec.lark('start: e\ne: e e | "a" | "b"'),
    "left recursion": GrammarSpec.lark('start: start "a" | "a"'),
    "many states": GrammarSpec.regex("(.*a.{20}){3}"),
    "deep recursion": GrammarSpec.json_schema(
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    ),
    "a long run": GrammarSpec.regex("[xy]((a{100}){100}){100}"),
    "a long string": GrammarSpec.json_schema({"type": "string", "minLength": 1_000_000}),
    "a long list": GrammarSpec.json_schema({"type": "array", "items": {"type": "null"}, "minItems": 100_000}),
    "4,000 choices": GrammarSpec.choice([f"value {i:04d}" for i in range(4000)]),
}


@pytest.mark.parametrize("name", SURVIVED)
def test_what_is_costly_harms_nobody_else(name: str):
    """It is followed, or it fails alone and says why; the requests around it are answered as ever."""
    began = time.monotonic()
    before, (finish, error, _), after = run(SURVIVED[name])
    assert time.monotonic() - began < LONGEST
    assert before == after
    assert before[0] == "length"
    assert before[2]
    assert (finish in ("length", "stop") and not error) or (finish == "error" and "simpler" in error)


def test_a_text_is_not_held_to_what_others_filled_the_table_with(monkeypatch: pytest.MonkeyPatch):
    """Texts of one grammar share its lexer's states. When they are full, a text continues with a table of its own."""
    monkeypatch.setattr(compiling, "MAX_STATES", 80)
    tokenizer = ByteTokenizer()
    spec = GrammarSpec.choice([chr(c) * 12 for c in range(ord("a"), ord("z") + 1)])
    for c in range(ord("a"), ord("z") + 1):
        made = compile_constraint(spec, tokenizer)
        for _ in range(12):
            assert bool(made.allowed([()], frozenset())[0, c]), (chr(c), made.problem)
            made.advance([c])
        assert made.done


def test_a_text_that_is_too_much_by_itself_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "MAX_STATES", 40)
    _, (finish, error, text), _ = run(GrammarSpec.regex("(a|b){200}x"), max_tokens=150)
    assert finish == "error"
    assert "too many states" in error
    assert set(text) == {"a", "b"}


def test_without_a_free_slot_a_grammar_may_be_sent_again(monkeypatch: pytest.MonkeyPatch):
    slots = threading.BoundedSemaphore(1)
    monkeypatch.setattr(compiling, "_compile_slots", slots)
    monkeypatch.setattr(compiling, "MAX_WAIT_SECONDS", 0.05)
    with slots, pytest.raises(CompilerUnavailableError, match="too many grammars") as caught:
        compile_constraint(GrammarSpec.regex("waits"), BYTES)
    assert caught.value.retry_after > 0
    compile_constraint(GrammarSpec.regex("waits"), BYTES)


@pytest.mark.parametrize("lack", ["time", "memory"])
def test_a_grammar_beyond_its_bounds_is_refused_and_frees_its_slot(monkeypatch: pytest.MonkeyPatch, lack: str):
    bound, value, unit = {"time": ("MAX_COMPILE_SECONDS", 0.2, "s"), "memory": ("MAX_COMPILE_BYTES", 8 << 20, "MB")}[
        lack
    ]
    monkeypatch.setattr(compiling, bound, value)
    monkeypatch.setattr(compiling, "_compile_slots", threading.BoundedSemaphore(1))
    monkeypatch.setattr(compiling, "MAX_WAIT_SECONDS", 0.05)
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("only what is cheap is compiled in this process"))
    for multiple in (100_000_007, 100_000_037):
        spec = GrammarSpec.json_schema({"type": "integer", "multipleOf": multiple})
        with pytest.raises(GrammarCostError, match=rf"^the JSON schema took more than .* {unit}"):
            compile_constraint(spec, BYTES)
    monkeypatch.undo()
    compile_constraint(GrammarSpec.regex("fine"), BYTES)


def test_grammars_are_remembered_and_the_oldest_forgotten(monkeypatch: pytest.MonkeyPatch):
    made: list[str] = []
    original = compiling._compile

    def counting(spec: GrammarSpec, vocabulary: Any) -> Any:
        made.append(spec.source)
        return original(spec, vocabulary)

    monkeypatch.setattr(compiling, "_compile", counting)
    monkeypatch.setattr(compiling, "MAX_CACHED_GRAMMARS", 2)
    tokenizer = ByteTokenizer()
    for source in ("aa", "bb", "aa", "cc", "aa", "bb"):
        constraint = compile_constraint(GrammarSpec.regex(source), tokenizer)
        constraint.advance(list(source.encode()))
        assert constraint.done  # each use begins at the beginning
    assert made == ["aa", "bb", "cc", "bb"]
    monkeypatch.setattr(compiling, "MAX_CACHED_CHARS", 10)
    for source in ("12345678", "aa", "12345678", "bb", "12345678", "aa"):
        compile_constraint(GrammarSpec.regex(source), tokenizer)
    assert made[4:] == ["12345678", "aa", "bb", "aa"]


def test_grammars_are_shared_within_a_salt_only(monkeypatch: pytest.MonkeyPatch):
    """Or else the time of one's request would tell what grammars others use."""
    made: list[str] = []
    original = compiling._compile
    monkeypatch.setattr(
        compiling, "_compile", lambda spec, vocabulary: made.append(spec.source) or original(spec, vocabulary)
    )
    tokenizer = ByteTokenizer()
    for salt in ("mine", "yours", "mine", "", "yours"):
        compile_constraint(GrammarSpec.regex("a+"), tokenizer, salt)
    assert made == ["a+"] * 3
    monkeypatch.setattr(compiling, "MAX_CACHED_GRAMMARS", 1)
    compile_constraint(GrammarSpec.regex("b+"), tokenizer, "yours")  # takes the room of its own salt
    compile_constraint(GrammarSpec.regex("a+"), tokenizer, "mine")
    compile_constraint(GrammarSpec.regex("a+"), tokenizer, "yours")
    assert made[3:] == ["b+", "a+"]
    monkeypatch.setattr(compiling, "MIN_CACHED_BYTES", 1 << 30)  # more than compiling takes, whatever else runs
    monkeypatch.setattr(compiling, "MAX_CACHED_BYTES", 2 << 30)
    for salt in ("1", "2", "3"):
        compile_constraint(GrammarSpec.regex("c+"), tokenizer, salt)
    compile_constraint(GrammarSpec.regex("c+"), tokenizer, "3")
    assert made[5:] == ["c+"] * 3
    compile_constraint(GrammarSpec.regex("c+"), tokenizer, "1")
    assert made[8:] == ["c+"]


def test_many_threads_may_compile_at_once():
    tokenizer, failures = ByteTokenizer(), []

    def work(i: int) -> None:
        for j in range(10):
            text = f"{(i + j) % 5}abc"
            constraint = compile_constraint(GrammarSpec.choice([text]), tokenizer)
            constraint.advance(list(text.encode()))
            if not constraint.done:
                failures.append(text)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_without_llguidance_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    import sys

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match="pip install"):
        compile_constraint(GrammarSpec.regex("a"), ByteTokenizer())


def test_openai_response_formats():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert read_response_format(None) is None
    assert read_response_format({"type": "text"}) is None
    assert read_response_format({"type": "json_object"}) == GrammarSpec.json_object()
    assert read_response_format({"type": "json_object", "schema": schema}) == GrammarSpec.json_schema(schema)
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert read_response_format(wrapped) == GrammarSpec.json_schema(schema)
    assert read_response_format({"type": "regex", "regex": "a+"}) == GrammarSpec.regex("a+")
    assert read_response_format({"type": "grammar", "grammar": 'start: "a"'}) == GrammarSpec.lark('start: "a"')
    assert read_response_format({"type": "choice", "choice": ["a"]}) == GrammarSpec.choice(["a"])


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"type": "xml"},
        {"type": ["text"]},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        {"type": "regex", "regex": 5},
        {"type": "grammar"},
        {"type": "choice", "choice": [1]},
        "json_object",
    ],
)
def test_other_response_formats_are_refused(given: Any):
    with pytest.raises(RequestError):
        read_response_format(given)
