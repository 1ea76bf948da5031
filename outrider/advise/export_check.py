"""Checks whether an engine takes exported arguments: the installed engine, else a recorded schema of its options."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.advise.export import Arguments, Export
from outrider.core.errors import ConfigError

FOLDER = Path(__file__).parent
TIMEOUT = 300
"""Max seconds of one question to an engine, its import included."""
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
}


@dataclass(frozen=True, slots=True)
class Checked:
    """What the arguments were checked against."""

    installed: bool
    version: str
    note: str = ""
    """Why an installed engine could not be asked; "" where there is nothing to say."""

    def __str__(self) -> str:
        return f"{'taken by the installed' if self.installed else 'as recorded of'} {self.version}{self.note}"


def check_export(export: Export, python: str = "") -> Checked:
    """ConfigError where the engine refuses the export's arguments. python: the engine's interpreter; "": this one."""
    if not export.arguments:
        return Checked(False, f"{export.engine}, told nothing")
    version, fault, note = _ask(export, python or sys.executable)
    if version is None:
        recorded = json.loads((FOLDER / "schemas" / f"{export.engine}.json").read_text(encoding="utf-8"))
        faults = schema_faults(export.arguments, recorded["schema"])
        version, fault = recorded["version"], "; ".join(faults)
        found = Checked(False, version, note)
    else:
        found = Checked(True, version)
    if fault:
        raise ConfigError(f"{version} does not take {json.dumps(export.arguments)}: {fault}")
    return found


def schema_faults(value: Any, schema: dict[str, Any], where: str = "it") -> list[str]:
    """What violates a JSON schema, one sentence each. Supports the part of JSON Schema that `schemas/` uses."""
    right = TYPES[schema["type"]]
    if not isinstance(value, right) or (isinstance(value, bool) and bool not in right):
        return [f"{where} must be of type {schema['type']}, got {value!r}"]
    faults: list[str] = []
    if "enum" in schema and value not in schema["enum"]:
        faults.append(f"{where} must be one of {', '.join(schema['enum'])}, got {value!r}")
    if isinstance(value, int | float) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        faults.append(f"{where} is out of range: {value}")
    if isinstance(value, dict):
        known: dict[str, Any] = schema["properties"]
        faults += [f"{where} lacks {name}" for name in schema["required"] if name not in value]
        faults += [f"{where} has no {name}" for name in value if name not in known]
        for name in value.keys() & known.keys():
            faults += schema_faults(value[name], known[name], name)
    return faults


def _ask(export: Export, python: str) -> tuple[str | None, str, str]:
    """(version, error, note): the installed engine's version, None where none could be asked; its complaint about the
    arguments, or ""; why an installed engine could not be asked, or ""."""
    if export.engine == "llama.cpp":
        return _ask_llama(export.arguments)
    words = [python, str(FOLDER / "engine_probe.py"), export.engine, json.dumps(export.arguments)]
    try:
        told = json.loads(_run(words)[0].splitlines()[-1])
    except OSError as error:
        raise ConfigError(f"--python {python}: {error.strerror or error}") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return None, "", f" (the installed one could not be asked: {type(error).__name__})"
    if told["version"] is None:
        return None, "", f" (the installed one could not be asked: {told['error']})" if told["error"] else ""
    return told["version"], told["error"], ""


def _ask_llama(arguments: Arguments) -> tuple[str | None, str, str]:
    """As `_ask`, by the output of `llama-server --help` and `--version`, which load no model."""
    found = shutil.which("llama-server")
    if found is None:
        return None, "", ""
    listed, version = "".join(_run([found, "--help"])), "".join(_run([found, "--version"]))
    said = re.search(r"version: .*", version)
    flags = set(re.findall(r"--[a-z0-9-]+", listed))
    missing = [f"--{name}" for name in arguments if f"--{name}" not in flags]
    kind = str(arguments["spec-type"])
    missing += [] if kind in listed else [f"--spec-type {kind}"]
    fault = f"its --help has no {', '.join(missing)}" if missing else ""
    return f"llama-server {said[0] if said else ''}".strip(), fault, ""


def _run(words: list[str]) -> tuple[str, str]:
    """What a program wrote to stdout and stderr."""
    done = subprocess.run(  # noqa: S603 - the Python that the user named, or the engine itself
        words, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    return done.stdout, done.stderr
