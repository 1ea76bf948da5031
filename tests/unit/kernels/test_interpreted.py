"""The Triton kernels in Triton's interpreter, which needs no GPU: the small cases of tests/gpu, a process each."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.parametrize(
    "part", ["fused_kernels and not paged", "fused_kernels and paged", "sample_kernel", "attention_bits", "settle"]
)
def test_the_kernels_are_right_in_the_interpreter(part):
    files = [
        f"tests/gpu/test_{name}.py"
        for name in ("fused_kernels", "sample_kernel", "attention_bits", "settle")
        if part.startswith(name)
    ]
    chosen = part.partition(" and ")[2]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command + (["-k", chosen] if chosen else []),
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
