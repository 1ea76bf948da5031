"""Keeps the results of a proof on disk, so that an interrupted proof continues where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from outrider.core.errors import ConfigError, reason
from outrider.prove.checks import Check

FILE = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class Task:
    """A part of a proof. Its checks depend on the proof's settings alone."""

    key: str
    run: Callable[[], Iterable[Check]]


class Journal:
    """A file with one line for each finished task. A file of a proof with another subject is started anew."""

    def __init__(self, folder: Path, subject: dict[str, Any]) -> None:
        self.file = folder / FILE
        self.digest = sha256(json.dumps(subject, sort_keys=True, default=str).encode()).hexdigest()
        self.done: dict[str, list[Check]] = {}
        self._read()

    def add(self, key: str, checks: Seq[Check]) -> None:
        self.done[key] = list(checks)
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({"key": key, "checks": [asdict(check) for check in checks]}, allow_nan=False) + "\n")

    def close(self) -> None:
        """Delete the file, since the proof is complete: a later proof starts anew."""
        self.file.unlink(missing_ok=True)

    def _read(self) -> None:
        lines = [json.dumps({"proof": self.digest})]
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            old = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
            for line in old[1:] if old[:1] == lines else ():
                record = _record(line)
                if record is not None:
                    self.done[record["key"]] = [Check(**check) for check in record["checks"]]
                    lines.append(line)
            self.file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self.file}: {reason(error)}; delete it, or name another folder with --out") from error


def run_tasks(tasks: Seq[Task], journal: Journal, tell: Callable[[str, int, int], None]) -> list[Check]:
    """The checks of all tasks, in order. Tasks that the journal has are not run again.

    tell: called before each task that runs, with its key, the number of tasks before it, and the number of all tasks.
    """
    for at, task in enumerate(tasks):
        if task.key not in journal.done:
            tell(task.key, at, len(tasks))
            journal.add(task.key, list(task.run()))
    return [check for task in tasks for check in journal.done[task.key]]


def _record(line: str) -> dict[str, Any] | None:
    """A line of the journal; None for one that was cut while it was written."""
    try:
        return json.loads(line)
    except ValueError:
        return None
