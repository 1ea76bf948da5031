"""Captured reads of a block head, on the CPU: which rows go into which pass, and what the plain module then writes."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool
from outrider.runners import draft_batch, graphed_reads
from outrider.runners.block_heads import BlockRunner
from outrider.runners.layout import lay_out, text_rows
from outrider.runners.native import NativeRunner
from outrider.testing.synthetic import synthetic_pair

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance"))
from tiny_block import block_config, random_block

LENGTHS = [150, 7, 90]
READS: list[tuple[list[tuple[int, int, int]], list[int]]] = [
    ([(0, 149, 1)], [32]),
    ([(0, 16, 32)], [32]),
    ([(2, 3, 33)], [64]),
    ([(1, 0, 7), (2, 15, 70)], [128]),
    ([(0, 31, 64), (1, 0, 7), (2, 33, 57)], [128]),
    ([(0, 0, 100), (1, 0, 7), (2, 2, 22)], [128, 32]),
    ([(0, 0, 150), (1, 0, 7), (2, 0, 90)], [128, 128]),
]
"""Texts, first positions and tokens that are read, and the rows of the passes."""


class Again:
    """Takes the place of a captured graph: its launches run again."""

    replayed: list[str]

    def __init__(self, work: Callable[[], None], pool: Any, name: str = "") -> None:
        self.work, self.name = work, name
        work()

    def replay(self) -> None:
        self.replayed.append(self.name)
        self.work()


def fill(pool: PagePool) -> None:
    """Texts of LENGTHS whose pages lie between those of the others."""
    for text in range(len(LENGTHS)):
        pool.open(text, ())
    for end in range(16, max(LENGTHS) + 16, 16):
        for text, length in enumerate(LENGTHS):
            pool.reserve(text, min(end, length))


def span(text: int, start: int, count: int) -> Span:
    return Span(text, start, (1,) * count, wanted=False)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> BlockRunner:
    """Of a head over random outputs; as on CUDA, but that nothing is captured yet, and no kernel fused."""
    Again.replayed = []
    monkeypatch.setattr(graphed_reads, "capture", Again)
    monkeypatch.setattr(graphed_reads, "ROWS", (32, 64, 128))
    target = NativeRunner(synthetic_pair("tiny", dtype=torch.float32).target, 512, context=256)
    head = random_block(block_config(target.model.decoder.config), target.model.decoder)
    target.keep_taps(head.config.taps)
    fill(target.pool)
    made = BlockRunner(target.model, head, lambda batch: pytest.fail("nothing is drafted"), tokens=5, graph_pool="pool")
    made.kept.features.copy_(torch.randn(made.kept.features.shape, generator=torch.Generator().manual_seed(5)))
    assert made.cpu is None
    return made


def written(runner: BlockRunner, spans: list[Span]) -> Tensor:
    """Keys and values of all layers after these reads alone, but for the scratch page."""
    caches = [part[: runner.model.scratch_slot] for cache in runner.layers.caches for part in cache]
    for part in caches:
        part.zero_()
    runner.read(spans)
    return torch.stack(caches)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_those_of_the_layout(seed: int):
    pool, rng = PagePool(24), random.Random(seed)
    fill(pool)
    spans = [span(text, start := rng.randrange(n), rng.randint(1, n - start)) for text, n in enumerate(LENGTHS)]
    layout = lay_out(spans, pool, torch.device("cpu"))
    assert np.array_equal(text_rows(spans, pool), torch.stack([layout.slots, layout.positions]).numpy())


@pytest.mark.parametrize(("reads", "passes"), READS, ids=str)
@torch.inference_mode()
def test_captured_reads_write_what_plain_calls_do(
    runner: BlockRunner, reads: list[tuple[int, int, int]], passes: list[int]
):
    spans = [span(*read) for read in reads]
    expected = written(runner, spans)
    assert list(runner.graphed_reads.capture()) == [128, 64, 32]
    found = written(runner, spans)
    assert Again.replayed == [f"a head's reads of {rows} rows" for rows in passes]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.flatten(2).any(-1).sum(1).tolist() == [sum(count for *_, count in reads)] * len(found)


@torch.inference_mode()
def test_capturing_writes_to_no_text(runner: BlockRunner, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draft_batch, "capture", lambda work, pool, name: None)
    expected = written(runner, [span(0, 0, 150)])
    said = list(runner.capture(1))
    assert said == ["a head's drafts for 1", *(f"a head's reads of {rows} rows" for rows in (128, 64, 32))]
    caches = torch.stack([part[: runner.model.scratch_slot] for cache in runner.layers.caches for part in cache])
    assert torch.equal(caches, expected)


def test_wide_outputs_have_smaller_passes(runner: BlockRunner, monkeypatch: pytest.MonkeyPatch):
    width = runner.kept.features[0].nbytes
    for most, sizes in ((1, [32]), (64 * width, [32, 64]), (128 * width, [32, 64, 128])):
        monkeypatch.setattr(graphed_reads, "MAX_BYTES", most)
        assert graphed_reads.GraphedReads(runner.read_rows, runner.model, None).sizes == sizes
