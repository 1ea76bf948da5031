"""What a pass reads and computes: the weights' part, by which a load is bound by memory or by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.models.config import DecoderConfig
from outrider.models.linear import GROUP_SIZE, Quantization

PACKED_BYTES: Mapping[Quantization, float] = {"int4": 0.5 + 4 / GROUP_SIZE, "int8": 1.0}
"""Of a weight; 4-bit ones share a scale and a zero of 2 bytes each."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture's layers."""

    count: int
    per_token: int

    def distinct(self, rows: float) -> float:
        """How many of a layer's experts a pass of so many rows reads: the mean over rows that choose evenly.

        An expert is left out by a row with probability 1 - per_token / count, by all rows with its power.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, slots=True)
class PassWork:
    """Of one model's passes. What attention reads and computes comes on top, and grows with the texts."""

    weights: int
    """Weights that every row is multiplied by."""
    weight_bytes: int
    """Their bytes, read once a pass."""
    experts: Experts | None = None
    expert_weights: int = 0
    """Weights of all experts of all layers, of which a row is multiplied by those of the experts it chooses."""
    expert_bytes: int = 0

    def bytes_read(self, rows: float) -> float:
        """By a pass of so many rows."""
        if self.experts is None:
            return self.weight_bytes
        return self.weight_bytes + self.expert_bytes * self.experts.distinct(rows) / self.experts.count

    def operations(self, rows: float) -> float:
        """Of such a pass; a multiplication and an addition are two."""
        chosen = 0.0 if self.experts is None else self.expert_weights * self.experts.per_token / self.experts.count
        return 2 * rows * (self.weights + chosen)


def decoder_work(config: DecoderConfig, bytes_per_weight: float) -> PassWork:
    """Of a native decoder, every weight of which is read by every pass."""
    queries = config.heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * config.kv_heads * config.head_dim)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    weights = len(config.layers) * layer + config.vocab_size * config.hidden_size
    return PassWork(weights, round(weights * bytes_per_weight))
