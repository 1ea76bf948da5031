"""Make a Hugging Face model folder of a GGUF file: one that refers to the file, or a copy that does not need it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoints.folder import SOURCE_BITS, GGUFReference
from outrider.checkpoints.gguf.tokenizer import build_tokenizer, end_ids, tokenizer_config
from outrider.checkpoints.gguf.weights import GGUFWeights, open_gguf
from outrider.checkpoints.storage import NoProgress, Progress, atomic_folder

SHARD_BYTES = 2 << 30
CPU = torch.device("cpu")


def refer_to_gguf(gguf_file: Path, folder: Path) -> None:
    """Write a folder whose weights and vocabulary are read from `gguf_file`: settings, and where the file lies.

    `folder` is written completely or not at all; an existing one stays unchanged. Raises
    ConfigError where the file is malformed, or holds what cannot be read.
    """
    weights = open_gguf(gguf_file)
    with atomic_folder(folder) as filling:
        _write_small_files(weights, filling, torch.float32)
        GGUFReference.to_file(gguf_file, weights.storage, weights.bits).write(filling)


def convert_gguf(
    gguf_file: Path, folder: Path, progress: Progress | None = None, dtype: torch.dtype = torch.float32
) -> None:
    """Write the model in `gguf_file` as a Hugging Face folder of its own: config, weights in `dtype`, tokenizer.

    float32 holds the weights exactly as dequantized. Vectors are always in float32: they are small, and norms are
    computed in it. The rest is as for `refer_to_gguf`.
    """
    weights = open_gguf(gguf_file)
    with atomic_folder(folder) as filling:
        _write_small_files(weights, filling, dtype)
        tokenizer = build_tokenizer(weights.meta, weights.config["vocab_size"])
        (filling / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
        _write_weights(weights, filling, dtype, progress or NoProgress())


def _write_small_files(weights: GGUFWeights, folder: Path, dtype: torch.dtype) -> None:
    config = {**weights.config, "dtype": str(dtype).removeprefix("torch.")}
    ends = end_ids(weights.meta)
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": config["pad_token_id"],
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation)
    _write_json(folder / "tokenizer_config.json", tokenizer_config(weights.meta, config["max_position_embeddings"]))


def _shards(weights: GGUFWeights, itemsize: int) -> list[list[str]]:
    """The tensor names of each file, in order. A file holds at most SHARD_BYTES, or a single tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in weights.tensors.items():
        size = itemsize * tensor.elements
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_weights(weights: GGUFWeights, folder: Path, dtype: torch.dtype, progress: Progress) -> None:
    shards = _shards(weights, dtype.itemsize)
    files: dict[str, str] = {}
    progress.start("converting", len(weights.tensors))
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors[name] = weights.read(name, CPU, dtype if len(weights.shape(name)) > 1 else torch.float32)
            files[name] = file
            progress.advance(1)
        try:
            save_file(tensors, folder / file, metadata={"format": "pt", SOURCE_BITS: str(weights.bits)})
        except SafetensorError as error:  # what safetensors raises where the disk is full
            raise OSError(str(error)) from error
        shutil.copymode(folder / "config.json", folder / file)  # safetensors makes its files private
    if len(shards) > 1:
        total = sum(dtype.itemsize * tensor.elements for tensor in weights.tensors.values())
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": files})
    progress.done()


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
