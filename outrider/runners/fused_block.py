"""A block head's layers with the fused CUDA kernels: what `BlockHead` computes, in six launches a layer.

Queries and keys are in adjacent pairs (`rope.pair_rows`), and a norm's weight is in the matrix behind it, so what lies
in the pages is not what the plain head writes there: one of the two runs all of a head's passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.kernels.batch import MAX_WIDTH, AttentionBatch, AttentionWorkspace, RowPlaces
from outrider.kernels.triton_attention import attend_pages
from outrider.kernels.triton_linear import LinearWorkspace, linear, linear_rope
from outrider.kernels.triton_rope import locate_rows, rotate_and_store
from outrider.kernels.triton_rows import gate_rows, norm_rows
from outrider.kernels.triton_tiles import supports_linear
from outrider.models.heads.block import BlockHead
from outrider.models.heads.layers import HeadAttention, HeadLayer, RMSNorm
from outrider.models.rope import inverse_frequencies, pair_rows
from outrider.runners.attention import AttentionLayers
from outrider.runners.paged_model import LayerCache, PagedModel


def supports(head: BlockHead) -> bool:
    """Whether the fused kernels compute all that this head does."""
    config, dtype = head.config, head.fc.weight.dtype
    return (
        config.activation == "silu"
        and not config.out_bias
        and config.head_dim in (16, 32, 64, 128, 256)
        and dtype in (torch.bfloat16, torch.float16)
        and dtype == head.decoder.dtype
    )


@dataclass(frozen=True, slots=True)
class _Heads:
    """A product whose outputs are attention heads."""

    weight: Tensor
    bias: Tensor | None
    norms: Tensor | None  # float32 [heads, dim]: of those that are normed


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: _Heads
    """Of the rows of a block."""
    context: _Heads
    """Keys and values alone, of the target's outputs."""
    out: Tensor
    gate_up: Tensor
    down: Tensor


