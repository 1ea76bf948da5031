"""Runs a benchmark and keeps what it prints, with its command, commit, machine and versions.

    python benchmarks/record.py NAME [--commit ID] [--into FOLDER] -- benchmarks/cpu.py --model FILE.gguf

prints what the script prints, and writes NAME.json (to benchmarks/results) once it has ended well. On a machine without
a checkout --commit says what runs there, and --into where the file goes, to be brought back. Of files and folders that
are named, the last part alone is kept. `outrider bench ... --out FILE` keeps its own record.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from outrider.bench.machine import commit, machine_facts, versions, without_folders

FORMAT = "outrider-record/1"
RESULTS = Path(__file__).parent / "results"


def record(name: str, command: list[str], *, into: Path | None = None, of: str = "") -> Path:
    """command: a script, or -m and a module, and its arguments. of: the commit, where there is no checkout.

    Raises ValueError where no commit is known, CalledProcessError where the command fails: nothing is written then.
    """
    known = of or commit()
    if not known:
        raise ValueError("there is no checkout here: say with --commit which version runs")
    facts = {
        "format": FORMAT,
        "command": shlex.join(["python", *map(without_folders, command)]),
        "commit": known,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
    }
    file = (into or RESULTS) / f"{name}.json"
    text = json.dumps(facts | {"output": _output(command)}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def _output(command: list[str]) -> list[str]:
    """The lines that it prints, which are printed here as they come."""
    lines: list[str] = []
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(without_folders(line.rstrip("\n")))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return lines


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    command = words[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--commit", default="")
    parser.add_argument("--into", type=Path)
    given = parser.parse_args(words[:at])
    if not command:
        parser.error("what to run comes behind --, as in: record.py NAME -- benchmarks/cpu.py")
    sys.stdout.write(f"{record(given.name, command, into=given.into, of=given.commit)}\n")


if __name__ == "__main__":
    main()
