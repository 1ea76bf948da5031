"""Attention of a pass that is not captured: the reference on any device, and the prompt kernel on CUDA.

Both write each layer's keys and values to the pages of the pass's spans, then attend.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.sequence import Span
from outrider.kernels.attention import attend_block, attend_rows
from outrider.runners.layout import Layout, key_ranges
from outrider.runners.paged_model import LayerCache, PagedModel

PROMPT_ROWS = 32  # a span of so many rows or more is a prompt being read; its rows share their keys


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """The layers that attend: their caches, and the parameters of their scores."""

    caches: Seq[LayerCache]
    windows: Seq[int]
    """For each layer, the number of last positions that a row sees; 0: all."""
    scale: float
    softcap: float = 0.0
    skip: int = 0
    """The number of first positions of a text that are seen by their own rows alone, see `Head.skip`."""

    @staticmethod
    def of_model(model: PagedModel) -> AttentionLayers:
        config = model.config
        windows = [layer.window or 0 for layer in config.layers]
        return AttentionLayers(model.caches, windows, config.attention_scale, config.attention_softcap or 0.0)


class PassAttention(Protocol):
    """What a decoder or a head calls once per layer, see `models.decoder.Attend`."""

    checks_rows: bool
    """Whether NaN in one row can reach another, so that rows must be checked afterwards."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def attention_of(model: PagedModel, layers: AttentionLayers, spans: Seq[Span], layout: Layout) -> PassAttention:
    """The attention of a pass over these spans: by the prompt kernel where it supports them, else by the reference."""
    if model.fused and all(span.draft.is_chain for span in spans):
        return PromptAttention(model, layers, spans, layout)
    return ReferenceAttention(model, layers, spans, layout)


class ReferenceAttention:
    """Attention in plain PyTorch, span by span; chains and trees."""

    checks_rows = True

    def __init__(self, model: PagedModel, layers: AttentionLayers, spans: Seq[Span], layout: Layout) -> None:
        self.layers, self.slots = layers, layout.slots
        self.ranges = key_ranges(spans, layout, model.pool, model.device)
        self.shared = model.device.type != "cpu"
        """Whether the rows of a span share their keys however few they are."""
        self.prompt_rows = PROMPT_ROWS if not model.decoder.weights.packed else 1 << 30

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layers, ranges = self.layers, self.ranges
        (keys, values), window = layers.caches[layer], layers.windows[layer]
        keys.index_copy_(0, self.slots, k)
        values.index_copy_(0, self.slots, v)
        masks = [part.mask(window, q.dtype, layers.skip) for part in ranges]
        rows = [q] if len(ranges) == 1 else [q[part.rows] for part in ranges]
        out = [
            (attend_block if self.shared or len(own) >= self.prompt_rows else attend_rows)(
                own, keys[part.keys], values[part.keys], mask, layers.scale, layers.softcap
            )
            for own, part, mask in zip(rows, ranges, masks, strict=True)
        ]
        return (out[0] if len(out) == 1 else torch.cat(out)).reshape(q.shape[0], -1)


class PromptAttention:
    """One kernel per layer, for spans that are chains. Keys that a row does not see have no effect on it, even NaN."""

    checks_rows = False

    def __init__(self, model: PagedModel, layers: AttentionLayers, spans: Seq[Span], layout: Layout) -> None:
        from outrider.kernels.triton_prompt import attend_prompt, prompt_tiles

        self.layers, self.slots, self.page = layers, layout.slots, model.pool.size
        self.tables, self.attend_prompt = model.tables, attend_prompt
        table_ids = model.tables.table_ids([span.seq_id for span in spans])
        tiles = [
            tile
            for table_id, span, rows in zip(table_ids, spans, layout.rows, strict=True)
            for tile in prompt_tiles(table_id, span.start, rows.start, span.width)
        ]
        self.tiles = torch.tensor(tiles, dtype=torch.int64).pin_memory().to(model.device, non_blocking=True)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self.layers.caches[layer]
        keys.index_copy_(0, self.slots, k)
        values.index_copy_(0, self.slots, v)
        return self.attend(layer, q.contiguous())

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """q [N, heads, dim], contiguous, over keys and values already in the cache: [N, heads * dim]"""
        layers = self.layers
        keys, values = layers.caches[layer]
        out = torch.empty_like(q)
        self.attend_prompt(
            q, keys, values, self.tables.pages, self.tiles, out,
            scale=layers.scale, softcap=layers.softcap, window=layers.windows[layer], skip=layers.skip,
            page=self.page,
        )  # fmt: skip
        return out.view(len(q), -1)
