"""The Triton kernels in Triton's interpreter, which needs no GPU: the small cases of tests/gpu, a process each."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = [  # file, which of its tests, what pytest says of them
    ("fused_kernels", "not paged", " passed"),
    ("fused_kernels", "paged", " passed"),
    ("sample_kernel", "", " passed"),
    ("attention_bits", "", " passed"),
    ("accept", "", " passed"),
    ("narrow_head", "kernel", " passed"),
    ("passes_on_cpu", "", "4 passed"),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")
@pytest.mark.parametrize(("name", "chosen", "said"), PARTS)
def test_the_kernels_are_right_in_the_interpreter(name, chosen, said):
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"tests/gpu/test_{name}.py"]
    done = subprocess.run(
        command + (["-k", chosen] if chosen else []),
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert said in done.stdout
