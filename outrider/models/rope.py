"""Rotary position embedding (RoPE): the frequencies of each scaling, and tables of rotations grown on demand.

RoPE rotates a head's dimensions i and i + dim/2 together. `pair_rows` puts the two side by side,
once, at load: a pair is then one complex number and a rotation one complex product. Attention
scores do not change, since queries and keys are reordered alike.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from outrider.models.config import DecoderConfig, RopeConfig

INITIAL_LENGTH = 2048


def pair_rows(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder each head's rows from (first half, second half) to pairs. [heads * dim, ...], same shape out."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def inverse_frequencies(rope: RopeConfig, dim: int) -> Tensor:
    """Radians per position of each pair. [dim / 2]

    In float32 and in this order of operations, as the models were trained: at position 100,000
    the last bit of a frequency changes the angle by a hundredth.
    """
    wavelengths = rope.theta ** (torch.arange(0, dim, 2).float() / dim)  # per radian
    if rope.kind == "linear":
        return 1.0 / wavelengths / rope.factor
    if rope.kind == "llama3":
        return _llama3(1.0 / wavelengths, rope)
    if rope.kind == "yarn":
        return _yarn(wavelengths, rope, dim)
    return 1.0 / wavelengths


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Stretch long wavelengths by the factor, keep short ones, blend between."""
    rotations = rope.original_positions / (2 * math.pi / frequencies)  # over the trained positions
    kept = ((rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(wavelengths: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """As llama3, but the blend is linear in the dimension's index."""

    def index_of(rotations: float) -> float:
        return dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


class RopeTables:
    """The rotation of every position, one table for each distinct rope of the model.

    Rows never change, so a position's rotation always has the same bits.
    """

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        self._ropes = config.ropes
        self._frequencies = [inverse_frequencies(rope, config.head_dim) for rope in config.ropes]
        self._tables = [torch.empty(0, config.head_dim // 2, dtype=torch.complex64, device=device)] * len(config.ropes)
        self._on_host = device.type == "cpu"
        self.length = 0
        self.reserve(INITIAL_LENGTH)

    def reserve(self, length: int) -> None:
        """Make the tables hold at least this many positions. May replace them: not while a CUDA graph uses them."""
        if length <= self.length:
            return
        # Tensors made in inference mode cannot be used where gradients are computed.
        with torch.inference_mode(False), torch.no_grad():
            self._grow(max(length, 2 * self.length))

    def _grow(self, length: int) -> None:
        positions = torch.arange(self.length, length).float()
        for i, (rope, frequencies) in enumerate(zip(self._ropes, self._frequencies, strict=True)):
            angles = torch.outer(positions, frequencies)
            more = torch.complex(angles.cos() * rope.amplitude, angles.sin() * rope.amplitude)
            self._tables[i] = torch.cat((self._tables[i], more.to(self._tables[i].device)))
        self.length = length

    def table(self, rope: int) -> Tensor:
        """Cosine and sine of every position so far: float32 [length, dim / 2, 2]"""
        return torch.view_as_real(self._tables[rope])

    def __call__(self, positions: Tensor) -> list[Tensor]:
        """[N] -> for each rope, complex [N, 1, dim / 2].

        Off the CPU, positions must lie below `length`: a check would wait for the device.
        """
        if self._on_host:
            self.reserve(int(positions.max()) + 1)
        return [table.index_select(0, positions).unsqueeze(1) for table in self._tables]


def apply_rope(heads: Tensor, rotation: Tensor) -> Tensor:
    """Rotate paired heads. float32 [N, heads, dim], complex [N, 1, dim / 2] -> float32 [N, heads, dim]"""
    pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2)
