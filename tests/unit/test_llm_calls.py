"""Python as people type it: parameters by name and by prompt, batched chat, closing, progress, and what is printed."""

from __future__ import annotations

import gc
import io
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_first_calls import SHORT, llm

import outrider
from outrider.core.errors import OutriderError, RequestError
from outrider.core.sampling import OTHER_NAMES, SamplingParams
from outrider.engine.arguments import SAMPLING_FIELDS, check_roles
from outrider.engine.events import Event
from outrider.engine.progress_line import ProgressLine, is_shown
from outrider.llm import LLM
from outrider.loading.load import LoadedModel
from outrider.testing.toy import ToyRunner


def test_sampling_fields_may_be_given_by_name():
    made = llm()
    expected = made.generate("hi", SHORT).tokens
    assert made.generate("hi", max_tokens=3, ignore_eos=True).tokens == expected
    assert made.chat("hi", max_tokens=3, ignore_eos=True).tokens == made.chat("hi", SHORT).tokens
    assert len([t for e in made.stream("hi", max_tokens=3, ignore_eos=True) for t in e.tokens]) == 3
    assert len(made.compare("hi", max_tokens=3, ignore_eos=True).plain.tokens) == 3
    assert len(made.generate("hi", SHORT, max_tokens=2).tokens) == 2, "a name replaces the field"


def test_each_prompt_may_have_its_own_parameters():
    made = llm()
    params = [replace(SHORT, max_tokens=n) for n in (2, 5, 3)]
    results = made.generate(["a", "b", "c"], params)
    assert [len(each.tokens) for each in results] == [2, 5, 3]
    assert [each.tokens for each in results] == [made.generate(p, q).tokens for p, q in zip("abc", params, strict=True)]
    assert [len(each.tokens) for each in made.chat(["a", "b", "c"], params)] == [2, 5, 3]


def test_several_conversations_are_answered_together():
    made = llm()
    first = [{"role": "user", "content": "a"}]
    results = made.chat([first, [*first, {"role": "assistant", "content": "b"}]], SHORT)
    assert [len(each.tokens) for each in results] == [3, 3]
    made.chat(["a"], SHORT)
    assert made.tokenizer.chats[-1] == first  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda it: it.generate(["a", "b"], [SHORT] * 3), ["3 SamplingParams for 2 prompts"]),
        (lambda it: it.generate(["a", "b"], [SHORT, {}]), ["SamplingParams, or a list of them", "{}"]),
        (lambda it: it.generate("a", max_new_tokens=3), ["no option 'max_new_tokens'", "did you mean max_tokens?"]),
        (lambda it: it.generate("a", temprature=3), ["did you mean temperature?"]),
        (lambda it: it.generate("a", max_tokens=0), ["max_tokens must be at least 1"]),
        (lambda it: it.chat([[{"role": "user", "content": "a"}], 3]), ["list of messages", "got 3"]),
    ],
)
def test_what_is_not_right_is_told_what_would_be(call: Any, words: list[str]):
    made = llm()
    with pytest.raises(RequestError) as raised:
        call(made)
    for word in words:
        assert word in str(raised.value)
    assert not made.engine.busy


def test_other_engines_names_lead_to_fields_there_are():
    assert set(OTHER_NAMES.values()) <= set(SAMPLING_FIELDS)
    assert not set(OTHER_NAMES) & set(SAMPLING_FIELDS)
    with pytest.raises(RequestError, match="SamplingParams has no max_new_tokens; it is called max_tokens here"):
        SamplingParams(max_new_tokens=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError):
        SamplingParams(nonsense=3)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(("role", "hint"), [("usr", "did you mean 'user'?"), ("king", "it is one of system, ")])
def test_a_role_nobody_knows_is_refused(role: str, hint: str):
    with pytest.raises(RequestError, match=f"message 1 has the role '{role}'; {re.escape(hint)}"):
        check_roles([{"role": "user"}, {"role": role}], lambda: "{{ message.role }}")
    check_roles([{"role": "ipython"}], lambda: "{% if message.role == 'ipython' %}")


