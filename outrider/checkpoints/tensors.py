"""A checkpoint's tensors by name, each read when it is asked for: from safetensors files, or from a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.checkpoints.folder import gguf_of, weight_files
from outrider.checkpoints.gguf.weights import StoredRows, open_gguf
from outrider.core.errors import ConfigError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Tensors(Protocol):
    """A checkpoint's tensors by their Hugging Face names."""

    @property
    def rotary_pairs(self) -> bool:
        """Whether the stored rows of q and k are in the order of rotary pairs."""
        ...

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype:
        """What the tensor is stored as, or dequantized to."""
        ...

    def read(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A copy in this dtype, on this device."""
        ...

    def stored(self, name: str) -> StoredRows | None:
        """The tensor's blocks as they lie in the file; None where it stores plain numbers."""
        ...


class SafetensorsFiles:
    """The tensors of all safetensors files of a checkpoint."""

    rotary_pairs = False

    def __init__(self, files: list[Any]) -> None:
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return self._mapped(name).dtype

    def read(self, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A copy, because a memory-mapped file may change under its tensor."""
        return self._mapped(name).to(device, dtype, copy=True)

    def stored(self, name: str) -> None:
        return None

    def _mapped(self, name: str) -> Tensor:
        tensor = self._files[name].get_tensor(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise ConfigError(
                f"{name} is stored as {tensor.dtype}; it must be one of {', '.join(map(str, FLOAT_DTYPES))}"
            )
        return tensor


@contextmanager
def open_tensors(folder: Path) -> Iterator[Tensors]:
    """The tensors of the model in a folder. ConfigError where a file is damaged."""
    if reference := gguf_of(folder):
        yield open_gguf(reference.checked_file())
        return
    with ExitStack() as stack:
        files: list[Any] = []
        for file in weight_files(folder):
            try:
                files.append(stack.enter_context(safe_open(file, "pt")))
            except SafetensorError as error:
                raise ConfigError(
                    f"{file} is not a sound safetensors file ({error}); download or save the model again"
                ) from error
        yield SafetensorsFiles(files)
