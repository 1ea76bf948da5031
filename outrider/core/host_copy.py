"""Copying tokens from a device to the host without waiting for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class HostCopy:
    """Tokens whose copy to the host is under way; on the CPU, the tokens themselves."""

    def __init__(self, tokens: Tensor) -> None:
        """tokens: int64. On the device they stay valid until the memory is written again."""
        self.tokens = tokens
        self._arrived: torch.cuda.Event | None = None
        self._host = tokens
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._array: np.ndarray | None = None
        self._list: list[Any] | None = None

    def list(self) -> list[Any]:
        """The tokens as nested lists, shaped as the tensor is. Waits until they have arrived."""
        values = self.array().tolist() if self._list is None else self._list
        self._list = values
        return values

    def array(self) -> np.ndarray:
        """The same as an array, to be read only."""
        if self._array is None:
            if self._arrived is not None and not self._arrived.query():
                self._arrived.synchronize()
            self._array = self._host.numpy()
        return self._array
