"""The plan against what an engine takes of a CUDA device, four models, each in a process of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan_memory.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("plan_memory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("shape", "drafter", "batch"),
    [
        ("tiny", "none", 8),
        ("smollm2-135m", "suffix", 16),
        ("smollm2-135m", "draft-model:model=DRAFT", 8),
        ("qwen-0.5b", "suffix", 32),
        ("llama-1b", "none", 8),
    ],
)
def test_what_an_engine_takes(script, shape, drafter, batch, tmp_path):
    target, spec = script.saved(shape, drafter, tmp_path, "cuda")
    torch.cuda.empty_cache()
    found = script.in_process(target, spec, "cuda", batch, 2048)
    print(shape, drafter, found)
    assert found["tokens"] == found["planned_tokens"]
    assert found["start"] == pytest.approx(found["planned"], rel=0.05), found
    assert found["peak"] <= 1.05 * found["planned_peak"], found
    assert found["workspace"] == pytest.approx(found["planned_workspace"], rel=0.15), found
