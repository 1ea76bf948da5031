"""Linear layers: float weights, and weights packed to 4 or 8 bits for the CPU.

The packed layers take and return bf16 rows. Each output row has the same bits whatever other rows
are in the batch, which F.linear does not promise: this makes text with and without speculation
identical on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core.errors import ConfigError

LinearOp = Callable[[Tensor], Tensor]
"""A linear layer: [N, in] -> [N, out]"""
Quantization = Literal["int4", "int8"]
QUANTIZED_BITS: dict[Quantization, int] = {"int4": 4, "int8": 8}

# Private, but stable since torch 2.5, and in every build. Called here rather than through torch.ops,
# which takes twice as long to look up the operator: 0.2 ms a token over 120 layers.
_pack_int4 = torch._convert_weight_to_int4pack_for_cpu  # pyright: ignore[reportPrivateImportUsage]
_int4_product = torch._weight_int4pack_mm_for_cpu  # pyright: ignore[reportPrivateImportUsage]
_int8_product = torch._weight_int8pack_mm  # pyright: ignore[reportPrivateImportUsage]

PACKED_ROWS = 4  # rows the packed operators compute at a time: 5 cost as much as 8
GROUP_SIZE = 32  # weights that share a scale and a zero, as in a Q4_1 block
COLUMN_MULTIPLE = 32  # inputs are padded to this: int4 needs whole groups, int8 crashes unless K % 16 == 0
QUANTIZED_ROWS = 4096  # rows quantized at a time
ROW_MULTIPLE = 16  # int4 outputs are padded to this


class Linear:
    """Float weights [out, in], in the dtype of the rows they are given."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def take(self, rows: Tensor) -> Linear:
        """A layer with a copy of these output rows. rows: int64 [R]"""
        return Linear(self.weight[rows], None if self.bias is None else self.bias[rows])

    def put(self, places: Tensor, source: Linear, rows: Tensor) -> None:
        """Overwrite the output rows `places` with the `rows` of another layer. int64 [R] both."""
        self.weight.index_copy_(0, places, source.weight[rows])
        if self.bias is not None and source.bias is not None:
            self.bias.index_copy_(0, places, source.bias[rows])


class Int4Linear:
    """4-bit weights in groups of 32 along the input, each with its own scale and zero."""

    __slots__ = ("_bias", "_out", "_packed", "_pad", "_scales")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._out = weight.shape[0]
        self._pad = -weight.shape[1] % COLUMN_MULTIPLE
        levels, self._scales = quantize_int4(pad_weight(weight, -self._out % ROW_MULTIPLE, self._pad))
        self._packed = _pack_int4(levels, 1)
        self._bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        """float32 or bf16 [N, in] -> bf16 [N, out]"""
        if self._pad:
            x = F.pad(x, (0, self._pad))
        y = _int4_product(x.bfloat16(), self._packed, GROUP_SIZE, self._scales)
        if y.shape[1] != self._out:
            y = y[:, : self._out]
        return y if self._bias is None else y + self._bias


class Int8Linear:
    """8-bit weights, one scale per output."""

    __slots__ = ("_bias", "_pad", "_scales", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._pad = -weight.shape[1] % COLUMN_MULTIPLE
        self._weight, self._scales = quantize_int8(pad_weight(weight, 0, self._pad))
        self._bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        """float32 or bf16 [N, in] -> bf16 [N, out]"""
        if self._pad:
            x = F.pad(x, (0, self._pad))
        y = _int8_product(x.bfloat16(), self._weight, self._scales)
        return y if self._bias is None else y + self._bias

    def take(self, rows: Tensor) -> Int8Linear:
        """A layer with a copy of these output rows. rows: int64 [R]"""
        taken = Int8Linear.__new__(Int8Linear)  # the rows are packed already
        taken._pad, taken._weight, taken._scales = self._pad, self._weight[rows], self._scales[rows]
        taken._bias = None if self._bias is None else self._bias[rows]
        return taken

    def put(self, places: Tensor, source: Int8Linear, rows: Tensor) -> None:
        """Overwrite the output rows `places` with the `rows` of another layer. int64 [R] both."""
        self._weight.index_copy_(0, places, source._weight[rows])
        self._scales.index_copy_(0, places, source._scales[rows])
        if self._bias is not None and source._bias is not None:
            self._bias.index_copy_(0, places, source._bias[rows])


def quantize_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels 0..15 int32 [out, in] and scales with zeros bf16 [in / 32, out, 2], in a multiple of 32.

    A weight is (level - 8) * scale + zero. Levels span each group's smallest to largest weight, so a
    group that came from a Q4_1 block gets its own levels back. Levels are chosen for the rounded
    scale and zero, which the layer computes with.
    """
    groups = weight.float().view(weight.shape[0], -1, GROUP_SIZE)
    low, high = groups.aminmax(dim=-1, keepdim=True)  # [out, groups, 1]
    exact = (high - low) / 15
    scale, zero = exact.bfloat16(), (low + 8 * exact).bfloat16()
    _check_finite(zero)
    divisor = torch.where(scale > 0, scale, 1).float()
    levels = groups.sub(zero).div_(divisor).add_(8).round_().clamp_(0, 15)
    scales = torch.cat((scale, zero), dim=-1).transpose(0, 1).contiguous()
    return levels.view(weight.shape).int(), scales


def quantize_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels -127..127 int8 [out, in] and scales bf16 [out]. A weight is level * scale."""
    levels, scales = torch.empty_like(weight, dtype=torch.int8), weight.new_empty(len(weight), dtype=torch.bfloat16)
    # By blocks, so that the head, the largest matrix, never has a whole float copy in memory.
    for first in range(0, len(weight), QUANTIZED_ROWS):
        rows = weight[first : first + QUANTIZED_ROWS].float()
        scale = (rows.abs().amax(dim=1) / 127).bfloat16()
        _check_finite(scale)
        divisor = torch.where(scale > 0, scale, 1).float().unsqueeze(1)
        levels[first : first + QUANTIZED_ROWS] = rows.div(divisor).round_().clamp_(-127, 127)
        scales[first : first + QUANTIZED_ROWS] = scale
    return levels, scales


def pad_weight(weight: Tensor, rows: int, columns: int) -> Tensor:
    """The weight with this many rows and columns of zeros added; itself where there are none."""
    return F.pad(weight, (0, columns, 0, rows)) if rows or columns else weight


def _check_finite(scales: Tensor) -> None:
    if not scales.isfinite().all():
        raise ConfigError("weights that are infinite or NaN cannot be packed; load without quantize")
