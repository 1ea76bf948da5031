"""The soak itself, for a few seconds: `make soak` runs it for minutes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parent / "soak.py"


@pytest.mark.slow
def test_a_short_soak_leaves_nothing():
    command = [sys.executable, str(SOAK), "--minutes", "0.3", "--cases", "30", "--clients", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"'finished': (\d+)", done.stdout)
    assert found
    assert int(found[1]) > 20
    assert "; 0 problems" in done.stdout
