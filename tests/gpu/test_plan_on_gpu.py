"""The plan against what an engine takes of a CUDA device at start, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from outrider.plan.estimate import DRIVER
from outrider.plan.forecast import PlanOptions, make_forecast
from outrider.testing.synthetic import synthetic_pair

pytestmark = pytest.mark.gpu

START = """
import json, sys, torch
def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free
torch.zeros(1, device="cuda")
before, seen = used(), []
from outrider.llm import LLM
from outrider.loading import memory
measure = memory.measure_workspace
def noted(*given):
    seen.append(measure(*given))
    return seen[-1]
memory.measure_workspace = noted
folder, drafter, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
llm = LLM(folder, drafter=drafter, max_batch=batch, context=2048, device="cuda", adaptive=False)
prompts = [[(7 * i + k) % 97 for k in range(1000)] for i in range(batch)]
took = used() - before
llm.generate(prompts, max_tokens=32, ignore_eos=True, progress=False)
print(json.dumps({"took": took, "served": used() - before, "tokens": llm.loaded.memory.tokens, "workspace": seen[0]}))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name in ("tiny", "smollm2-135m"):
        synthetic_pair(name, layers=2, device="cuda").save(root / name)
    torch.cuda.empty_cache()
    return root


@pytest.mark.parametrize(
    ("name", "drafter", "batch"),
    [
        ("tiny", "none", 8),
        ("smollm2-135m", "suffix", 16),
        ("smollm2-135m", "draft-model:model={draft}", 8),
    ],
)
def test_what_an_engine_takes_at_start(folders, name, drafter, batch):
    target, draft = str(folders / name / "target"), str(folders / name / "draft")
    spec = drafter.format(draft=draft)
    done = subprocess.run(
        [sys.executable, "-c", START, target, spec, str(batch)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    plan = make_forecast(target, spec, PlanOptions(device="cuda", max_batch=batch, context=2048))
    assert found["tokens"] == plan.tokens
    assert DRIVER + found["took"] == pytest.approx(plan.at_start, rel=0.05)
    assert DRIVER + found["served"] <= 1.05 * plan.peak
    assert found["workspace"] == pytest.approx(plan.models[0].kept_free, rel=0.15)
