"""What a decoder is made of, as data: sizes, norms, windows, rotary positions. No I/O, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["silu", "gelu", "gelu_tanh"]
RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions turn queries and keys. Frequencies never depend on the length of the text."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    kind: RopeKind = "default"
    factor: float = 1.0
    """How many times longer than trained (linear, llama3, yarn)."""
    original_positions: int = 0
    """Positions the model was first trained on (llama3, yarn)."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original_positions / this are stretched by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original_positions / this are left alone."""
    beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this over the trained positions are left alone."""
    beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are stretched by the whole factor."""
    truncate: bool = True
    """yarn: round the two bounds to whole dimensions."""
    amplitude: float = 1.0
    """yarn: cosines and sines are multiplied by this."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from one layer to the next."""

    window: int | None = None
    """A row sees this many last positions, its own among them; None sees them all."""
    rope: int = 0
    """Which of the decoder's ropes turns this layer's queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """One decoder of the Llama line, whichever family it came from."""

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
    """Longest text the model is meant for, in tokens."""
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
    """Attention and MLP outputs are normed too, before they join the stream (Gemma 2 and 3)."""
    qk_norm: bool = False
    """Each query and key head is normed before its rotation (Qwen3, Gemma 3)."""
    qkv_bias: bool = False
    out_bias: bool = False
    """On the attention's output projection."""
    mlp_bias: bool = False
    tied: bool = False
    """The embedding table serves as the head where the checkpoint stores none."""
    dtype: torch.dtype = torch.float32
    """What the checkpoint says it was saved in."""

    def token_bytes(self, dtype: torch.dtype) -> int:
        """What the keys and values of one token take in a cache of this dtype, all layers together."""
        return 2 * len(self.layers) * self.kv_heads * self.head_dim * dtype.itemsize
