"""Reads what `outrider advise` wrote: its `--out` file, or the object of `--json`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.advise.export import Choice
from outrider.advise.measured import Measured
from outrider.core.errors import ConfigError


def read_choice(file: Path, drafter: str = "") -> Choice:
    """The chosen drafter with its length; drafter "none" where the advice is not to speculate.

    drafter: another one to take instead, with its own best length where it was measured, else that of the advice.
    """
    data = _read(file)
    if "chosen" not in data:
        raise ConfigError(f"{file} is of an interrupted run of advise; the same command continues it")
    try:
        if drafter:
            return _measured(data, drafter) or _instead(read_choice(file), drafter)
        if data["chosen"] is None:
            return Choice(data["target"], "none", 0)
        name, length = data["chosen"]["drafter"], data["chosen"]["length"]
        temperature, batch = data["chosen"]["temperature"], data["chosen"]["batch"]
        found = next(Measured.from_json(each) for each in data["measured"] if each["drafter"] == name)
        best = length or found.best_length(temperature, batch)
        return Choice(data["target"], name, best, data.get("shipped", ""), adaptive=length is None)
    except (KeyError, TypeError, StopIteration, ValueError) as error:
        raise _foreign(file, error) from error


def _measured(data: dict[str, Any], drafter: str) -> Choice | None:
    """A drafter with its best length in the first cell; None where it was not measured."""
    for each in data["measured"]:
        if each["drafter"] == drafter:
            found = Measured.from_json(each)
            best = found.best_length(found.temperatures[0], found.batches[0])
            return Choice(data["target"], drafter, best, data.get("shipped", ""), adaptive=True)
    return None


def _instead(advised: Choice, drafter: str) -> Choice:
    return replace(advised, drafter=drafter, length=advised.length or 1)


def _read(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--from {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise _foreign(file, error) from error
    if not isinstance(data, dict) or "measured" not in data:
        raise _foreign(file, "no object with 'measured'")
    return data


def _foreign(file: Path, why: object) -> ConfigError:
    return ConfigError(f"--from {file}: not what advise writes with --out or --json ({why}); run outrider advise")
