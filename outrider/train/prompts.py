"""Prompts from files: .jsonl, .txt, or the log that `outrider serve --log-prompts --log-format json` writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError

SUFFIXES = (".jsonl", ".log", ".txt")
SHAPES = '{"prompt": TEXT}, {"messages": [...]} or {"turns": [TEXT, ...]}'


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to answer. Its last message is the user's."""

    messages: tuple[dict[str, str], ...]
    kind: str
    """What it is about, for reports by kind: its `kind` or `category`, or the name of its file."""


def read_prompts(path: Path, limit: int | None = None) -> list[ChatPrompt]:
    """The prompts of a file, or of all .jsonl, .log and .txt files of a folder; equal ones once.

    Of `turns` the first is the prompt, since those after it follow an answer. Raises ConfigError where a file cannot be
    read or there is no prompt.
    """
    path = path.expanduser()
    if path.is_dir():
        files = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
    elif path.is_file():
        files = [path]
    else:
        raise ConfigError(f"no prompts at {path}: there is no such file or folder")
    found: dict[str, ChatPrompt] = {}
    for file in files:
        for prompt in _read_file(file):
            found.setdefault(json.dumps(prompt.messages), prompt)
    if not found:
        kinds = ", ".join(SUFFIXES)
        raise ConfigError(
            f"no prompts in {path}: give a {kinds} file or a folder of them; a line of .jsonl is {SHAPES}"
        )
    return list(found.values())[:limit]


def digest_of(prompts: list[ChatPrompt]) -> str:
    """A digest by which a resumed collection knows that its prompts are the same."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt.messages).encode())
    return digest.hexdigest()[:16]


def _read_file(file: Path) -> Iterator[ChatPrompt]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # splitlines would divide JSON at U+2028
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if file.suffix == ".txt":
            yield ChatPrompt(({"role": "user", "content": line.strip()},), file.stem)
            continue
        prompt = _read_record(line, file, number)
        if prompt is not None:
            yield prompt


def _read_record(line: str, file: Path, number: int) -> ChatPrompt | None:
    """The prompt in one line of JSON; None for a line of the server's log that holds none."""
    record = _parse(line, file, number)
    kind = str(record.get("kind") or record.get("category") or file.stem)
    if "event" in record and "level" in record:  # a line of the server's log; `body` is a request as it came
        try:
            record = json.loads(record.get("body") or "null")
        except ValueError:  # longer than what a log line holds
            return None
        if not isinstance(record, dict):
            return None
    messages = _messages(record)
    if messages is None:
        if "body" in line:
            return None
        raise ConfigError(f"{file}, line {number}: no prompt in it; a line is {SHAPES}")
    return ChatPrompt(messages, kind)


def _parse(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{file}, line {number}: not JSON ({error}); a line is {SHAPES}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{file}, line {number}: not a JSON object; a line is {SHAPES}")
    return record


def _messages(record: dict[str, Any]) -> tuple[dict[str, str], ...] | None:
    """The conversation of a record up to the user's last message; None where there is none."""
    turns, text = record.get("turns"), record.get("prompt", record.get("input"))
    if isinstance(turns, list) and turns:
        text = turns[0]
    if isinstance(text, str) and text.strip():
        return ({"role": "user", "content": text.strip()},)
    found: list[dict[str, str]] = []
    given = record.get("messages", record.get("input"))
    for message in given if isinstance(given, list) else []:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return None
        found.append({"role": str(message.get("role")), "content": message["content"]})
    while found and found[-1]["role"] != "user":
        found.pop()
    return tuple(found) or None
