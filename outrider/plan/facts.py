"""Facts of a checkpoint, read without its weights: its configuration, and the names, shapes and types of its tensors.
They come from a folder, a GGUF file, or the metadata of a Hugging Face repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.demo import demo_folder
from outrider.checkpoints.folder import SOURCE_BITS, gguf_of, weight_files
from outrider.checkpoints.gguf.weights import open_gguf
from outrider.checkpoints.hub import hub_config, hub_headers
from outrider.checkpoints.resolve import cached_folder, local_path, resolve
from outrider.core.errors import ConfigError
from outrider.models.config import DecoderConfig
from outrider.models.families import parse_config
from outrider.models.fields import FieldError, UnsupportedModel
from outrider.models.heads.checkpoint import kind_of, parse_head_config
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.files import known_files
from outrider.models.load import EMBEDDING_NAME

DTYPE_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2}
"""Bytes of a number, by its type in a safetensors header; types that are not listed take one byte."""
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, as a file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    """The type by safetensors' name; F32 for all tensors of a GGUF file, to which they are dequantized."""
    size: int
    """Bytes in the file."""
    kind: int | None = None
    """ggml's number of the type in which a GGUF file stores it; None outside of GGUF files."""

    @property
    def numbers(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A checkpoint, by its headers."""

    name: str
    folder: Path | None
    """The checkpoint's folder; None: its headers were read from the hub."""
    config_json: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    bits: int = 0
    """Bits per weight of a quantized source; 0: the source was not quantized, or this is unknown."""

    @property
    def parameters(self) -> int:
        return sum(tensor.numbers for tensor in self.tensors.values())

    @property
    def size(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(tensor.size for tensor in self.tensors.values())

    @property
    def embedding_dtype(self) -> torch.dtype:
        """The dtype in which the embedding is stored."""
        stored = self.tensors.get(EMBEDDING_NAME)
        return FLOATS.get(stored.dtype, torch.float32) if stored else torch.float32

    def decoder(self) -> DecoderConfig | None:
        """The configuration of the native decoder for this checkpoint; None where it runs on Transformers' code.

        ConfigError where config.json is faulty.
        """
        try:
            return parse_config(dict(self.config_json))
        except UnsupportedModel:
            return None
        except FieldError as fault:
            raise ConfigError(f"{self.name}: config.json: {fault}; mend it, or download it again") from fault

    def head(self, *, module: bool = False) -> tuple[HeadConfig, int] | None:
        """The drafting head in this checkpoint, and the number of its parameters; None for a whole model.

        module: take the MTP module of a whole model. ConfigError where it has none.
        """
        stored = {name: (Path(self.name), tensor.shape) for name, tensor in self.tensors.items()}
        files = known_files(self.folder or Path(self.name), dict(self.config_json), stored)
        if module and files.mtp is None:
            raise ConfigError(f"{self.name} holds no MTP module; name a checkpoint that holds one")
        try:
            kind = kind_of(files)
        except ConfigError:
            return None
        return (parse_head_config(files), files.numbers) if module or kind != "mtp" else None


def read_facts(name: str, revision: str | None = None) -> ModelFacts:
    """The facts of a folder, a .gguf file, `demo`, or a Hugging Face id, which is not downloaded.

    ConfigError where there is none, FetchError where the hub cannot be asked.
    """
    if name == "demo" and demo_folder() is None:
        raise ConfigError("demo is not installed; `outrider pull demo` fetches it")
    if name == "demo" or local_path(name):
        return _local(name, resolve(name, revision=revision))
    folder = cached_folder(name, revision)
    if folder is not None:
        return _local(name, folder)
    repo, _, named = name.partition("@")
    commit = revision or named or "main"
    headers = {
        tensor: StoredTensor(shape, dtype, prod(shape) * DTYPE_BYTES.get(dtype, 1))
        for tensor, (shape, dtype) in hub_headers(repo, commit).items()
    }
    return ModelFacts(name, None, hub_config(repo, commit), headers)


def _local(name: str, folder: Path) -> ModelFacts:
    try:
        config_json = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'config.json'} cannot be read ({error}); download or save it again") from error
    if not isinstance(config_json, dict):
        raise ConfigError(f"{folder / 'config.json'} is not a JSON object; download or save it again")
    if reference := gguf_of(folder):
        found = open_gguf(reference.checked_file()).tensors
        tensors = {key: StoredTensor(each.shape, "F32", each.size, each.kind) for key, each in found.items()}
        return ModelFacts(name, folder, config_json, tensors, reference.bits)
    tensors, bits = _headers(folder)
    return ModelFacts(name, folder, config_json, tensors, bits)


def _headers(folder: Path) -> tuple[dict[str, StoredTensor], int]:
    """The tensors of all safetensors files in a folder, and the bits per weight that their metadata states, or 0."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    bits = 0
    for file in weight_files(folder):
        try:
            with safe_open(file, "np") as opened:
                told = (opened.metadata() or {}).get(SOURCE_BITS, "")
                bits = int(told) if told.isdecimal() else bits
                for name in opened.keys():  # noqa: SIM118 - no dict
                    part = opened.get_slice(name)
                    shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
                    found[name] = StoredTensor(shape, dtype, prod(shape) * DTYPE_BYTES.get(dtype, 1))
        except SafetensorError as error:
            raise ConfigError(f"{file} is not a sound safetensors file ({error}); download it again") from error
    return found, bits
