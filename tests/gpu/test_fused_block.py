"""A block head by the fused kernels against the plain module: keys and values of a context, blocks, logits."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.kvcache.pages import PagePool
from outrider.models.heads.block import BlockHead
from outrider.runners.attention import AttentionLayers
from outrider.runners.draft_batch import BatchAttention, DraftBatch, HeadShape, attention_workspace
from outrider.runners.paged_model import PagedModel
from outrider.testing.synthetic import synthetic_pair

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from tiny_block import block_config, random_block

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("few_programs")]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, DTYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
CLOSE = 2e-4 if INTERPRETED else 0.06  # of numbers of about 1
KINDS: dict[str, dict[str, Any]] = {
    "dspark": {"draft_vocab_size": 300},
    "normed": {"qk_norm": True, "sample_from_anchor": False},
    "causal": {"causal": True, "qkv_bias": True, "bias": True, "window": 24},
}
LENGTHS = [1, 16, 37]
"""Tokens before the anchor of each text."""


@pytest.fixture
def head(request: pytest.FixtureRequest) -> BlockHead:
    decoder = synthetic_pair("tiny", dtype=DTYPE, device=DEVICE, seed=3).target
    options = {"heads": 4, "kv_heads": 2, "head_dim": 16, "intermediate_size": 96, "own_mask": True, "block_size": 6}
    config = block_config(decoder.config, **options | KINDS[request.param])
    return random_block(config, decoder).to(DEVICE, DTYPE)


def outputs(head: BlockHead, *, fused: bool) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of blocks behind texts that were read in two pieces."""
    config, size = head.config, len(LENGTHS)
    model = PagedModel(head.decoder, PagePool(40), 256)
    model.fused = True
    model.tap(config.taps)
    caches = model.add_layers(config.layers, config.kv_heads, config.head_dim)
    layers = AttentionLayers(caches, [config.window] * config.layers, head.scale)
    shape = HeadShape(config.heads, config.kv_heads, config.head_dim, head.scale)
    for i, length in enumerate(LENGTHS):
        model.pool.open(i, ())
        model.pool.reserve(i, length + config.block_size)
    batch = DraftBatch(model, size, None, sampled=False)
    batch.fill(model.tables.table_ids(range(size)))
    g = torch.Generator().manual_seed(7)
    features = torch.randn(size, max(LENGTHS), model.features_width, generator=g).to(DEVICE, DTYPE)
    lengths = torch.tensor(LENGTHS, device=DEVICE)
    full = torch.full((size, config.block_size), (1 << config.block_size) - 1, device=DEVICE)
    column = torch.arange(config.block_size, device=DEVICE).expand(size, -1)
    block = batch.attention_batch(
        shape, config.block_size, lengths, tree=((2 << column) - 1 if config.causal else full, column)
    )
    pieces = [
        (features[:, first:last].flatten(0, 1), batch.attention_batch(
            shape, last - first, torch.full_like(lengths, first), (lengths - first).clamp(0, last - first)
        ))
        for first, last in ((0, 20), (20, max(LENGTHS)))
    ]  # fmt: skip
    run = by_kernels if fused else by_module
    return run(head, model, layers, pieces, block, attention_workspace(model, shape))


ANCHORS = (5, 7, 300)


def by_kernels(head, model, layers, pieces, block, workspace) -> tuple[Tensor, Tensor]:
    from outrider.runners.fused_block import FusedBlock

    tried = FusedBlock(head, model, layers, pdl=not INTERPRETED)
    for features, rows in pieces:
        tried.store(features, tried.locate(rows))
    hidden = tried.forward(torch.tensor(ANCHORS, device=DEVICE), block, workspace)
    hidden = hidden.view(len(ANCHORS), block.width, -1)[:, -head.drafts :]
    return hidden, tried.logits(hidden.flatten(0, 1))


def by_module(head, model, layers, pieces, block, workspace) -> tuple[Tensor, Tensor]:
    for features, rows in pieces:
        store = BatchAttention(model, layers, rows, None)
        for layer, (k, v) in enumerate(head.keys_values(head.context(features), store.positions)):
            store.store(layer, k, v)
    anchors = torch.tensor(ANCHORS, device=DEVICE)
    hidden = head(anchors, block.starts, PlainAttention(model, layers, block, None))
    return hidden, head.logits(hidden.flatten(0, 1))


class PlainAttention(BatchAttention):
    """By the reference of the paged kernel."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from outrider.kernels.attention import attend_pages

        self.store(layer, k, v)
        out = torch.empty_like(q)
        attend_pages(
            q, *self.layers.caches[layer], self.batch, out, scale=self.layers.scale, window=self.layers.windows[layer]
        )
        return out.view(len(q), -1)


@pytest.mark.parametrize("head", KINDS, indirect=True)
@torch.inference_mode()
def test_fused_layers_are_the_plain_ones(head: BlockHead):
    (hidden, logits), (expected, judged) = (outputs(head, fused=fused) for fused in (True, False))
    assert float((hidden - expected).abs().max()) < CLOSE * float(expected.abs().max())
    assert float((logits - judged).abs().max()) < CLOSE * float(judged.abs().max())
