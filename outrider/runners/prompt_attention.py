"""A prompt being read on CUDA: the decoder's own pass, its attention by the prompt kernel."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.sequence import Span
from outrider.kernels.triton_prompt import attend_prompt, prompt_tiles
from outrider.kvcache.block_tables import BlockTables
from outrider.runners.layout import Layout

if TYPE_CHECKING:
    from outrider.runners.native import NativeRunner


class PromptAttention:
    """One pass's view of the cache, for spans that are chains: what `native._Attend` says, in one kernel a layer."""

    def __init__(self, target: NativeRunner, tables: BlockTables, spans: Seq[Span], layout: Layout) -> None:
        self.caches, self.slots, self.page = target.caches, layout.slots, target.pool.size
        self.config, self.tables = target.decoder.config, tables
        table_ids = tables.table_ids(span.seq_id for span in spans)
        tiles = [
            tile
            for table_id, span, rows in zip(table_ids, spans, layout.rows, strict=True)
            for tile in prompt_tiles(table_id, span.start, rows.start, span.width)
        ]
        self.tiles = torch.tensor(tiles, dtype=torch.int64).pin_memory().to(target.device, non_blocking=True)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        (keys, values), config = self.caches[layer], self.config
        keys.index_copy_(0, self.slots, k)
        values.index_copy_(0, self.slots, v)
        q = q.contiguous()
        out = torch.empty_like(q)
        attend_prompt(
            q, keys, values, self.tables.pages, self.tiles, out,
            scale=config.attention_scale, softcap=config.attention_softcap or 0.0,
            window=config.layers[layer].window or 0, page=self.page,
        )  # fmt: skip
        return out.view(len(q), -1)
