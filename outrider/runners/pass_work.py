"""What a pass reads and computes of the weights, which tells whether a load is bound by memory or by arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outrider.models.config import DecoderConfig
from outrider.models.linear import GROUP_SIZE, Quantization

PACKED_BYTES: Mapping[Quantization, float] = {"int4": 0.5 + 4 / GROUP_SIZE, "int8": 1.0}
"""Bytes of a packed weight; each group of 4-bit weights has a scale and a zero point of 2 bytes each."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of each layer of a mixture-of-experts model."""

    count: int
    per_token: int

    def distinct(self, rows: float) -> float:
        """The mean number of a layer's experts that a pass of so many rows reads, if rows choose evenly.

        One row leaves out an expert with probability 1 - per_token / count, all rows with that to the power of `rows`.
        """
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, slots=True)
class PassWork:
    """The work of one model's passes. What attention reads and computes is not included; it grows with the texts."""

    weights: int
    """Weights that every row is multiplied by."""
    weight_bytes: int
    """Their bytes, read once per pass."""
    experts: Experts | None = None
    expert_weights: int = 0
    """Weights of all experts of all layers; a row is multiplied by those of the experts that it chooses."""
    expert_bytes: int = 0

    def bytes_read(self, rows: float) -> float:
        """Bytes of weights that a pass of so many rows reads."""
        if self.experts is None:
            return self.weight_bytes
        return self.weight_bytes + self.expert_bytes * self.experts.distinct(rows) / self.experts.count

    def operations(self, rows: float) -> float:
        """Operations of a pass of so many rows; a multiplication and an addition are two."""
        chosen = 0.0 if self.experts is None else self.expert_weights * self.experts.per_token / self.experts.count
        return 2 * rows * (self.weights + chosen)


def decoder_work(config: DecoderConfig, bytes_per_weight: float) -> PassWork:
    """The work of a native decoder, each of whose passes reads every weight."""
    queries = config.heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * config.kv_heads * config.head_dim)
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    weights = len(config.layers) * layer + config.vocab_size * config.hidden_size
    return PassWork(weights, round(weights * bytes_per_weight))
