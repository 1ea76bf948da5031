"""More prompts than the kernels take in one pass are read in several, and each as if alone."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from conformance_models import make_model, save
from testbed import VOCAB

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Span
from outrider.models.load import load_decoder
from outrider.runners import native, paged_model
from outrider.runners.attention import ReferenceAttention
from outrider.runners.native import NativeRunner

MAX_SEQUENCES = 2


class TabledAttention(ReferenceAttention):
    """The reference, which takes its rows of the block tables as the kernel does."""

    def __init__(self, model: Any, layers: Any, spans: Seq[Span], layout: Any) -> None:
        super().__init__(model, layers, spans, layout)
        model.tables.table_ids([span.seq_id for span in spans])


@pytest.fixture
def runner(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> NativeRunner:
    """A runner whose kernels take two sequences."""
    monkeypatch.setattr(native, "MAX_SEQUENCES", MAX_SEQUENCES)
    monkeypatch.setattr(paged_model, "MAX_SEQUENCES", MAX_SEQUENCES)
    monkeypatch.setattr(native, "attention_of", TabledAttention)
    made = NativeRunner(load_decoder(save(make_model("llama"), tmp_path), device="cpu"), 512)
    made.model.fused = True
    return made


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("taps", [(), (0, 1)])
def test_they_score_as_one_by_one(runner: NativeRunner, count: int, taps: tuple[int, ...]):
    runner.tap(taps)
    rng = random.Random(count)
    texts = [[rng.randrange(1, VOCAB) for _ in range(9 + 5 * i)] for i in range(count)]
    spans: list[Span] = []
    for seq_id, text in enumerate([*texts, *texts]):  # all once more, to be scored one by one
        i = seq_id % count
        runner.pool.open(seq_id, text, str(seq_id))
        assert runner.pool.reserve(seq_id, len(text) + 4)
        spans.append(Span(seq_id, 0, tuple(text), Draft((1, 2)) if i == 1 else EMPTY, wanted=i != 2))
    together = runner.score(spans[:count])
    alone = [runner.score([span]) for span in spans[count:]]
    assert together.spans == spans[:count]
    torch.testing.assert_close(together.logits, torch.cat([each.logits for each in alone]), rtol=1e-5, atol=1e-5)
    assert (together.features is not None) == bool(taps)
    for ours, theirs in zip(together.features or (), alone, strict=bool(taps)):
        (expected,) = theirs.features or ()
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
