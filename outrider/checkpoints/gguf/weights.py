"""A GGUF file's tensors by their Hugging Face names, dequantized a few rows at a time while they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.checkpoints.gguf.config import hf_config
from outrider.checkpoints.gguf.families import NOT_WEIGHTS, ROPE_FREQS, GGUFFamily, family_of, hf_name, hf_shape
from outrider.checkpoints.gguf.header import TensorInfo, read_header, storage_of
from outrider.checkpoints.gguf.metadata import Metadata
from outrider.core.errors import ConfigError

CHUNK_ELEMENTS = 1 << 20  # dequantized at a time by one thread: 4 MB of float32
MAX_THREADS = 8  # that dequantize
FLOATS = {0: np.float32, 1: np.float16}  # by the number of their storage type: read without the gguf package


@dataclass(frozen=True, slots=True)
class GGUFWeights:
    """A file's tensors by their Hugging Face names, with the values of a Hugging Face checkpoint."""

    file: Path
    meta: Metadata
    family: GGUFFamily
    config: Mapping[str, Any]
    """The model's config.json."""
    tensors: Mapping[str, TensorInfo]

    @property
    def storage(self) -> str:
        """The storage type that most weights have: Q4_K, F16."""
        elements: Counter[int] = Counter()
        for tensor in self.tensors.values():
            elements[tensor.kind] += tensor.elements
        found = storage_of(elements.most_common(1)[0][0])
        return "" if found is None else found[0]

    @property
    def bits(self) -> int:
        """Bits per weight of that type: 4 for Q4_1 and Q4_K, 16 for F16."""
        return int("".join(takewhile(str.isdecimal, self.storage.lstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))) or 0)

    def names(self) -> set[str]:
        return set(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """What values are dequantized to."""
        return torch.float32

    def stored(self, name: str) -> StoredRows:
        """The tensor's blocks as they lie in the file, mapped."""
        return StoredRows.of_tensor(self.file, self.tensors[name])

    @property
    def rotary_pairs(self) -> bool:
        """Whether the stored rows of q and k are in the order of rotary pairs, see GGUFFamily."""
        return self.family.rotary_pairs

    def read(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The tensor in this dtype, on this device. On the host no more than a few rows are held besides it."""
        out = torch.empty(self.shape(name), dtype=dtype, device=device)
        rows = out.view(-1, out.shape[-1])
        stored = StoredRows.of_tensor(self.file, self.tensors[name])
        offset = np.float32(self.family.norm_offset if name.endswith("norm.weight") else 0)
        step = max(1, CHUNK_ELEMENTS // out.shape[-1])

        def fill(first: int) -> None:
            values = stored.dequantize(first, first + step)
            rows[first : first + step] = torch.from_numpy(values - offset if offset else values)

        if step >= len(rows):
            fill(0)
        else:
            with ThreadPoolExecutor(min(MAX_THREADS, torch.get_num_threads())) as pool:
                list(pool.map(fill, range(0, len(rows), step)))  # a list, so that errors are raised
        heads = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}
        found = next((key for part, key in heads.items() if part in name), None)
        return unpermute(out, self.config[found]) if self.family.rotary_pairs and found else out


def open_gguf(file: Path) -> GGUFWeights:
    """Read a file's header. ConfigError where it is malformed, or holds a tensor that such a model does not have."""
    header = read_header(file)
    meta = Metadata(header.metadata, str(file))
    _, family = family_of(meta)
    divisors = next((tensor for tensor in header.tensors if tensor.name == ROPE_FREQS), None)
    freqs = None if divisors is None else StoredRows.of_tensor(file, divisors).dequantize(0, 1)[0]
    config = hf_config(header, meta, freqs)
    return GGUFWeights(file, meta, family, config, _rename_tensors(header.tensors, family, config, meta))


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A tensor's rows as the file stores them; a vector is one row."""

    data: np.ndarray
    """uint8 [rows, bytes of a row], mapped from the file."""
    kind: int
    where: str

    @staticmethod
    def of_tensor(file: Path, tensor: TensorInfo) -> StoredRows:
        mapped = np.memmap(file, dtype=np.uint8, mode="r", offset=tensor.start, shape=(tensor.size,))
        data = np.asarray(mapped)  # slices of a memmap cost more than those of a plain array
        rows = tensor.elements // tensor.shape[-1]
        return StoredRows(data.reshape(rows, -1), tensor.kind, f"{file}: tensor {tensor.name!r}")

    def dequantize(self, first: int, end: int) -> np.ndarray:
        """float32 [rows, columns]. ConfigError where the gguf package cannot read the storage type."""
        part = self.data[first:end]
        if self.kind in FLOATS:
            return part.view(FLOATS[self.kind]).astype(np.float32)
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(self.kind)
        try:
            return dequantize(part, kind)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.where} is stored as {kind.name}, which the installed gguf package cannot read; use a file in "
                "another quantisation, such as Q8_0 or Q4_K_M"
            ) from error


def unpermute(rows: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of rows within each head: from 0, h, 1, h + 1, ... to 0, 1, ..., h, h + 1, ..."""
    return rows.view(heads, -1, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


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
