"""After start-up nothing is compiled or captured, whatever is asked: in a model of its own in this process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from outrider.bench.llm_factory import LLMFactory
from outrider.bench.stalls import by_length, first_answers, mixed_requests
from outrider.testing.synthetic import synthetic_pair

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from tiny_block import tiny_block

pytestmark = pytest.mark.gpu

REQUESTS, MAX_LENGTH = 300, 4000


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("none", {}),
        ("suffix:k=5", {}),
        ("suffix:k=5", {"mode": "distribution"}),
        ("draft-model:model=synthetic,k=5", {}),
        ("draft-model:model=synthetic,k=3,beams=2", {}),
        ("block:model={head}", {}),
        ("block:model={head},tree=7", {}),
    ],
    ids=str,
)
def test_300_mixed_requests_compile_and_capture_nothing(drafter, options, capsys):
    pair = synthetic_pair("tiny", 2, 0.9, device="cuda", dtype=torch.bfloat16)
    drafter = drafter.format(head=tiny_block(pair.target))
    llm = LLMFactory(pair, cache_tokens=32_768, context=4096).llm(drafter, max_batch=4, **options)
    answers = first_answers(llm, mixed_requests(llm, REQUESTS, MAX_LENGTH))
    assert len(answers) == REQUESTS
    with capsys.disabled():
        print(*by_length(answers), f"{llm.late_work.device_allocations} allocations", sep="\n")
    assert llm.late_work.compilations == 0, llm.late_work.names
