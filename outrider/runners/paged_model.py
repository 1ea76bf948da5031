"""A native model's weights, paged cache and block tables: what every kind of pass over it shares."""

from __future__ import annotations

import mmap
from collections.abc import Sequence as Seq
from copy import copy
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.kernels.batch import MAX_SEQUENCES
from outrider.kvcache.block_tables import BlockTables
from outrider.kvcache.pages import PagePool
from outrider.models.decoder import Decoder
from outrider.runners.reduced_head import OutputHeads
from outrider.runners.threads import ThreadChooser

LayerCache = tuple[Tensor, Tensor]
"""One layer's keys and values, each [slots, kv_heads, head_dim]."""


class TappedPages(NamedTuple):
    """Every cached token and the tapped outputs there, by slot: a head reads them when it is asked to draft."""

    tokens: Tensor  # int64 [slots]
    features: Tensor  # [slots, taps * hidden]

    def store(self, slots: Tensor, tokens: Tensor, features: Tensor) -> None:
        """Store rows: slots and tokens int64 [N], features [N, taps * hidden]."""
        self.tokens.index_copy_(0, slots, tokens.clamp(min=0))  # negative: padding of a draft
        self.features.index_copy_(0, slots, features)


class PagedModel:
    """Data and memory; it runs nothing.

    Layers that a drafter adds (`add_layers`) lie in the same pages as the model's own: they are shared with the same
    prefixes and rolled back by the same length.
    """

    def __init__(self, decoder: Decoder, pool: PagePool, context: int, threads: ThreadChooser | None = None) -> None:
        config = decoder.config
        self.decoder, self.config, self.device, self.pool = decoder, config, decoder.device, pool
        self.context = context
        self.fused = False
        """Whether the fused CUDA kernels compute all that this decoder does."""
        self.threads = threads or ThreadChooser(())
        """Chooses the number of CPU threads of passes; by default torch's own."""
        self.heads = OutputHeads(decoder)
        self.groups: list[LayerCache] = []
        """Keys and values by geometry, each [layers, slots, kv_heads, head_dim]: the model's own first."""
        self.caches = self.add_layers(len(config.layers), config.kv_heads, config.head_dim)
        self.taps: tuple[int, ...] = ()
        """The layers whose outputs passes read out, side by side: [rows, taps * hidden]."""
        self.returns_taps = False
        """Whether passes return these outputs."""
        self.kept: TappedPages | None = None
        """Where passes keep these outputs; None: they do not."""

    @cached_property
    def tables(self) -> BlockTables:
        """The sequences' block tables on the device, for kernels that read them there."""
        return BlockTables(self.pool, MAX_SEQUENCES, self.context, self.device)

    @property
    def scratch_slot(self) -> int:
        """The first slot of the scratch page, where padding rows write: one page more than the pool hands out."""
        return self.pool.count * self.pool.size

    @property
    def tapping(self) -> tuple[tuple[int, ...], bool]:
        """What passes store of tapped layers: passes captured before this changed must not be replayed."""
        return self.taps, self.kept is not None

    @property
    def features_width(self) -> int:
        return len(self.taps) * self.config.hidden_size

    def tap(self, layers: Seq[int]) -> None:
        """Let passes return these layers' outputs; ConfigError where others are kept."""
        self._tap(layers, () if self.kept is None else self.taps)
        self.returns_taps = bool(layers)

    def keep_taps(self, layers: Seq[int]) -> None:
        """Let passes keep these layers' outputs in the pages of what they read; ConfigError where others are tapped."""
        self._tap(layers, self.taps if self.kept is not None or self.returns_taps else ())
        if self.kept is None:
            slots = self.scratch_slot + self.pool.size
            features = _zeros((slots, self.features_width), self.decoder.dtype, self.device)
            self.kept = TappedPages(_zeros((slots,), torch.int64, self.device), features)
            # moved and cleared with keys and values
            self.groups += [(each, each) for each in (self.kept.tokens.view(1, -1, 1, 1), features[None, :, None])]

    def _tap(self, layers: Seq[int], others: tuple[int, ...]) -> None:
        """others: layers that are tapped already."""
        if layers and others and tuple(layers) != others:
            raise ConfigError(
                f"layers {list(others)} of the target are tapped, and a second drafter reads {list(layers)}; use "
                "drafters whose heads read the same layers, or one of them"
            )
        self.taps = tuple(layers) or others

    def with_layers(self, layers: Seq[int]) -> PagedModel:
        """Some of the layers over the same pages and block tables: a smaller model that shares keys and values."""
        decoder, part = self.decoder, copy(self)
        config = replace(self.config, layers=tuple(self.config.layers[i] for i in layers))
        weights = replace(decoder.weights, layers=[decoder.weights.layers[i] for i in layers])
        part.decoder, part.config = Decoder(config, weights, decoder.dtype), config
        part.heads, part.taps, part.returns_taps, part.kept = OutputHeads(part.decoder), (), False, None
        part.caches = [self.caches[i] for i in layers]
        part.__dict__["tables"] = self.tables
        return part

    def add_layers(self, layers: int, kv_heads: int, head_dim: int) -> list[LayerCache]:
        """Allocate memory for so many layers' keys and values in every page; returns the cache of each layer."""
        shape = (layers, self.scratch_slot + self.pool.size, kv_heads, head_dim)
        keys, values = (_zeros(shape, self.decoder.dtype, self.device) for _ in range(2))
        self.groups.append((keys, values))
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy what every layer holds at some slots to others: int64 [M] both."""
        for group in self.groups:
            moved = [cache[:, source] for cache in group]  # all are read before any is written
            for cache, new in zip(group, moved, strict=True):
                cache[:, destination] = new

    def clear(self, slots: slice) -> None:
        for group in self.groups:
            for cache in group:
                cache[:, slots] = 0


def tapped_pages(model: PagedModel) -> TappedPages:
    """Where a model's passes keep tapped outputs; ValueError where they do not."""
    if model.kept is None:
        raise ValueError("a head reads what its target keeps: call keep_taps of the target first")
    return model.kept


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On the CPU memory is committed only as it is written, so that a large cache costs nothing at start.

    Huge pages are off there: a sequence that begins in unused pages would otherwise wait for 2 MB of zeros in every
    layer, which takes longer than to read a short prompt.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, max(1, prod(shape) * dtype.itemsize))
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)
