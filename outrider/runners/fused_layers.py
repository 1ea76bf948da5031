"""Layers of drafting heads with the fused CUDA kernels: six launches per layer.

Queries and keys have their rotary dimensions in adjacent pairs (`rope.pair_rows`), and a norm's weight is folded into
the matrix behind it. So the pages hold other keys than the plain head writes: all of a head's passes must be run by one
of the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from outrider.kernels.batch import MAX_WIDTH, AttentionBatch, RowPlaces
from outrider.kernels.triton_linear import LinearWorkspace, linear, linear_rope
from outrider.kernels.triton_rope import locate_rows, rotate_and_store
from outrider.kernels.triton_rows import gate_rows, norm_rows
from outrider.kernels.triton_tiles import supports_linear
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.layers import HeadAttention, HeadLayer, RMSNorm
from outrider.models.rope import inverse_frequencies, pair_rows
from outrider.runners.attention import AttentionLayers
from outrider.runners.paged_model import LayerCache, PagedModel

AttendRows = Callable[[int, Tensor], Tensor]
"""(layer, queries [N, heads, dim]) -> [N, heads * dim]; keys and values of the rows are in the cache."""


def supports_layers(config: HeadConfig, dtype: torch.dtype, target: torch.dtype) -> bool:
    """Whether the fused kernels support layers of this configuration and dtype, beside a target of dtype `target`."""
    return (
        config.activation == "silu"
        and not config.out_bias
        and config.head_dim in (16, 32, 64, 128, 256)
        and dtype in (torch.bfloat16, torch.float16)
        and dtype == target
    )


@dataclass(frozen=True, slots=True)
class FusedHeads:
    """A projection whose outputs are attention heads."""

    weight: Tensor
    bias: Tensor | None
    norms: Tensor | None  # float32 [heads, dim]: the norms' weights, for heads that are normed
    normed: bool
    """Whether its input rows are normed first."""


@dataclass(frozen=True, slots=True)
class FusedLayer:
    qkv: FusedHeads
    out: Tensor
    gate_up: Tensor
    down: Tensor


class FusedLayers:
    """Runs layers: rotations, places in the pages, and products."""

    def __init__(self, config: HeadConfig, model: PagedModel, layers: AttentionLayers, *, pdl: bool = True) -> None:
        """pdl: a kernel begins while the one before it ends (programmatic dependent launch)."""
        self.config, self.model, self.layers, self.pdl = config, model, layers, pdl
        self.eps, self.scratch = config.norm_eps, LinearWorkspace(model.device)
        # padding rows have positions too, and drafts reach beyond the last one of a text
        positions = torch.arange(model.context + 2 * MAX_WIDTH + 64).float()
        angles = torch.outer(positions, inverse_frequencies(config.rope, config.head_dim))
        both = torch.stack([angles.cos(), angles.sin()], -1) * config.rope.amplitude
        self.cos_sin = both.to(model.device)  # float32 [positions, dim / 2, 2]

    def locate(self, batch: AttentionBatch) -> RowPlaces:
        """The places of the keys and values of a batch's rows."""
        places = RowPlaces.empty(len(batch.depths), self.config.head_dim, self.model.device)
        page = self.model.pool.size
        locate_rows(batch, self.cos_sin, places, scratch_slot=self.model.scratch_slot, page=page, pdl=self.pdl)
        return places

    def places(self, slots: Tensor, positions: Tensor) -> RowPlaces:
        """The places of rows whose slots and positions are known: int64 [N] both."""
        return RowPlaces(slots, self.cos_sin[positions])

    def run_layer(
        self, number: int, layer: FusedLayer, read: Tensor, x: Tensor, places: RowPlaces, attend: AttendRows
    ) -> Tensor:
        """One layer: its attention reads `read` [N, inputs], and x [N, hidden] is the residual stream -> [N, hidden]"""
        config = self.config
        q = x.new_empty(len(x), config.heads, config.head_dim)
        self.store_heads(read, layer.qkv, q, self.layers.caches[number], places)
        out, wide = torch.empty_like(x), x.new_empty(len(x), config.intermediate_size)
        self.linear(attend(number, q), layer.out, out, residual=x)
        self.linear(out, layer.gate_up, wide, normed=True, gated=True)
        self.linear(wide, layer.down, out, residual=out)
        return out

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [N, hidden] after an RMS norm with this weight, float32 [hidden]."""
        out = torch.empty_like(x)
        norm_rows(x, out, self.eps, weight=weight, pdl=self.pdl)
        return out

    def store_heads(self, x: Tensor, heads: FusedHeads, q: Tensor, cache: LayerCache, places: RowPlaces) -> None:
        """Project rows x [N, inputs], normed first or not: rotated queries go to q, keys and values to the cache."""
        outputs, inputs = heads.weight.shape
        if heads.norms is None and supports_linear(outputs, inputs, len(x), False):
            linear_rope(
                x, heads.weight, q, cache, places, self.scratch,
                bias=heads.bias, eps=self.eps if heads.normed else None, pdl=self.pdl,
            )  # fmt: skip
            return
        made = x.new_empty(len(x), outputs)
        self.linear(x, heads.weight, made, residual=heads.bias, normed=heads.normed)
        rotate_and_store(made, places, q, cache, norms=heads.norms, eps=self.eps, pdl=self.pdl)

    def linear(
        self,
        x: Tensor,
        w: Tensor,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        normed: bool = False,
        gated: bool = False,
    ) -> None:
        """A product by the fused kernel where it supports the shape (up to 64 rows), else by the library."""
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


def pack_layer(layer: HeadLayer, norm: RMSNorm | None) -> FusedLayer:
    """norm: the norm before its attention, to be folded in; None: it is not part of the layer."""
    attention, mlp = layer.self_attn, layer.mlp
    gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    return FusedLayer(
        pack_heads(attention, [attention.q_proj, attention.k_proj, attention.v_proj], norm),
        attention.o_proj.weight,
        folded(gate_up, layer.post_attention_layernorm),
        mlp.down_proj.weight,
    )


def pack_heads(attention: HeadAttention, parts: list[nn.Linear], norm: RMSNorm | None) -> FusedHeads:
    """Packed projections of queries, keys and values, or of the last two, behind `norm`; all but values in pairs."""
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
    weight = torch.cat(weights)
    weight = weight if norm is None else folded(weight, norm)
    return FusedHeads(weight, torch.cat(biases) if biases else None, norms, norm is not None)


def _normed(attention: HeadAttention) -> list[tuple[RMSNorm, nn.Linear]]:
    norms = cast(RMSNorm, attention.q_norm), cast(RMSNorm, attention.k_norm)
    return list(zip(norms, (attention.q_proj, attention.k_proj), strict=True))


def folded(weight: Tensor, norm: RMSNorm) -> Tensor:
    """The matrix `weight` with the weight of the norm before it folded in."""
    return (weight.float() * norm.weight.float()).to(weight.dtype)
