"""Prompts to measure with: suites, and the layouts of known benchmarks."""

from __future__ import annotations

import json

import pytest

from outrider.bench.prompts import SUITES, BenchPrompt, read_prompt_file, read_suite, select
from outrider.core.errors import ConfigError

LAYOUTS = {
    "mt_bench": (
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."], "reference": ["a", "b"]},
        BenchPrompt("81", "writing", ("Write.", "Again.")),
    ),
    "spec_bench": (
        {"question_id": 241, "category": "translation", "turns": ["Translate."], "reference": ["x"]},
        BenchPrompt("241", "translation", ("Translate.",)),
    ),
    "speed_bench": (
        {"question_id": "a1", "category": "coding", "sub_category": "bugs", "turns": ["Fix it."], "source": "s"}
        | {"src_id": "7", "difficulty": "hard", "multiturn": False},
        BenchPrompt("a1", "coding", ("Fix it.",)),
    ),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "canonical_solution": "", "test": ""},
        BenchPrompt("HumanEval/0", "humaneval", ("Complete this Python function.\n\n```python\ndef f():\n```",)),
    ),
    "gsm8k": ({"question": "2 + 2?", "answer": "#### 4"}, BenchPrompt("1", "gsm8k", ("2 + 2?",))),
    "plain": ({"prompt": "Hello\n"}, BenchPrompt("1", "plain", ("Hello\n",))),
    "messages": (
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}], "kind": "k"},
        BenchPrompt("1", "k", ("Hi",), ({"role": "system", "content": "Be brief."},)),
    ),
}


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_at_least_ten_different_prompts(suite):
    prompts = read_suite(suite)
    assert len({prompt.turns for prompt in prompts}) == len({prompt.id for prompt in prompts}) == len(prompts) >= 10
    assert {prompt.category for prompt in prompts} == {suite}
    assert all(len(prompt.turns) > 1 for prompt in prompts) == (suite == "multi-turn")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_known_layouts_are_read_directly(tmp_path, name, suffix):
    record, expected = LAYOUTS[name]
    file = tmp_path / f"{name}{suffix}"
    file.write_text(json.dumps([record] if suffix == ".json" else record))
    assert read_prompt_file(file) == [expected]


def test_placeholders_of_speed_bench_are_refused_with_the_reason(tmp_path):
    file = tmp_path / "qualitative.jsonl"
    turn = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
    file.write_text(json.dumps({"question_id": "1", "category": "coding", "turns": [turn]}))
    with pytest.raises(ConfigError, match=r"line 1: a placeholder of SPEED-Bench.*fetch the texts"):
        read_prompt_file(file)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.jsonl", '{"other": 1}\n', "line 1: no prompt in it"),
        ("a.jsonl", '{"prompt": "x"}\n[1]\n', "line 2: not a JSON object"),
        ("a.jsonl", "{", "line 1: not JSON"),
        ("a.jsonl", '{"turns": ["a", 3]}', "no prompt in it"),
        ("a.json", '{"prompt": "x"}', "no list of records"),
        ("a.txt", "\n\n", "no prompts in it"),
        ("a.parquet", "", "to_json"),
    ],
)
def test_what_is_no_file_of_prompts_is_refused(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_prompt_file(tmp_path / name)


def test_a_file_that_is_not_there_is_said_to_be_missing(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_prompt_file(tmp_path / "nowhere")


def test_lines_of_text_and_the_first_of_each_category(tmp_path):
    (tmp_path / "own.txt").write_text("one\n\n two \nthree\n")
    prompts = read_prompt_file(tmp_path / "own.txt")
    assert [prompt.turns for prompt in prompts] == [("one",), ("two",), ("three",)]
    other = BenchPrompt("x", "other", ("four",))
    assert [p.turns[0] for p in select([*prompts, other], 2)] == ["one", "two", "four"]
    assert select(prompts, None) == prompts
    with pytest.raises(ConfigError, match="no suite called 'chats'"):
        read_suite("chats")
