"""Benchmarks of this repository, run as somebody would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def output_of(script: str, *options: str) -> str:
    """What a script in benchmarks/ prints, on one thread."""
    command = [sys.executable, str(ROOT / "benchmarks" / script), *options]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout
