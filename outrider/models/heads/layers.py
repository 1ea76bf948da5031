"""The layers that drafting heads are made of, with the names of Hugging Face's checkpoints.

They work under autograd and in any float dtype. What a row attends to is decided by the `Attend` they are
given: paged attention where they draft, a masked one where they are trained.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.decoder import ACTIVATION_FUNCTIONS, Attend
from outrider.models.heads.config import HeadConfig
from outrider.models.rope import inverse_frequencies

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each row's position: float32 [N, 1, dim / 2] both."""


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, summed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Rotary:
    """Rotary position embedding that rotates dimensions i and i + dim / 2 together, as in Hugging Face's checkpoints.

    It is not part of a head's state: its frequencies stay float32 when a head is cast.
    """

    def __init__(self, config: HeadConfig) -> None:
        self.amplitude = config.rope.amplitude
        self.frequencies = inverse_frequencies(config.rope, config.head_dim)

    def __call__(self, positions: Tensor) -> Rotation:
        """int64 [N] -> float32 [N, 1, dim / 2] twice"""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        angles = positions[:, None, None].float() * self.frequencies
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """[N, heads, dim] -> the same, each head's halves rotated; computed in float32"""
    (a, b), (cos, sin) = x.float().chunk(2, -1), rotation
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class HeadAttention(nn.Module):
    """Projections, norms and rotation around `attend`."""

    def __init__(self, config: HeadConfig, inputs: int) -> None:
        """inputs: columns of its input rows."""
        super().__init__()
        self.head_dim = config.head_dim
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(inputs, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(inputs, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """[N, inputs] -> [N, heads, dim]"""
        q = self.q_proj(x).view(len(x), -1, self.head_dim)
        return rotate(q if self.q_norm is None else self.q_norm(q), rotation)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """[N, inputs] -> [N, kv_heads, dim] twice"""
        k = self.k_proj(x).view(len(x), -1, self.head_dim)
        v = self.v_proj(x).view(len(x), -1, self.head_dim)
        return rotate(k if self.k_norm is None else self.k_norm(k), rotation), v

    def forward(self, x: Tensor, rotation: Rotation, layer: int, attend: Attend) -> Tensor:
        """[N, inputs] -> [N, hidden]. layer: this one's number, for `attend`."""
        k, v = self.keys_values(x, rotation)
        return self.o_proj(attend(layer, self.queries(x, rotation), k, v))


class GatedMLP(nn.Module):
    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)
        self.activate = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """Attention and MLP, each applied after a norm and added to the residual stream.

    A first layer of EAGLE differs only in what it reads: see `forward`.
    """

    def __init__(
        self, config: HeadConfig, layer: int, *, inputs: int = 0, input_norm: bool = True, hidden_norm: bool = False
    ) -> None:
        """layer: its number. inputs: columns that attention reads; 0: the hidden size.

        input_norm, hidden_norm: whether it has these norms; the second is EAGLE-3's, and applied by the head.
        """
        super().__init__()
        self.layer = layer
        self.self_attn = HeadAttention(config, inputs or config.hidden_size)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps) if input_norm else None
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps) if hidden_norm else None
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend, normed: Tensor | None = None) -> Tensor:
        """The residual stream [N, hidden] -> [N, hidden].

        normed [N, inputs]: what attention reads; None: x after `input_layernorm`, where the layer has one.
        """
        if normed is None:
            normed = x if self.input_layernorm is None else self.input_layernorm(x)
        x = x + self.self_attn(normed, rotation, self.layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))
