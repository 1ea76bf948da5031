"""Prompts from every kind of file, and what is said of files that hold none."""

import json

import pytest

from outrider.core.errors import ConfigError
from outrider.train.prompts import digest_of, read_prompts


def write(folder, name, *records):
    file = folder / name
    file.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return file


def texts(prompts):
    return [prompt.messages[-1]["content"] for prompt in prompts]


def test_every_shape_of_a_line_is_read(tmp_path):
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    file = write(
        tmp_path,
        "mixed.jsonl",
        {"prompt": " one "},
        {"messages": talk, "kind": "chat"},
        {"turns": ["first", "second"], "category": "writing"},
        "",
        {"messages": [*talk, {"role": "assistant", "content": "an answer"}]},
    )
    found = read_prompts(file)
    assert texts(found) == ["one", "c", "first"], "the last record equals the second without its answer"
    assert [prompt.kind for prompt in found] == ["mixed", "chat", "writing"]
    assert found[1].messages == tuple(talk)


def test_other_line_separators_are_part_of_a_prompt(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"prompt": "one\u2028two\x85three"}, ensure_ascii=False), encoding="utf-8")
    assert texts(read_prompts(file)) == ["one\u2028two\x85three"]


def test_text_files_and_folders(tmp_path):
    write(tmp_path, "b.txt", "two", "", "three")
    write(tmp_path, "a.jsonl", {"prompt": "one"}, {"prompt": "two"})
    write(tmp_path, "ignored.md", "four")
    assert texts(read_prompts(tmp_path)) == ["one", "two", "three"], "in the order of files, equal ones once"
    assert texts(read_prompts(tmp_path, limit=2)) == ["one", "two"]


def test_the_servers_log_of_prompts_is_read(tmp_path):
    def line(body, **more):
        fields = {"time": "2026-01-01T00:00:00", "level": "info", "event": "request", "route": "/v1/chat/completions"}
        return json.dumps(fields | ({} if body is None else {"body": body}) | more)

    chat = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]})
    file = write(
        tmp_path,
        "serve.log",
        line(None, event="listening"),
        line(chat),
        line(json.dumps({"prompt": "once upon"})),
        line(json.dumps({"input": "of responses"})),
        line(chat[:-5]),  # cut off: bodies in the log are bounded
        line(json.dumps({"model": "m"})),
    )
    assert texts(read_prompts(file)) == ["hello", "once upon", "of responses"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", "", ["no prompts in", "p.jsonl", '{"prompt": TEXT}']),
        ("p.jsonl", '{"prompt": "a"}\n{"pro', ["line 2", "not JSON"]),
        ("p.jsonl", "[1]", ["line 1", "not a JSON object"]),
        ("p.jsonl", '{"text": "a"}', ["line 1", "no prompt in it"]),
        ("p.jsonl", '{"prompt": ""}', ["line 1", "no prompt in it"]),
        ("p.txt", "\n \n", ["no prompts in"]),
    ],
)
def test_bad_files_are_named_with_what_would_work(tmp_path, name, content, words):
    file = write(tmp_path, name, content)
    with pytest.raises(ConfigError) as error:
        read_prompts(file)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="no prompts in"):
        read_prompts(tmp_path)
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(tmp_path)


def test_the_digest_tells_prompts_apart(tmp_path):
    one = read_prompts(write(tmp_path, "a.txt", "one", "two"))
    other = read_prompts(write(tmp_path, "b.txt", "one", "three"))
    assert digest_of(one) == digest_of(list(one))
    assert digest_of(one) != digest_of(other)