def test_closing_frees_the_model_and_ends_all_calls():
    runner = ToyRunner()
    loaded = LoadedModel("toy", Path("toy"), runner, llm().tokenizer, "float32")
    with LLM(loaded, adaptive=False) as made:
        stream = made.stream("hi", SHORT)
        next(stream)
        assert "toy, float32 on cpu, drafter suffix" in repr(made)
    assert runner.pool.used == 0, "the stream was cancelled"
    freed = weakref.ref(runner)
    del loaded, runner
    gc.collect()
    assert freed() is None
    assert repr(made) == "<LLM: closed>"
    asks: list[Any] = [
        lambda: made.generate("hi"),
        lambda: made.chat("hi"),
        lambda: next(made.stream("hi")),
        lambda: made.compare("hi"),
        lambda: made.score_prompt("hi"),
        lambda: made.stats,
    ]
    for ask in asks:
        with pytest.raises(OutriderError, match="this LLM is closed; make a new one"):
            ask()
    stream.close()
    made.close()
    assert made.get_tokenizer() is made.tokenizer


def test_the_progress_of_a_batch_is_drawn(capsys: pytest.CaptureFixture[str]):
    made = llm()
    made.generate(["a", "b", "c"], SHORT, progress=True)
    drawn = capsys.readouterr().err
    assert re.fullmatch(r"(\r\[[#-]{24}\] \d/3, \d+ tok/s(, \d+ s left)? *)+\n", drawn)
    assert "[########################] 3/3" in drawn
    made.generate(["a", "b"], SHORT)
    made.generate("a", SHORT, progress=True)
    made.generate([], SHORT, progress=True)
    assert capsys.readouterr().err == "", "no terminal, or no batch"
    assert (is_shown(None, 2), is_shown(True, 2), is_shown(True, 1), is_shown(False, 2)) == (False, True, False, False)


def test_a_progress_line_that_shrinks_leaves_nothing_over(monkeypatch: pytest.MonkeyPatch):
    out, clock = io.StringIO(), iter([0.0, 1.0, 1000.0])
    monkeypatch.setattr("outrider.engine.progress_line.time.perf_counter", lambda: next(clock))
    line = ProgressLine(2, out)
    line.add(Event(0, tokens=(1,) * 1000))
    line.add(Event(0, tokens=(1,), finish="stop"))
    assert out.getvalue() == (
        "\r[------------------------] 0/2, 1000 tok/s\r[############------------] 1/2, 1 tok/s, 1000 s left"
    )


def test_results_are_short_to_read():
    made = llm()
    result = made.generate("hi", max_tokens=120, n=2, seed=3, ignore_eos=True)
    assert result.token_ids == result.tokens
    assert result.stats.tau == result.stats.all.tau > 0
    assert (result.stats.alpha, result.stats.gamma) == (result.stats.all.alpha, result.stats.all.gamma)
    assert re.fullmatch(r"<Result: '.*\.\.\.', 120 tokens, length, τ \d+\.\d\d, 1 others>", repr(result), re.DOTALL)
    assert re.fullmatch(
        r"<Stats: 120 tokens, \d+ passes, α \d\.\d\d, γ \d+\.\d, τ \d+\.\d\d, \S+ tok/s>", repr(result.stats)
    )
    both = made.compare("hi", SHORT)
    assert re.fullmatch(r"<Comparison: identical, speed-up \d+\.\d\dx>", repr(both))
    other = replace(both, plain=replace(both.plain, tokens=(*both.plain.tokens[:2], 63)))
    assert repr(other).startswith("<Comparison: first difference at token 2, ")
    for each in (made, result, result.stats, both):
        assert len(repr(each)) < 250


def test_html_keeps_the_colours_of_its_theme():
    both = llm("prompt-lookup").compare("abab", max_tokens=40, ignore_eos=True)
    held_back = replace(both.speculative, text=both.speculative.text + "<end>")
    for shown in (both._repr_html_(), held_back._repr_html_()):
        assert not re.search(r"[^-]color:|#[0-9a-fA-F]{3,6}\b", shown), "text is in the theme's own colour"
        for shade in re.findall(r"background:([^\"]+)", shown):
            assert shade == "transparent" or re.fullmatch(r"rgba\(\d+,\d+,\d+,\.[34]\d\)", shade)
    assert held_back._repr_html_().count("&lt;end&gt;") == 1
    assert both.speculative._repr_html_() in both._repr_html_()
    for word in ("<td>plain</td>", "<td>speculative</td>", "identical, speed-up"):
        assert word in both._repr_html_()


def test_dir_shows_what_there_is():
    assert set(outrider.__all__) <= set(dir(outrider))
    assert all(hasattr(outrider, name) for name in dir(outrider))
    assert "AsyncLLM" in dir(outrider)
