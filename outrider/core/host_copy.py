"""Copying tokens from a device to the host without waiting for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_MAX_KEPT = 8
"""Buffers of one shape that are kept for later copies."""
_MAX_KEPT_SIZE = 1 << 16
"""Max numbers of such a buffer: larger ones are rare, and given back at once."""


class _Buffer(NamedTuple):
    """Pinned memory that a copy goes to, and the event of its arrival."""

    memory: Tensor
    array: np.ndarray
    arrived: torch.cuda.Event


_free: dict[tuple[int, torch.Size, torch.dtype], list[_Buffer]] = {}
"""By device, shape and type: buffers that no copy uses. To pin memory anew takes longer than a copy."""


class HostCopy:
    """Tokens, or other numbers, whose copy to the host is under way; on the CPU, those themselves."""

    __slots__ = ("_array", "_buffer", "_chances", "_list", "tokens")

    def __init__(self, tokens: Tensor) -> None:
        """On the device they stay valid until the memory is written again."""
        self.tokens = tokens
        self._buffer: _Buffer | None = None
        if tokens.is_cuda:
            self._buffer = _take_free(tokens) or _new_buffer(tokens)
            self._buffer.memory.copy_(tokens, non_blocking=True)
            self._buffer.arrived.record()
        self._array: np.ndarray | None = None
        self._list: list[Any] | None = None
        self._chances: np.ndarray[Any, np.dtype[np.float64]] | None = None

    def list(self) -> list[Any]:
        """The tokens as nested lists, shaped as the tensor is. Waits until they have arrived."""
        values = self.array().tolist() if self._list is None else self._list
        self._list = values
        return values

    def array(self) -> np.ndarray:
        """The same as an array, to be read only."""
        if self._array is None:
            self._array = self.tokens.numpy() if self._buffer is None else self._take(self._buffer)
        return self._array

    def kept(self) -> HostCopy:
        """The same, of what the memory holds now, where it is the host's: it is written again later."""
        if self._buffer is None:
            self._array = self.tokens.numpy().copy()
        return self

    def chances(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The same as numbers from 0 to 1; NaN counts as 0."""
        if self._chances is None:
            stated = np.fmax(self.array(), 0.0, dtype=np.float64)  # which is 0 where the other is NaN
            self._chances = np.fmin(stated, 1.0, out=stated)
        return self._chances

    def _take(self, buffer: _Buffer) -> np.ndarray:
        """What has arrived, out of the buffer, which is free then."""
        if not buffer.arrived.query():
            buffer.arrived.synchronize()
        array = buffer.array.copy()
        free = _free.setdefault(_key(self.tokens), [])
        if len(free) < _MAX_KEPT and array.size <= _MAX_KEPT_SIZE:
            free.append(buffer)
        return array


def _key(tokens: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return tokens.get_device(), tokens.shape, tokens.dtype


def _take_free(tokens: Tensor) -> _Buffer | None:
    try:
        return _free[_key(tokens)].pop()
    except (KeyError, IndexError):  # not asked for before: engines in other threads take buffers too
        return None


def _new_buffer(tokens: Tensor) -> _Buffer:
    with torch.inference_mode(False):  # written to in that mode, and outside of it
        memory = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        return _Buffer(memory, memory.numpy(), torch.cuda.Event())
