"""Prompts to measure with: the built-in suites, and files in the layouts of known benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError

SUITES = ("chat", "multi-turn", "code", "mathematics", "summary", "retrieval", "translation", "edit", "json")
SUFFIXES = (".jsonl", ".json", ".txt")
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
SHAPES = (
    '{"prompt": TEXT}, {"messages": [...]}, {"turns": [TEXT, ...]} (MT-Bench, Spec-Bench, SPEED-Bench), '
    '{"task_id", "prompt"} (HumanEval) or {"question", "answer"} (GSM8K)'
)
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A conversation to answer, turn by turn: each turn but the first follows the answer to the one before."""

    id: str
    category: str
    turns: tuple[str, ...]
    """What the user says."""
    history: tuple[Message, ...] = ()
    """Messages before the first turn."""


def read_suite(name: str) -> list[BenchPrompt]:
    """The prompts of a built-in suite. ConfigError for a name that is none."""
    if name not in SUITES:
        raise ConfigError(f"no suite called {name!r}; choose from: {', '.join(SUITES)}, or all")
    text = (files("outrider.bench") / "suites" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [_from_record(json.loads(line), name, name, i) for i, line in enumerate(text.splitlines(), 1)]


def read_prompt_file(path: Path) -> list[BenchPrompt]:
    """The prompts of a .jsonl, .json (a list) or .txt file (one a line), in any layout of SHAPES.

    ConfigError where there are none, and for SPEED-Bench's public files, whose turns are placeholders.
    """
    path = path.expanduser()
    if not path.exists():
        raise ConfigError(f"--prompts {path}: No such file or directory")
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"--prompts {path}: give a {', '.join(SUFFIXES)} file; `datasets` writes others with to_json")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise ConfigError(f"--prompts {path}: {error.strerror or error}") from error
    found = [_from_record(record, where, path.stem, number) for number, where, record in _records(path, text)]
    if not found:
        raise ConfigError(f"{path}: no prompts in it; a record is {SHAPES}")
    return found


def select(prompts: Seq[BenchPrompt], limit: int | None) -> list[BenchPrompt]:
    """The first `limit` prompts of each category, in the order they came; None for all."""
    counts: dict[str, int] = {}
    chosen: list[BenchPrompt] = []
    for prompt in prompts:
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if limit is None or counts[prompt.category] <= limit:
            chosen.append(prompt)
    return chosen


def _records(path: Path, text: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(number, where it is, record) of a file."""
    if path.suffix == ".json":
        try:
            listed = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{path}: not JSON ({error})") from error
        if not isinstance(listed, list):
            raise ConfigError(f"{path}: no list of records; a record is {SHAPES}")
        for number, record in enumerate(listed, 1):
            yield number, f"{path}, record {number}", _checked(record, f"{path}, record {number}")
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would divide JSON at U+2028
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        if path.suffix == ".txt":
            yield number, where, {"prompt": line.strip()}
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error}); a line is {SHAPES}") from error
        yield number, where, _checked(record, where)


def _checked(record: Any, where: str) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: not a JSON object; a record is {SHAPES}")
    return record


def _from_record(record: dict[str, Any], where: str, stem: str, number: int) -> BenchPrompt:
    """A prompt from a record of any layout."""
    turns, history = _turns(record)
    if not turns:
        raise ConfigError(f"{where}: no prompt in it; a record is {SHAPES}")
    if any(PLACEHOLDER in turn for turn in turns):
        raise ConfigError(
            f"{where}: a placeholder of SPEED-Bench, whose public files hold no prompts; fetch the texts with the "
            "script that the dataset's card names, under its own licence, and give the file that it writes"
        )
    own = record.get("id") or record.get("question_id") or record.get("task_id") or number
    category = record.get("category") or record.get("kind") or ("humaneval" if _is_humaneval(record) else stem)
    return BenchPrompt(str(own), str(category), turns, history)


def _turns(record: dict[str, Any]) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    """What the user says, and the messages before; no turns where the record holds none."""
    given = record.get("turns")
    if isinstance(given, list) and given and all(isinstance(turn, str) and turn.strip() for turn in given):
        return tuple(given), ()
    if _is_humaneval(record):
        return (f"Complete this Python function.\n\n```python\n{record['prompt']}```",), ()
    if isinstance(record.get("question"), str) and "answer" in record:
        return (record["question"],), ()
    if isinstance(record.get("prompt"), str) and record["prompt"].strip():
        return (record["prompt"],), ()
    return _from_messages(record.get("messages"))


def _is_humaneval(record: dict[str, Any]) -> bool:
    return isinstance(record.get("prompt"), str) and "task_id" in record and "entry_point" in record


def _from_messages(given: Any) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    """The last message of the user, and all before it."""
    found: list[Message] = []
    for message in given if isinstance(given, list) else []:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return (), ()
        found.append({"role": str(message.get("role")), "content": message["content"]})
    while found and found[-1]["role"] != "user":
        found.pop()
    return ((found[-1]["content"],), tuple(found[:-1])) if found else ((), ())
