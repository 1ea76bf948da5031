"""A decoder's configuration: sizes, norms, windows, rotary embeddings. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["silu", "gelu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (RoPE). Frequencies never depend on the length of the sequence."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    kind: RopeKind = "default"
    factor: float = 1.0
    """The context length as a multiple of the trained one (linear, llama3, yarn)."""
    original_positions: int = 0
    """Positions the model was first trained on (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_positions / this are stretched by the full factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_positions / this are unchanged."""
    beta_fast: float = 32.0
    """yarn: dimensions that rotate more often than this over the trained positions are unchanged."""
    beta_slow: float = 1.0
    """yarn: dimensions that rotate less often than this are stretched by the full factor."""
    truncate: bool = True
    """yarn: round the two bounds to whole dimensions."""
    amplitude: float = 1.0
    """yarn: cosines and sines are multiplied by this."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from one layer to the next."""

    window: int | None = None
    """A row attends to this many last positions, its own included; None: to all."""
    rope: int = 0
    """Index of this layer's rope in DecoderConfig.ropes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder of the Llama architecture, in any of its families."""

    model_type: str
    """As in config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; each serves heads / kv_heads query heads."""
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_positions: int
    """The model's context length, in tokens."""
    norm_eps: float
    activation: Activation
    attention_scale: float
    """Multiplies query times key."""
    attention_softcap: float | None = None
    """Attention scores become cap * tanh(score / cap), before masking."""
    final_softcap: float | None = None
    """The same for the logits."""
    embedding_scale: float = 1.0
    """Multiplies the embeddings, not the head."""
    unit_offset: bool = False
    """Norms multiply by 1 + weight (Gemma)."""
    sandwich_norms: bool = False
    """Attention and MLP outputs are normalized too, before they are added to the residual (Gemma 2 and 3)."""
    qk_norm: bool = False
    """Each query and key head is normalized before RoPE (Qwen3, Gemma 3)."""
    qkv_bias: bool = False
    out_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    tied: bool = False
    """The embedding is the output head where the checkpoint stores none."""
    dtype: torch.dtype = torch.float32
    """The dtype that config.json names."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values in a cache of this dtype, over all layers."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * dtype.itemsize
