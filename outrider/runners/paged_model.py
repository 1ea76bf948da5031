"""A native model's weights, paged cache and block tables: what every kind of pass over it shares."""

from __future__ import annotations

import mmap
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from outrider.kernels.batch import MAX_SEQUENCES
from outrider.kvcache.block_tables import BlockTables
from outrider.kvcache.pages import PagePool
from outrider.models.decoder import Decoder
from outrider.runners.reduced_head import OutputHeads
from outrider.runners.threads import ThreadChooser

LayerCache = tuple[Tensor, Tensor]
"""One layer's keys and values, each [slots, kv_heads, head_dim]."""


class PagedModel:
    """Data and memory; it runs nothing.

    Layers that a drafter adds (`add_layers`) lie in the same pages as the model's own: they are shared
    with the same prefixes and rolled back by the same length.
    """

    def __init__(self, decoder: Decoder, pool: PagePool, context: int, threads: ThreadChooser | None = None) -> None:
        config = decoder.config
        self.decoder, self.config, self.device, self.pool = decoder, config, decoder.device, pool
        self.context = context
        self.fused = False
        """Whether the fused CUDA kernels compute all that this decoder does."""
        self.threads = threads or ThreadChooser(())
        """Chooses the CPU threads of passes; by default they have torch's own number."""
        self.heads = OutputHeads(decoder)
        self.groups: list[LayerCache] = []
        """Keys and values by geometry, each [layers, slots, kv_heads, head_dim]: the model's own first."""
        self.caches = self.add_layers(len(config.layers), config.kv_heads, config.head_dim)
        self.taps: tuple[int, ...] = ()
        """Layers whose outputs every pass returns, side by side: [rows, taps * hidden]."""
        self.page_features = torch.empty(0, device=decoder.device)
        """[pages + 1, taps * hidden]: the tapped outputs at each full page's last token. A sequence that begins on
        shared pages finds there what comes before its first own token. The last row is scratch."""

    @cached_property
    def tables(self) -> BlockTables:
        """The sequences' block tables on the device, for kernels that read them there."""
        return BlockTables(self.pool, MAX_SEQUENCES, self.context, self.device)

    @property
    def scratch_slot(self) -> int:
        """Where rows that only pad a pass write: in one page more than the pool hands out."""
        return self.pool.count * self.pool.size

    @property
    def features_width(self) -> int:
        return len(self.taps) * self.config.hidden_size

    def tap(self, layers: Seq[int]) -> None:
        self.taps = tuple(layers)
        self.page_features = torch.zeros(
            self.pool.count + 1, self.features_width, dtype=self.decoder.dtype, device=self.device
        )

    def with_layers(self, layers: Seq[int]) -> PagedModel:
        """Some of the layers over the same pages and block tables: a smaller model that shares keys and values."""
        decoder, part = self.decoder, copy(self)
        config = replace(self.config, layers=tuple(self.config.layers[i] for i in layers))
        weights = replace(decoder.weights, layers=[decoder.weights.layers[i] for i in layers])
        part.decoder, part.config = Decoder(config, weights, decoder.dtype), config
        part.heads, part.taps = OutputHeads(part.decoder), ()
        part.caches = [self.caches[i] for i in layers]
        part.__dict__["tables"] = self.tables
        return part

    def add_layers(self, layers: int, kv_heads: int, head_dim: int) -> list[LayerCache]:
        """Room for so many layers' keys and values in every page."""
        shape = (layers, self.scratch_slot + self.pool.size, kv_heads, head_dim)
        keys, values = (_zeros(shape, self.decoder.dtype, self.device) for _ in range(2))
        self.groups.append((keys, values))
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy what every layer holds at some slots to others: int64 [M] both."""
        for group in self.groups:
            for cache in group:
                cache[:, destination] = cache[:, source]

    def clear(self, slots: slice) -> None:
        for group in self.groups:
            for cache in group:
                cache[:, slots] = 0

    def keep_page_ends(self, table_ids: Tensor, starts: Tensor, counts: Tensor, features: Tensor) -> None:
        """Keep the outputs at those of the first `counts` tokens from `starts` on that end a page.

        table_ids, starts, counts int64 [B]; features [B, W, taps * hidden].
        """
        size, column = self.pool.size, torch.arange(features.shape[1], device=self.device)
        positions = starts[:, None] + column  # [B, W]
        ends = (column < counts[:, None]) & (positions % size == size - 1)
        index = (positions // size).clamp(max=self.tables.width - 1)
        pages = self.tables.pages[table_ids].long().gather(1, index)
        self.page_features.index_copy_(
            0, torch.where(ends, pages, self.pool.count).flatten(), features.reshape(-1, features.shape[-1])
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU memory is taken only as it is written, so that a large cache costs nothing at start.

    And in small pages there: a sequence that begins where none was before would otherwise wait for 2 MB of
    zeros in every layer, which takes longer than to read a short prompt.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)
