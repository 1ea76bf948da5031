"""Recorded passes in Triton's interpreter, which needs no GPU: tests/gpu/test_passes_on_cpu.py, in its own process."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
def test_recorded_passes_are_right_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu/test_passes_on_cpu.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "4 passed" in done.stdout
