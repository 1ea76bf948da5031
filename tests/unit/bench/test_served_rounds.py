"""benchmarks/served_rounds.py at small sizes: every engine has a speed, and `auto` says what it chose."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_batch_is_served_by_every_engine():
    options = ["--batches", "2", "--standing", "0.9", "--texts", "2", "--lookups", "--plans", "1"]
    command = [sys.executable, str(ROOT / "benchmarks" / "served_rounds.py"), *options]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    _, row, *plans = done.stdout.splitlines()
    speeds, chosen = re.fullmatch(r" +2 +0.9 +\d+((?: +[\d.]+){3})  (.*)", row).groups()  # pyright: ignore[reportOptionalMemberAccess]
    seven, three, _ = map(float, speeds.split())
    assert seven > three > 1  # by the clock of the stand-ins: nearly all stands
    assert re.match(r"[a-z+]+ \d+ \d+%", chosen)
    assert len(plans) == 1
