"""Bytes of a decoder's weights in each format that the loader can give them, from a checkpoint's headers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.models.config import DecoderConfig
from outrider.models.linear import COLUMN_MULTIPLE, QUANTIZED_BITS, ROW_MULTIPLE, Quantization
from outrider.models.load import EMBEDDING_NAME, HEAD_NAME, layer_matrices
from outrider.native.tensors import BLOCK, Kind
from outrider.plan.facts import ModelFacts

FLOAT, HALF = torch.float32.itemsize, torch.bfloat16.itemsize
BLOCK_BYTES = {
    Kind.F32: 128, Kind.F16: 64, Kind.BF16: 64,
    Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q5_0: 22, Kind.Q5_1: 24, Kind.Q8_0: 34,
    Kind.Q4_K: 18.5, Kind.Q5_K: 22.5, Kind.Q6_K: 26.25, Kind.INT4: 20, Kind.INT8: 34,
}  # fmt: skip
"""Bytes of 32 weights in the layout of the CPU kernels, see native/src/blocks.h."""


@dataclass(frozen=True, slots=True)
class Format:
    """The device and the number format of a model's weights."""

    device: str
    """cpu or cuda."""
    dtype: torch.dtype
    quantize: Quantization | None = None
    blocks: bool = False
    """Whether packed weights are in the blocks of the CPU kernels; otherwise in the format of PyTorch's operators."""


def decoder_weights(facts: ModelFacts, config: DecoderConfig, form: Format) -> int:
    """Bytes of all weights of a checkpoint's decoder, as loaded."""
    in_blocks = _in_blocks(facts, form)
    total = _norm_bytes(config)
    for i in range(len(config.layers)):
        for name, rows, columns, bias in layer_matrices(config):
            kind = facts.tensors[f"model.layers.{i}.{name}.weight"].kind if in_blocks else None
            total += _matrix(rows, columns, form, form.quantize, kind)
            total += rows * _bias_size(form) if bias else 0
    return total + _vocabulary(facts, config, form, in_blocks)


def _in_blocks(facts: ModelFacts, form: Format) -> bool:
    """Whether the weights keep the block types of their GGUF file."""
    quantized = form.blocks and form.quantize is not None and 0 < facts.bits <= QUANTIZED_BITS[form.quantize]
    return quantized and all(tensor.kind is not None for tensor in facts.tensors.values())


def _vocabulary(facts: ModelFacts, config: DecoderConfig, form: Format, in_blocks: bool) -> int:
    """Bytes of the embedding and the output head, which may share one matrix."""
    shape, stored = (config.vocab_size, config.hidden_size), facts.tensors
    if form.quantize is None:
        return (1 if config.tied else 2) * _matrix(*shape, form, None, None)
    if in_blocks:
        names = [name for name in (EMBEDDING_NAME, HEAD_NAME) if name in stored]
        return sum(_matrix(*shape, form, "int8", stored[name].kind) for name in names)
    # the embedding is only looked up, never multiplied: it keeps the checkpoint's precision
    return shape[0] * shape[1] * facts.embedding_dtype.itemsize + _matrix(*shape, form, "int8", None)


def _matrix(rows: int, columns: int, form: Format, quantize: Quantization | None, kind: int | None) -> int:
    """Bytes of one matrix. quantize: how it is packed; None: not at all. kind: the type of its GGUF blocks, where a
    packed matrix keeps it; None: it is packed anew."""
    if quantize is None:
        return rows * columns * form.dtype.itemsize
    columns += -columns % COLUMN_MULTIPLE
    if quantize == "int8" and not form.blocks:
        return rows * columns + rows * HALF
    rows += -rows % ROW_MULTIPLE
    own = Kind.INT4 if quantize == "int4" else Kind.INT8
    if kind is not None:  # types without a kernel are held as Q8_0
        own = Kind(kind) if kind in set(Kind) else Kind.Q8_0
    return round(rows * columns / BLOCK * BLOCK_BYTES[own])


def _bias_size(form: Format) -> int:
    if form.quantize is None:
        return form.dtype.itemsize
    return FLOAT if form.blocks else HALF


def _norm_bytes(config: DecoderConfig) -> int:
    """Bytes of all norms. They are float32 whatever the dtype; those of queries and keys have a row for each head."""
    each = (4 if config.sandwich_norms else 2) * config.hidden_size
    each += (config.heads + config.kv_heads) * config.head_dim if config.qk_norm else 0
    return FLOAT * (len(config.layers) * each + config.hidden_size)
