"""Convert a GGUF file to a Hugging Face model folder: weights in float32, exactly as dequantized."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from outrider.checkpoints.folder import SOURCE_BITS
from outrider.checkpoints.gguf.config import hf_config
from outrider.checkpoints.gguf.families import NOT_WEIGHTS, ROPE_FREQS, GGUFFamily, family_of, hf_name, hf_shape
from outrider.checkpoints.gguf.header import TensorInfo, read_header
from outrider.checkpoints.gguf.metadata import Metadata
from outrider.checkpoints.gguf.tokenizer import end_ids, write_tokenizer
from outrider.checkpoints.storage import NoProgress, Progress, atomic_folder
from outrider.core.errors import ConfigError

SHARD_BYTES = 2 << 30


def convert_gguf(gguf_file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write the model in `gguf_file` as a Hugging Face folder: config, weights, tokenizer.

    `folder` is written completely or not at all; an existing one stays unchanged. Raises
    ConfigError where the file is malformed, or holds what cannot be converted.
    """
    header = read_header(gguf_file)
    meta = Metadata(header.metadata, str(gguf_file))
    _, family = family_of(meta)
    freqs = next((dequantize_tensor(gguf_file, tensor) for tensor in header.tensors if tensor.name == ROPE_FREQS), None)
    config = hf_config(header, meta, freqs)
    weights = _rename_tensors(header.tensors, family, config, meta)
    with atomic_folder(folder) as filling:
        _write_json(filling / "config.json", config)
        _write_json(filling / "generation_config.json", _generation_config(config, meta))
        write_tokenizer(meta, config, filling)
        _write_weights(_Weights(gguf_file, weights, family, config), filling, progress or NoProgress())


def dequantize_tensor(gguf_file: Path, tensor: TensorInfo) -> np.ndarray:
    """The tensor's values in float32. Raises ConfigError where the gguf package cannot read its storage type."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(tensor.kind)
    mapped = np.memmap(gguf_file, dtype=np.uint8, mode="r", offset=tensor.start, shape=(tensor.size,))
    raw = np.asarray(mapped)  # slices of a memmap cost more than those of a plain array
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    try:
        if kind in plain:
            return raw.view(plain[kind]).reshape(tensor.shape).astype(np.float32)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return dequantize(rows, kind).reshape(tensor.shape)
    except NotImplementedError as error:
        raise ConfigError(
            f"{gguf_file}: tensor {tensor.name!r} is stored as {kind.name}, which the installed gguf package cannot "
            "read; use a file in another quantisation, such as Q8_0 or Q4_K_M"
        ) from error


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of rows within each head: from 0, h, 1, h + 1, ... to 0, 1, ..., h, h + 1, ..."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


class _Weights:
    """A file's tensors by their Hugging Face names, with the values of a Hugging Face checkpoint."""

    def __init__(
        self, file: Path, tensors: Mapping[str, TensorInfo], family: GGUFFamily, config: Mapping[str, Any]
    ) -> None:
        self.file, self.tensors, self.family, self.config = file, tensors, family, config

    @property
    def bits(self) -> int:
        """Bits per weight of the storage type that most weights have: 4 for Q4_1 and Q4_K, 16 for F16."""
        from gguf import GGMLQuantizationType

        elements: Counter[int] = Counter()
        for tensor in self.tensors.values():
            elements[tensor.kind] += tensor.elements
        name = GGMLQuantizationType(elements.most_common(1)[0][0]).name
        return int("".join(takewhile(str.isdecimal, name.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))) or 0)

    def read(self, name: str) -> np.ndarray:
        values = dequantize_tensor(self.file, self.tensors[name])
        if self.family.norm_offset and name.endswith("norm.weight"):
            return values - np.float32(self.family.norm_offset)
        if self.family.rotary_pairs and ".q_proj." in name:
            return unpermute(values, self.config["num_attention_heads"])
        if self.family.rotary_pairs and ".k_proj." in name:
            return unpermute(values, self.config["num_key_value_heads"])
        return values


def _rename_tensors(
    tensors: tuple[TensorInfo, ...], family: GGUFFamily, config: Mapping[str, Any], meta: Metadata
) -> dict[str, TensorInfo]:
    """The tensors by Hugging Face name. Raises ConfigError for one that the model does not have in that shape."""
    named: dict[str, TensorInfo] = {}
    for tensor in tensors:
        if tensor.name in NOT_WEIGHTS:
            continue
        name = hf_name(tensor.name, family)
        if name is None:
            raise meta.fail(f"tensor {tensor.name!r} is not part of a {family.model_type} model ")
        if tensor.shape != hf_shape(name, config):
            raise meta.fail(f"tensor {tensor.name!r} has shape {tensor.shape}, expected {hf_shape(name, config)}")
        named[name] = tensor
    return named


def _shards(tensors: Mapping[str, TensorInfo]) -> list[list[str]]:
    """The tensor names of each file, in order. A file holds at most SHARD_BYTES, or a single tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = 4 * tensor.elements
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_weights(weights: _Weights, folder: Path, progress: Progress) -> None:
    shards = _shards(weights.tensors)
    files: dict[str, str] = {}
    progress.start("converting", len(weights.tensors))
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors: dict[str, np.ndarray] = {}
        for name in names:
            tensors[name] = weights.read(name)
            files[name] = file
            progress.advance(1)
        try:
            save_file(tensors, str(folder / file), metadata={"format": "pt", SOURCE_BITS: str(weights.bits)})
        except SafetensorError as error:  # what safetensors raises where the disk is full
            raise OSError(str(error)) from error
        shutil.copymode(folder / "config.json", folder / file)  # safetensors makes its files private
    if len(shards) > 1:
        total = sum(4 * tensor.elements for tensor in weights.tensors.values())
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    progress.done()


def _generation_config(config: Mapping[str, Any], meta: Metadata) -> dict[str, Any]:
    ends = end_ids(meta)
    return {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config["pad_token_id"],
    }


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
