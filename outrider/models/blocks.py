"""Linear layers over packed blocks: those of a GGUF file as they are, or our own with 4 or 8 bits.

Rows are float32 and are multiplied in blocks of 32 with 8 bits each. Each output row has the same bits whatever other
rows are in the batch and however many threads there are.
"""

from __future__ import annotations

import ctypes as c
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.checkpoints.gguf.weights import StoredRows
from outrider.checkpoints.tensors import Tensors
from outrider.models.linear import Quantization, pad_weight, quantize_int4, quantize_int8
from outrider.models.rope import pair_rows
from outrider.native.library import Library
from outrider.native.tensors import BLOCK, BlockTensor, Kind, int4_blocks, int8_blocks, product_struct

CPU = torch.device("cpu")
log = logging.getLogger(__name__)


class BlockLinear:
    """A linear layer of packed tensors [out, in], whose outputs are concatenated."""

    __slots__ = ("bias", "out", "parts", "struct")

    def __init__(self, parts: Seq[BlockTensor], bias: Tensor | None = None) -> None:
        """bias: float32 [out]"""
        self.parts, self.bias = tuple(parts), None if bias is None else bias.float().contiguous()
        self.out = sum(part.shape[0] for part in parts)
        self.struct = product_struct(self.parts, self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        """[N, in] -> float32 [N, out]"""
        x = x.float().contiguous()
        y = torch.empty(len(x), self.out)
        self.parts[0].library.call(
            "product", c.byref(self.struct), x.data_ptr(), *x.shape, torch.get_num_threads(), y.data_ptr()
        )
        return y

    def take(self, rows: Tensor) -> BlockLinear:
        """A layer with a copy of these output rows, of a layer of one tensor. rows: int64 [R]"""
        (whole,) = self.parts
        return BlockLinear((whole.take(rows),), None if self.bias is None else self.bias[rows])

    def put(self, places: Tensor, source: BlockLinear, rows: Tensor) -> None:
        """Overwrite the output rows `places` with the `rows` of another layer. int64 [R] both."""
        self.parts[0].put(places, source.parts[0], rows)
        if self.bias is not None and source.bias is not None:
            self.bias.index_copy_(0, places, source.bias[rows])


def int8_linear(library: Library, weight: Tensor, bias: Tensor | None = None) -> BlockLinear:
    """Float weights [out, in] in 8 bits."""
    weight = pad_weight(weight.float(), 0, -weight.shape[1] % BLOCK)
    packed = BlockTensor.pack(library, Kind.INT8, int8_blocks(*quantize_int8(weight)), weight.shape[1])
    return BlockLinear((packed,), bias)


@dataclass(frozen=True, slots=True)
class BlockPacker:
    """Packs a checkpoint's tensors: in the file's own blocks, or quantized to 4 or 8 bits."""

    library: Library
    tensors: Tensors
    quantize: Quantization
    keeps_blocks: bool
    """Whether tensors that a file stores in blocks are kept in those blocks."""
    head_dim: int

    def linear(self, names: Seq[str], bias: Tensor | None, *, as_quantized: Quantization | None = None) -> BlockLinear:
        """A linear layer of the named tensors. as_quantized: what floats are packed to, in place of `quantize`."""
        return BlockLinear([self._packed(name, as_quantized or self.quantize) for name in names], bias)

    def table(self, name: str) -> Tensor | BlockTensor:
        """A table to look rows up in: in its own blocks, or floats as the checkpoint stores them."""
        stored = self._stored(name)
        if stored is None:
            return self.tensors.read(name, CPU, self.tensors.dtype(name))
        return self._in_blocks(stored, self.tensors.shape(name)[1], None)

    def _stored(self, name: str) -> StoredRows | None:
        return self.tensors.stored(name) if self.keeps_blocks else None

    def _packed(self, name: str, quantize: Quantization) -> BlockTensor:
        paired = ".q_proj." in name or ".k_proj." in name
        stored, columns = self._stored(name), self.tensors.shape(name)[1]
        if stored is not None:
            rows = torch.arange(len(stored.data))
            order = pair_rows(rows, self.head_dim) if paired and not self.tensors.rotary_pairs else None
            return self._in_blocks(stored, columns, order)
        weight = self.tensors.read(name, CPU, self.tensors.dtype(name))
        weight = pad_weight(pair_rows(weight, self.head_dim) if paired else weight, 0, -columns % BLOCK)
        if quantize == "int4":
            return BlockTensor.pack(self.library, Kind.INT4, int4_blocks(*quantize_int4(weight)), weight.shape[1])
        return BlockTensor.pack(self.library, Kind.INT8, int8_blocks(*quantize_int8(weight)), weight.shape[1])

    def _in_blocks(self, stored: StoredRows, columns: int, order: Tensor | None) -> BlockTensor:
        if stored.kind in set(Kind):
            return BlockTensor.pack(self.library, Kind(stored.kind), stored.data, columns, order)
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        log.warning("%s is stored as %s, which has no kernel: it is converted to Q8_0 in memory", stored.where,
                    GGMLQuantizationType(stored.kind).name)  # fmt: skip
        values = stored.dequantize(0, len(stored.data))
        return BlockTensor.pack(
            self.library, Kind.Q8_0, np.asarray(quantize(values, GGMLQuantizationType.Q8_0)), columns, order
        )
