"""A file of measurements: a line that says what is measured and where, then one line for each measurement.

It is written as measurements come, so that an interrupted run leaves a sound file, and the same command continues it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError

FORMAT = "outrider-bench/1"
KINDS = ("offline", "serve", "peers")
Line = dict[str, Any]


@dataclass(slots=True)
class RunFile:
    """The measurements of one run, in memory and, where `path` is given, on disk."""

    header: Line
    path: Path | None = None
    lines: list[Line] = field(default_factory=list[Line])
    continued: bool = False

    def add(self, line: Line) -> None:
        self.lines.append(line)
        if self.path is not None:
            _append(self.path, line)

    def of(self, part: str) -> list[Line]:
        """The lines of one kind: `reference`, `measure`, ..."""
        return [line for line in self.lines if line["part"] == part]

    def find(self, part: str, **fields: Any) -> Line | None:
        """The line with these fields; None where it was not measured yet."""
        return next(
            (line for line in self.of(part) if all(line.get(name) == value for name, value in fields.items())), None
        )


def make_header(kind: str, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> Line:
    """facts: machine, versions, commit, command and the like. Unlike settings, they may differ if a run continues."""
    began = datetime.now(UTC).isoformat(timespec="seconds")
    return {"format": FORMAT, "kind": kind, "settings": dict(settings), **facts, "began": began}


def open_run(header: Line, path: Path | None) -> RunFile:
    """A new run, or the one in the file. ConfigError where the file holds another run, or cannot be written."""
    if path is None:
        return RunFile(header)
    path = path.expanduser()
    if path.exists() and path.stat().st_size:
        found = read_run(path)
        if (found.header["kind"], found.header["settings"]) != (header["kind"], json_like(header["settings"])):
            raise ConfigError(f"--out {path} holds another run: {_difference(found.header, header)}; name another file")
        _write(path, [found.header, *found.lines])  # without a last line that was cut
        return RunFile(found.header, path, found.lines, continued=True)
    _write(path, [header])
    return RunFile(header, path)


def read_run(path: Path) -> RunFile:
    """A run from its file; a last line that was cut is left out. ConfigError for what is no such file."""
    path = path.expanduser()
    try:
        rows = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else "") or error
        raise ConfigError(f"{path} cannot be read: {why}") from error
    lines: list[Line] = []
    for number, row in enumerate(rows, 1):
        try:
            lines.append(json.loads(row))
        except ValueError as error:
            if number != len(rows) or number == 1:
                raise ConfigError(f"{path}, line {number}: not JSON ({error})") from error
    header = lines[0] if lines else None
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("kind") not in KINDS:
        raise ConfigError(f"{path}: no file of `outrider bench --out` (its first line has no format {FORMAT!r})")
    return RunFile(header, path, lines[1:])


def json_like(value: Any) -> Any:
    """The value as it is after being written as JSON and read back."""
    return json.loads(json.dumps(value))


def _difference(old: Line, new: Line) -> str:
    if old["kind"] != new["kind"]:
        return f"it is of `{old['kind']}`"
    theirs, ours = old["settings"], json_like(new["settings"])
    name = next(key for key in {**theirs, **ours} if theirs.get(key) != ours.get(key))
    return f"its {name} is {theirs.get(name)!r}, not {ours.get(name)!r}"


def _write(path: Path, lines: list[Line]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(_text(line) for line in lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}") from error


def _append(path: Path, line: Line) -> None:
    try:
        with path.open("a", encoding="utf-8") as out:
            out.write(_text(line))
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror or error}") from error


def _text(line: Line) -> str:
    return json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n"
