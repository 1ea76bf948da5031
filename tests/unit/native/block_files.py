"""Random blocks of every storage type, and their values by the gguf package."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from outrider.native.tensors import Kind

SCALES_AT = {
    Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,),
}  # fmt: skip
"""Where the 16-bit scales lie in a block; all other bytes may be anything."""
FILE_KINDS = (Kind.F32, Kind.F16, Kind.BF16, *SCALES_AT)


def random_blocks(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, bytes of a row]"""
    rng = np.random.default_rng(seed)
    if kind in (Kind.F32, Kind.F16, Kind.BF16):
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        if kind is Kind.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if kind is Kind.F16 else np.float32).view(np.uint8)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scales = (rng.standard_normal((rows, columns // block, 1)) * 0.01).astype(np.float16)
        blocks[:, :, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def values_of(kind: Kind, blocks: np.ndarray) -> np.ndarray:
    """float32 [rows, columns]"""
    plain = {Kind.F32: np.float32, Kind.F16: np.float16}
    if kind in plain:
        return blocks.view(plain[kind]).astype(np.float32)
    return dequantize(blocks, GGMLQuantizationType(kind))
