"""A block head catches up with its target by captured passes: the keys and values of the plain calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool
from outrider.runners import graphed_reads
from outrider.runners.block_heads import BlockRunner
from outrider.runners.paged_model import PagedModel
from outrider.testing.synthetic import synthetic_pair

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from tiny_block import block_config, random_block

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
CLOSE = 1e-5 if INTERPRETED else 0.02  # of the largest number: products of other numbers of rows may round otherwise
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "biased": {"qkv_bias": True}}
if not INTERPRETED:  # where each row would be a program of its own, which takes its time
    KINDS["normed"] = {"qk_norm": True}
SCALES = [1] if INTERPRETED else [1, 8]
"""Passes have 32 and 64 times so many rows: products of more than 64 are a library's, which needs a GPU."""
LENGTHS = [64, 33, 61]
"""Tokens of each text, times that, in pages that lie between those of the others."""
Spans = list[tuple[int, int, int]]
"""Each: text, first position, end."""
READS: dict[str, Spans] = {
    "a few rows": [(0, 0, 20)],
    "in the midst": [(0, 37, 52)],
    "several texts": [(0, 16, 40), (1, 0, 33), (2, 31, 32)],
    "more than the largest": [(0, 0, 64), (1, 5, 33), (2, 0, 61)],
}
WHOLE: dict[str, Spans] = {
    "one pass": [(0, 3, 35)],
    "two texts": [(0, 0, 31), (1, 0, 33)],
    "split": [(0, 10, 64), (1, 0, 33), (2, 0, 9)],
}
"""Whose rows fill passes."""
kinds = pytest.mark.parametrize("runner", [(kind, scale) for kind in KINDS for scale in SCALES], indirect=True, ids=str)


class Again:
    """Takes the place of a captured graph in Triton's interpreter: its launches run again."""

    def __init__(self, work: Callable[[], None], pool: Any, name: str = "") -> None:
        self.replay = work


@pytest.fixture
def runner(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlockRunner:
    """Nothing is captured yet."""
    from outrider.runners.fused_block import FusedBlock

    kind, scale = request.param
    monkeypatch.setattr(graphed_reads, "ROWS", (32 * scale, 64 * scale))
    if INTERPRETED:
        monkeypatch.setattr(graphed_reads, "capture", Again)
    decoder = synthetic_pair("tiny", dtype=DTYPE, device=DEVICE, seed=3).target
    options = {"heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96, "block_size": 6}
    head = random_block(block_config(decoder.config, **options | KINDS[kind]), decoder).to(DEVICE, DTYPE)
    model = PagedModel(decoder, PagePool(16 * scale), 64 * scale)
    model.fused = True
    model.keep_taps(head.config.taps)
    for text in range(len(LENGTHS)):
        model.pool.open(text, ())
    for end in range(16, 64 * scale + 1, 16):
        for text, length in enumerate(LENGTHS):
            model.pool.reserve(text, min(end, length * scale))
    graph_pool = None if INTERPRETED else torch.cuda.graph_pool_handle()
    made = BlockRunner(model, head, lambda batch: pytest.fail("nothing is drafted"), tokens=6, graph_pool=graph_pool)
    made.fused = FusedBlock(head, model, made.layers, pdl=not INTERPRETED)
    made.kept.features.copy_(torch.randn(made.kept.features.shape, generator=torch.Generator().manual_seed(5)))
    return made


def scaled(runner: BlockRunner, spans: Spans) -> Spans:
    scale = runner.model.context // 64
    return [(text, start * scale, end * scale) for text, start, end in spans]


def written(runner: BlockRunner, reads: Seq[Spans]) -> Tensor:
    """Keys and values of all layers after these reads alone: [2 * layers, slots, kv_heads * dim]"""
    caches = [part[: runner.model.scratch_slot] for cache in runner.layers.caches for part in cache]
    for part in caches:
        part.zero_()
    for spans in reads:
        runner.read([Span(text, start, (1,) * (end - start), wanted=False) for text, start, end in spans])
    return torch.stack(caches).flatten(2)


@kinds
@pytest.mark.parametrize("spans", READS.values(), ids=READS)
@torch.inference_mode()
def test_captured_reads_write_what_plain_calls_do(runner: BlockRunner, spans: Spans):
    spans = scaled(runner, spans)
    expected = written(runner, [[span] for span in spans])
    assert len(list(runner.graphed_reads.capture())) == 2
    found = written(runner, [spans])
    assert found.any(-1).sum(1).tolist() == [sum(end - start for _, start, end in spans)] * len(found)
    assert float((found - expected).abs().max()) < CLOSE * float(expected.abs().max())
    assert torch.equal(found, written(runner, [spans]))


@kinds
@pytest.mark.parametrize("spans", WHOLE.values(), ids=WHOLE)
@torch.inference_mode()
def test_whole_passes_have_the_bits_of_plain_calls(runner: BlockRunner, spans: Spans):
    spans, (half, most) = scaled(runner, spans), runner.graphed_reads.sizes
    rows = [(text, position, position + 1) for text, start, end in spans for position in range(start, end)]
    passes = [rows[i : i + most] for i in range(0, len(rows), most)]
    assert {len(each) for each in passes} <= {half, most}
    expected = written(runner, passes)
    assert len(list(runner.graphed_reads.capture())) == 2
    assert torch.equal(written(runner, [spans]), expected)