class FusedBlock:
    """Holds copies of a head's weights; the output head is the one that the head itself uses."""

    def __init__(self, head: BlockHead, model: PagedModel, layers: AttentionLayers, *, pdl: bool = True) -> None:
        """pdl: kernels begin while the one before ends."""
        self.head, self.model, self.layers, self.pdl = head, model, layers, pdl
        config = head.config
        self.eps, self.scratch = config.norm_eps, LinearWorkspace(model.device)
        self._layers = [_pack(cast(HeadLayer, layer), head.hidden_norm) for layer in head.layers]
        self._norm = head.norm.weight.float()
        self._head = cast(Any, head.output_head()).weight
        # padding rows have positions too, and blocks reach beyond the last one of a text
        positions = torch.arange(model.context + 2 * MAX_WIDTH + 64).float()
        angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
        both = torch.stack([angles.cos(), angles.sin()], -1) * config.rope.amplitude
        self.cos_sin = both.to(model.device)  # float32 [positions, dim / 2, 2]

    def locate(self, batch: AttentionBatch) -> RowPlaces:
        """Where the keys and values of a batch's rows go."""
        places = RowPlaces.empty(len(batch.depths), self.head.config.head_dim, self.model.device)
        page = self.model.pool.size
        locate_rows(batch, self.cos_sin, places, scratch_slot=self.model.scratch_slot, page=page, pdl=self.pdl)
        return places

    def places(self, slots: Tensor, positions: Tensor) -> RowPlaces:
        """The same for rows whose slots and positions are known: int64 [N] both."""
        return RowPlaces(slots, self.cos_sin[positions])

    def store(self, features: Tensor, places: RowPlaces) -> None:
        """Write keys and values of the target's tapped outputs [N, taps * hidden] to the pages."""
        config, fc = self.head.config, self.head.fc
        context = features.new_empty(len(features), config.hidden_size)
        self._linear(features.contiguous(), fc.weight, context, residual=fc.bias)
        nothing = features.new_empty(len(features), 0, config.head_dim)  # no queries
        for layer, cache in zip(self._layers, self.layers.caches, strict=True):
            self._store_heads(context, layer.context, nothing, cache, places)

    def forward(self, anchors: Tensor, batch: AttentionBatch, workspace: AttentionWorkspace | None) -> Tensor:
        """Anchors int64 [B] -> the final hidden states of their blocks, [B * block, hidden]"""
        config = self.head.config
        x, places = self.head.embed(anchors).flatten(0, 1), self.locate(batch)
        q = x.new_empty(len(x), config.heads, config.head_dim)
        attended, wide = torch.empty_like(q), x.new_empty(len(x), config.intermediate_size)
        for layer, cache in zip(self._layers, self.layers.caches, strict=True):
            self._store_heads(x, layer.qkv, q, cache, places)
            attend_pages(
                q, *cache, batch, attended, cast(AttentionWorkspace, workspace),
                scale=self.layers.scale, window=config.window, page=self.model.pool.size, pdl=self.pdl,
            )  # fmt: skip
            self._linear(attended.view(len(x), -1), layer.out, x, residual=x)
            self._linear(x, layer.gate_up, wide, normed=True, gated=True)
            self._linear(wide, layer.down, x, residual=x)
        out = torch.empty_like(x)
        norm_rows(x, out, self.eps, weight=self._norm, pdl=self.pdl)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, outputs], without the Markov head's part"""
        out = torch.empty(len(hidden), len(self._head), dtype=torch.float32, device=hidden.device)
        self._linear(hidden.contiguous(), self._head, out)
        return out

    def _store_heads(self, x: Tensor, heads: _Heads, q: Tensor, cache: LayerCache, places: RowPlaces) -> None:
        """Rows x [N, hidden] behind a norm: queries, rotated, to q; keys and values to the cache."""
        outputs, inputs = heads.weight.shape
        if heads.norms is None and supports_linear(outputs, inputs, len(x), False):
            linear_rope(
                x, heads.weight, q, cache, places, self.scratch, bias=heads.bias, eps=self.eps, pdl=self.pdl
            )  # fmt: skip
            return
        made = x.new_empty(len(x), outputs)
        self._linear(x, heads.weight, made, residual=heads.bias, normed=True)
        rotate_and_store(made, places, q, cache, norms=heads.norms, eps=self.eps, pdl=self.pdl)

    def _linear(
        self,
        x: Tensor,
        w: Tensor,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        normed: bool = False,
        gated: bool = False,
    ) -> None:
        """The fused kernel for up to 64 rows; beyond, the library's product between small kernels."""
        if supports_linear(out.shape[1], x.shape[1], len(x), gated):
            eps = self.eps if normed else None
            linear(x, w, out, self.scratch, residual=residual, eps=eps, gated=gated, pdl=self.pdl)
            return
        if normed:
            rows = torch.empty_like(x)
            norm_rows(x, rows, self.eps, pdl=self.pdl)
            x = rows
        if gated:
            both = x.new_empty(len(x), len(w))
            torch.mm(x, w.t(), out=both)
            gate_rows(both, out, pdl=self.pdl)
        elif residual is not None:
            torch.addmm(residual, x, w.t(), out=out)
        else:
            torch.mm(x, w.t(), out_dtype=out.dtype, out=out)


def _pack(layer: HeadLayer, hidden_norm: RMSNorm) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    inputs = cast(RMSNorm, layer.input_layernorm)
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    return _Layer(
        _heads(attention, parts, inputs),
        _heads(attention, parts[1:], hidden_norm),
        attention.o_proj.weight,
        _folded(gate_up, layer.post_attention_layernorm),
        mlp.down_proj.weight,
    )


def _heads(attention: HeadAttention, parts: list[nn.Linear], norm: RMSNorm) -> _Heads:
    """Queries, keys and values, or keys and values alone, behind a norm; all but values in pairs."""
    dim = attention.head_dim
    weights = [part.weight if part is parts[-1] else pair_rows(part.weight, dim) for part in parts]
    biases = [
        part.bias if part is parts[-1] else pair_rows(part.bias, dim) for part in parts if part.bias is not None
    ]  # fmt: skip
    norms: Tensor | None = None
    if attention.q_norm is not None and attention.k_norm is not None:
        rows = [(each.weight, len(part.weight) // dim) for each, part in _normed(attention) if part in parts]
        norms = torch.cat([pair_rows(weight[:, None], dim).view(1, dim).expand(count, -1) for weight, count in rows])
        norms = norms.float().contiguous()
    return _Heads(_folded(torch.cat(weights), norm), torch.cat(biases) if biases else None, norms)


def _normed(attention: HeadAttention) -> list[tuple[RMSNorm, nn.Linear]]:
    norms = cast(RMSNorm, attention.q_norm), cast(RMSNorm, attention.k_norm)
    return list(zip(norms, (attention.q_proj, attention.k_proj), strict=True))


def _folded(weight: Tensor, norm: RMSNorm) -> Tensor:
    """A matrix that takes the weight of the norm before it upon itself."""
    return (weight.float() * norm.weight.float()).to(weight.dtype)
