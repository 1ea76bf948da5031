"""Tokens decided on a device, on their way to the host: who only passes them on need not wait for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Tokens whose copy to the host is under way. On the CPU they are there."""

    def __init__(self, tokens: Tensor) -> None:
        """tokens int64; on the device they are good as long as nobody writes there."""
        self.tokens = tokens
        self._arrived: torch.cuda.Event | None = None
        self._host = tokens
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        self._list: list[Any] | None = None

    def list(self) -> list[Any]:
        """As Python numbers, nested as the tensor is; waited for where they have not arrived."""
        if self._list is None:
            if self._arrived is not None and not self._arrived.query():
                self._arrived.synchronize()
            self._list = self._host.tolist()
        return self._list
