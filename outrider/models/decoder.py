"""The native decoder: one definition for all model families, controlled by its configuration.

It takes a flat batch of tokens and knows nothing of sequences, caches or masks: the `Attend` it
is given decides what a row attends to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.models.config import Activation, DecoderConfig
from outrider.models.linear import LinearOp
from outrider.models.rope import RopeTables, apply_rope
from outrider.native.tensors import BlockTensor

ACTIVATION_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
MAX_SERIAL_ELEMENTS = 16_384  # elements up to which torch runs an elementwise operation on one thread


class Attend(Protocol):
    """Stores this layer's keys and values and computes attention over what each row may attend to.

    Scale, soft cap and windows are in the decoder's config (`attention_scale`,
    `attention_softcap`, `layers[i].window`).
    """

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, heads, dim], k and v [N, kv_heads, dim], RoPE applied -> [N, heads * dim]

        All in the decoder's dtype. q, k and v are views, to read or copy; the result is contiguous.
        Dimensions of q and k are in pairs (see `rope.pair_rows`), which changes no score.
        """
        ...


class Norm:
    """Root mean square norm over the last dimension, computed in float32.

    On the CPU it is a few small operations, which cost a third of F.rms_norm there and keep a
    row's bits independent of other rows. Elsewhere F.rms_norm is one kernel.
    """

    __slots__ = ("_dtype", "_eps", "_scaled_eps", "plain_weight", "weight")

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> None:
        """weight: float32 [dim] or, for a weight per head, [heads, dim]. dtype: of the output."""
        self.weight, self._eps, self._dtype, self._scaled_eps = weight, eps, dtype, None
        self.plain_weight = weight
        """The weight that normalized rows are multiplied by; `weight` may include a further factor."""
        if weight.device.type == "cpu":
            # A row's length is sqrt(dim) times its root mean square; weight and eps absorb the factor.
            dim = weight.shape[-1]
            self.weight, self._scaled_eps = weight * math.sqrt(dim), torch.tensor([eps * dim])

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float()
        if self._scaled_eps is None:
            normed = F.rms_norm(x, x.shape[-1:], None, self._eps) * self.weight
        else:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            normed = (x * self.weight).div_(torch.addcmul(self._scaled_eps, length, length).sqrt_())
        return normed if self._dtype is torch.float32 else normed.to(self._dtype)


@dataclass(slots=True, eq=False)
class Layer:
    """One layer's weights. Queries, keys and values are one linear layer, gate and up another."""

    attention_norm: Norm
    qkv: LinearOp
    out: LinearOp
    mlp_norm: Norm
    gate_up: LinearOp
    down: LinearOp
    qk_norm: Norm | None = None
    """Over [heads + kv_heads, dim], each head with its own weight."""
    post_attention_norm: Norm | None = None
    post_mlp_norm: Norm | None = None


