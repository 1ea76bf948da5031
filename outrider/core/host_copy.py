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
    stream: torch.cuda.Stream
    """That copies to it are made in. To ask for the current one takes as long as to record an event."""
    free: list[_Buffer]
    """Where it is kept while no copy uses it."""


_free: dict[tuple[int, int, torch.Size, torch.dtype], list[_Buffer]] = {}
"""By device, stream, shape and type: buffers that no copy uses. To pin memory anew takes longer than a copy."""


class HostCopy:
    """Tokens, or other numbers, whose copy to the host is under way; on the CPU, those themselves."""

    __slots__ = ("_array", "_buffer", "_chances", "_list", "tokens")

    def __init__(self, tokens: Tensor) -> None:
        """On the device they stay valid until the memory is written again."""
        self.tokens = tokens
        self._buffer: _Buffer | None = None
        if tokens.is_cuda:
            self._buffer = buffer = _buffer_for(tokens)
            buffer.memory.copy_(tokens, non_blocking=True)
            buffer.arrived.record(buffer.stream)
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
        if len(buffer.free) < _MAX_KEPT and array.size <= _MAX_KEPT_SIZE:
            buffer.free.append(buffer)
        return array


def _buffer_for(tokens: Tensor) -> _Buffer:
    """A free buffer for a copy in the current stream, or a new one."""
    device = tokens.get_device()
    free = _free.setdefault((device, _current_stream(device), tokens.shape, tokens.dtype), [])
    try:
        return free.pop()
    except IndexError:  # not asked for before: engines in other threads take buffers too
        return _new_buffer(tokens, free)


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _new_buffer(tokens: Tensor, free: list[_Buffer]) -> _Buffer:
    with torch.inference_mode(False):  # written to in that mode, and outside of it
        memory = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        stream = torch.cuda.current_stream(tokens.device)
        return _Buffer(memory, memory.numpy(), torch.cuda.Event(), stream, free)
