"""The target as training reads it: whole packed rows without a cache, with its layers tapped."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.heads.layers import RMSNorm
from outrider.train.packing import PADDING, PackedRows

MAX_ELEMENTS = 1 << 28  # logits computed at a time


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """What the target computed for R packed rows of L tokens."""

    features: Tensor  # [R * L, taps * hidden]: outputs of the tapped layers
    hidden: Tensor  # [R * L, hidden], after the final norm: input of the output head
    log_total: Tensor  # float32 [R * L]: log of the sum of exp(logits), to turn some of them into probabilities
    best: Tensor  # int64 [R * L]: the token with the highest logit


class TrainingTarget:
    """A decoder that is read, never trained."""

    def __init__(self, decoder: Decoder, taps: tuple[int, ...]) -> None:
        if decoder.config.attention_softcap is not None:
            raise ConfigError(
                f"{decoder.config.model_type}: attention with a soft cap is not supported in training; take a target "
                "without one, such as Llama, Qwen or SmolLM2"
            )
        self.decoder, self.taps = decoder, taps

    @torch.no_grad()
    def read(self, rows: PackedRows) -> TargetOutputs:
        """One pass over packed rows; each text attends to itself alone, causally."""
        decoder = self.decoder
        decoder.reserve(rows.tokens.shape[1])
        tapped: dict[int, Tensor] = dict.fromkeys(self.taps, rows.tokens)  # replaced by the layers' outputs
        attend = TextAttention(decoder, rows)
        hidden = decoder.forward(rows.tokens.flatten(), rows.positions.flatten(), attend, tapped)
        totals, best = zip(*(self._totals(hidden[part]) for part in self._parts(len(hidden))), strict=True)
        features = torch.cat([hidden[:, :0], *(tapped[layer] for layer in self.taps)], -1)
        return TargetOutputs(features, hidden, torch.cat(totals), torch.cat(best))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> float32 [M, vocab]"""
        return self.decoder.logits(hidden)

    def _parts(self, count: int) -> Iterator[slice]:
        return in_chunks(count, max(1, MAX_ELEMENTS // self.decoder.config.vocab_size))

    def _totals(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.decoder.logits(hidden)
        return logits.logsumexp(-1), logits.argmax(-1)


class TextAttention:
    """The decoder's `attend` over packed rows: causal within each text, with the layers' windows."""

    def __init__(self, decoder: Decoder, rows: PackedRows) -> None:
        config = decoder.config
        self._scale, self._shape = config.attention_scale, rows.tokens.shape
        allowed = text_mask(rows.texts)
        at = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
        masks: dict[int | None, Tensor] = {}
        for window in {layer.window for layer in config.layers}:
            near = allowed if window is None else allowed & (at[:, None] - at[None, :] < window)
            masks[window] = additive(near, decoder.dtype)
        self._masks = [masks[layer.window] for layer in config.layers]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows, length = self._shape
        q, k, v = (part.unflatten(0, (rows, length)).transpose(1, 2) for part in (q, k, v))
        return attention(q, k, v, self._masks[layer], self._scale).transpose(1, 2).flatten(2).flatten(0, 1)


def text_mask(texts: Tensor) -> Tensor:
    """int64 [R, L] -> bool [R, 1, L, L]: earlier tokens of the same text, and every token itself.

    Padding attends to itself, so that no row of the softmax is empty.
    """
    same = (texts[:, :, None] == texts[:, None, :]) & (texts != PADDING)[:, :, None]
    own = torch.eye(texts.shape[1], dtype=torch.bool, device=texts.device)
    return (same.tril() | own)[:, None]


def additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add to the scores, so that it is converted once and not in every layer."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """q [R, heads, Q, dim], k and v [R, kv_heads, K, dim], mask [R, 1, Q, K] -> [R, heads, Q, dim]

    In the mask's dtype: under autocast, norms leave some of them in float32. Keys are repeated for their query heads:
    the kernel that takes masks has no groups.
    """
    q, k, v = (part.to(mask.dtype) for part in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


@torch.no_grad()
def begin_as_target(norm: RMSNorm, decoder: Decoder) -> None:
    """Give a head's final norm the weight of the target's: the output head expects hidden states of that scale."""
    weight = decoder.weights.norm.weight
    if decoder.device.type == "cpu":  # its weight holds a factor there, see Norm
        weight = weight / math.sqrt(len(weight))
    norm.weight.copy_(weight)


def in_chunks(count: int, size: int) -> Iterator[slice]:
    """0 to count in slices of at most `size`."""
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))