@dataclass(slots=True, eq=False)
class Weights:
    """All weights of a decoder."""

    table: Tensor | BlockTensor
    """The embedding [vocab, hidden], as floats or in blocks."""
    layers: list[Layer]
    norm: Norm
    head: LinearOp
    packed: bool = False
    """Linear layers are packed: they are row-invariant; the residual stream is float32."""
    row_block: int = 1
    """Rows that the linear layers compute at a time, see `linear.PACKED_ROWS`."""

    @property
    def device(self) -> torch.device:
        return self.table.device if isinstance(self.table, Tensor) else torch.device("cpu")

    @property
    def embedding(self) -> Tensor:
        """The embedding as floats [vocab, hidden]: dequantised anew each time where it is in blocks."""
        table = self.table
        return table if isinstance(table, Tensor) else table.rows(torch.arange(table.shape[0]))

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [N] -> [N, hidden]"""
        return F.embedding(ids, self.table) if isinstance(self.table, Tensor) else self.table.rows(ids)


class Decoder:
    """A decoder-only transformer over plain tensors. Callers choose the autograd mode.

    In packed mode every row of `forward` and `logits` has the same bits whatever other rows are in
    the batch, as long as `attend` keeps to that too.
    """

    def __init__(self, config: DecoderConfig, weights: Weights, dtype: torch.dtype) -> None:
        """dtype: of the residual stream, and so of q, k and v."""
        self.config, self.dtype, self.device = config, dtype, weights.device
        self.weights = weights
        self.row_block = weights.row_block
        self._rope_tables = RopeTables(config, self.device)
        self._activate = ACTIVATION_FUNCTIONS[config.activation]
        if weights.packed:
            self._activate = row_invariant(self._activate, config.activation, config.intermediate_size)
        # Gemma was trained with its scale rounded to the residual stream's dtype.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    def reserve(self, length: int) -> None:
        """Prepare for positions below `length`.

        On the CPU forward does this itself. On other devices it cannot check positions without
        waiting for the device, so call this first, and before capturing a CUDA graph.
        """
        self._rope_tables.reserve(length)

    def cos_sin(self, rope: int) -> Tensor:
        """One rope's rotations, float32 [positions, dim / 2, 2]: cosine and sine. `reserve` may replace them."""
        return self._rope_tables.table(rope)

    def forward(
        self, ids: Tensor, positions: Tensor, attend: Attend, tapped: dict[int, Tensor] | None = None
    ) -> Tensor:
        """int64 [N], int64 [N] -> [N, hidden], after the final norm. tapped: receives the outputs of its layers."""
        config, weights = self.config, self.weights
        by_rope = self._rope_tables(positions)
        rotations = [by_rope[layer.rope] for layer in config.layers]
        x = self._embed(ids)
        for i, layer in enumerate(weights.layers):
            x = x + self._attention(i, layer, x, rotations[i], attend)
            x = x + self._mlp(layer, x)
            if tapped is not None and i in tapped:
                tapped[i] = x
        return weights.norm(x)

    def logits(self, hidden: Tensor, head: LinearOp | None = None) -> Tensor:
        """[M, hidden] -> float32 [M, vocab], soft cap applied. head: used in place of the model's own."""
        logits = (head or self.weights.head)(hidden).float()
        cap = self.config.final_softcap
        if cap is None:
            return logits
        capped = partial(_apply_by_rows, torch.tanh, 1) if self.weights.packed else torch.tanh
        return capped(logits / cap) * cap

    def _embed(self, ids: Tensor) -> Tensor:
        x = self.weights.embed(ids).to(self.dtype)
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def _attention(self, i: int, layer: Layer, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        heads, kv_heads, dim = self.config.heads, self.config.kv_heads, self.config.head_dim
        qkv = layer.qkv(layer.attention_norm(x)).float().view(-1, heads + 2 * kv_heads, dim)
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        if layer.qk_norm is not None:
            qk = layer.qk_norm(qk)
        qk = apply_rope(qk, rotation)
        if self.dtype is not torch.float32:
            qk, v = qk.to(self.dtype), v.to(self.dtype)
        q, k = qk.split_with_sizes((heads, kv_heads), 1)
        y = layer.out(attend(i, q, k, v))
        return y if layer.post_attention_norm is None else layer.post_attention_norm(y)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        wide = self.config.intermediate_size
        gate, up = layer.gate_up(layer.mlp_norm(x)).split_with_sizes((wide, wide), 1)
        y = layer.down(self._activate(gate) * up)
        return y if layer.post_mlp_norm is None else layer.post_mlp_norm(y)


def row_invariant(f: Callable[[Tensor], Tensor], name: Activation, width: int) -> Callable[[Tensor], Tensor]:
    """An activation of rows [N, width] in which no row's bits depend on the number of rows."""
    # torch has another kernel for gelu of a single row, so every row is computed alone: tanh or not.
    return partial(_apply_by_rows, f, 1 if name.startswith("gelu") else max(1, MAX_SERIAL_ELEMENTS // width))


def _apply_by_rows(f: Callable[[Tensor], Tensor], max_rows: int, x: Tensor) -> Tensor:
    """Apply an elementwise f to at most `max_rows` rows at a time.

    torch computes exp and the like in vectors, and the remainder at the end of a row or of a
    thread's share by another formula. On one thread, over rows that are not contiguous (or one
    row), the remainder begins at the same column in every row: no row's bits depend on others.
    """
    if len(x) <= max_rows:
        return f(x)
    return torch.cat([f(rows) for rows in x.split(max_rows)])
