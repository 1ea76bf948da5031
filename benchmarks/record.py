"""Runs a benchmark and keeps what it prints, with its command, commit, machine and versions.

    python benchmarks/record.py NAME -- benchmarks/cpu.py --model FILE.gguf

writes benchmarks/results/NAME.json once the script has ended well. Arguments that name an existing file or folder are
kept by their last part alone. `outrider bench ... --out FILE` keeps its own record.
"""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from outrider.bench.machine import commit, machine_facts, versions

FORMAT = "outrider-record/1"
RESULTS = Path(__file__).parent / "results"


def record(name: str, command: list[str]) -> Path:
    """command: a script of this folder, and its arguments."""
    facts = {
        "format": FORMAT,
        "command": " ".join(["python", command[0], *map(_shown, command[1:])]),
        "commit": commit(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "versions": versions(),
    }
    done = subprocess.run([sys.executable, *command], stdout=subprocess.PIPE, text=True, check=True)
    file = RESULTS / f"{name}.json"
    text = json.dumps(facts | {"output": done.stdout.splitlines()}, indent=1, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def _shown(word: str) -> str:
    return Path(word).name if Path(word).is_absolute() and Path(word).exists() else word


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[2] != "--":
        sys.exit(__doc__)
    sys.stdout.write(f"{record(sys.argv[1], sys.argv[3:])}\n")
