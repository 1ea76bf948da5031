"""A block head's layers with the fused CUDA kernels: what `BlockHead` computes, see fused_layers.py."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, RowPlaces
from outrider.kernels.triton_attention import attend_pages
from outrider.kernels.triton_heads import embed_blocks
from outrider.models.heads.block import BlockHead
from outrider.models.heads.layers import HeadLayer, RMSNorm
from outrider.runners.attention import AttentionLayers
from outrider.runners.fused_layers import FusedLayers, pack_heads, pack_layer, supports_layers
from outrider.runners.paged_model import PagedModel


def supports(head: BlockHead) -> bool:
    """Whether the fused kernels compute all that this head does."""
    return supports_layers(head.config, head.fc.weight.dtype, head.decoder.dtype)


class FusedBlock(FusedLayers):
    """Holds copies of a head's weights; the output head is the one that the head itself uses."""

    def __init__(self, head: BlockHead, model: PagedModel, layers: AttentionLayers, *, pdl: bool = True) -> None:
        """pdl: a kernel begins while the one before it ends (programmatic dependent launch)."""
        super().__init__(head.config, model, layers, pdl=pdl)
        self.head = head
        own = cast("list[HeadLayer]", list(head.layers))
        self._layers = [pack_layer(layer, cast(RMSNorm, layer.input_layernorm)) for layer in own]
        self._context = [
            pack_heads(each.self_attn, [each.self_attn.k_proj, each.self_attn.v_proj], head.hidden_norm) for each in own
        ]
        """For each layer, the projection of the target's outputs to keys and values."""
        self._norm = head.norm.weight.float()
        self._head = cast(Any, head.output_head()).weight
        own = head.embed_tokens
        self._embedding = head.decoder.weights.embedding if own is None else own.weight
        self._mask = head.embed(torch.zeros(1, dtype=torch.int64, device=model.device))[0, -1].detach().clone()
        """The input embedding of a token to be drafted."""

    def store(self, features: Tensor, places: RowPlaces) -> None:
        """Write keys and values of the target's tapped outputs [N, taps * hidden] to the pages."""
        fc = self.head.fc
        context = features.new_empty(len(features), self.config.hidden_size)
        self.linear(features.contiguous(), fc.weight, context, residual=fc.bias)
        nothing = features.new_empty(len(features), 0, self.config.head_dim)  # no queries
        for heads, cache in zip(self._context, self.layers.caches, strict=True):
            self.store_heads(context, heads, nothing, cache, places)

    def forward(self, anchors: Tensor, batch: AttentionBatch, workspace: AttentionWorkspace | None) -> Tensor:
        """Anchors int64 [B] -> the final hidden states of their blocks, [B * block, hidden]: all rows are real."""
        count, device = len(batch.depths), self.model.device
        x = self._mask.new_empty(count, self.config.hidden_size)
        places = RowPlaces.empty(count, self.config.head_dim, device)
        embed_blocks(
            self._embedding, self._mask, anchors, batch, self.cos_sin, x, places,
            page=self.model.pool.size, pdl=self.pdl,
        )  # fmt: skip
        attended = x.new_empty(len(x), self.config.heads, self.config.head_dim)

        def attend(layer: int, q: Tensor) -> Tensor:
            attend_pages(
                q, *self.layers.caches[layer], batch, attended, cast(AttentionWorkspace, workspace),
                scale=self.layers.scale, window=self.config.window, page=self.model.pool.size, pdl=self.pdl,
            )  # fmt: skip
            return attended.view(len(x), -1)

        for number, layer in enumerate(self._layers):
            x = self.run_layer(number, layer, x, x, places, attend)
        return self.normed(x, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, outputs], without the Markov head's part"""
        out = torch.empty(len(hidden), len(self._head), dtype=torch.float32, device=hidden.device)
        self.linear(hidden.contiguous(), self._head, out)
        return out
