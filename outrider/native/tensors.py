"""Weights in blocks, packed for the CPU kernels."""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence as Seq
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.native.library import Library, Product


class Kind(IntEnum):
    """Storage types that have kernels, by ggml's numbers; from 100 on our own."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30
    INT4 = 100
    """Per block of 32: scale and zero in bf16, a byte for each level. A weight is (level - 8) * scale + zero."""
    INT8 = 101
    """Per block of 32: a scale in bf16, a signed byte for each level."""


BLOCK = 32


class BlockTensor:
    """A matrix [rows, columns] in blocks of one kind, in the kernels' own order. It owns its memory."""

    def __init__(self, library: Library, handle: int, kind: Kind, shape: tuple[int, int]) -> None:
        self.library, self.handle, self.kind, self.shape = library, handle, kind, shape
        self.nbytes = library.call("bytes", handle)

    def __del__(self) -> None:
        self.library.call("free", self.handle)

    @staticmethod
    def pack(
        library: Library, kind: Kind, blocks: np.ndarray, columns: int, order: Tensor | None = None
    ) -> BlockTensor:
        """blocks: uint8 [rows, bytes of a row], as a file stores them. order: int64 [rows], order[i] becomes row i."""
        blocks = np.ascontiguousarray(blocks)
        rows, handle = blocks.shape[0], c.c_void_p()
        order = None if order is None else order.contiguous()
        library.call(
            "pack", kind, blocks.ctypes.data, blocks.nbytes, rows, columns,
            None if order is None else order.data_ptr(), torch.get_num_threads(), c.byref(handle),
        )  # fmt: skip
        return BlockTensor(library, _given(handle), kind, (rows, columns))

    def rows(self, ids: Tensor) -> Tensor:
        """Dequantised: int64 [N] -> float32 [N, columns]"""
        ids = ids.contiguous()
        out = torch.empty(len(ids), self.shape[1])
        self.library.call("rows", self.handle, ids.data_ptr(), len(ids), out.data_ptr())
        return out

    def take(self, rows: Tensor) -> BlockTensor:
        """A tensor with copies of these rows. rows: int64 [R]"""
        handle = c.c_void_p()
        self.library.call("like", self.handle, len(rows), c.byref(handle))
        taken = BlockTensor(self.library, _given(handle), self.kind, (len(rows), self.shape[1]))
        taken.put(torch.arange(len(rows)), self, rows)
        return taken

    def put(self, places: Tensor, source: BlockTensor, rows: Tensor) -> None:
        """Overwrite the rows `places` with the `rows` of another tensor of this kind. int64 [R] both."""
        places, rows = places.contiguous(), rows.contiguous()
        self.library.call(
            "copy_rows", source.handle, rows.data_ptr(), self.handle, places.data_ptr(), min(len(places), len(rows))
        )


def _given(handle: c.c_void_p) -> int:
    if handle.value is None:
        raise MemoryError("the CPU kernels returned no tensor")
    return handle.value


def int4_blocks(levels: Tensor, scales: Tensor) -> np.ndarray:
    """Blocks of kind INT4 from `models.linear.quantize_int4`. levels [out, in], scales bf16 [in / 32, out, 2]"""
    out, groups = levels.shape[0], levels.shape[1] // BLOCK
    blocks = np.empty((out, groups, 4 + BLOCK), np.uint8)
    blocks[:, :, :4] = scales.transpose(0, 1).contiguous().view(torch.uint8).numpy()
    blocks[:, :, 4:] = levels.view(out, groups, BLOCK).to(torch.uint8).numpy()
    return blocks.reshape(out, -1)


def int8_blocks(levels: Tensor, scales: Tensor) -> np.ndarray:
    """Blocks of kind INT8 from `models.linear.quantize_int8`. levels int8 [out, in], scales bf16 [out]"""
    out, groups = levels.shape[0], levels.shape[1] // BLOCK
    blocks = np.empty((out, groups, 2 + BLOCK), np.uint8)
    blocks[:, :, :2] = scales.view(torch.uint8).view(out, 1, 2).numpy()
    blocks[:, :, 2:] = levels.view(torch.uint8).view(out, groups, BLOCK).numpy()
    return blocks.reshape(out, -1)


def product_struct(parts: Seq[BlockTensor], bias: Tensor | None) -> Product:
    """The kernels' view of a linear layer; valid while its tensors live."""
    if not 1 <= len(parts) <= 3:
        raise ConfigError(f"a linear layer of {len(parts)} tensors; the CPU kernels take one to three")
    handles = [*(part.handle for part in parts), *[None] * (3 - len(parts))]
    return Product((c.c_void_p * 3)(*handles), None if bias is None else bias.data_ptr())
