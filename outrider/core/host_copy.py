"""Copying tokens from a device to the host without waiting for them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_MAX_KEPT = 8
"""Max buffers of one shape that are kept for later copies."""
_MAX_KEPT_SIZE = 1 << 16
"""Max numbers that a kept buffer holds: larger buffers are rare, and freed after their copy."""


class _Buffer(NamedTuple):
    """Pinned host memory that a copy writes to, and the event recorded behind the copy."""

    memory: Tensor
    array: np.ndarray
    arrived: torch.cuda.Event
    stream: torch.cuda.Stream
    """The stream of this buffer's copies. Asking for the current stream takes as long as recording an event."""
    free: list[_Buffer]
    """The list that holds the buffer while no copy uses it."""


_free: dict[tuple[int, int, torch.Size, torch.dtype], list[_Buffer]] = {}
"""Unused buffers, by device, stream, shape and dtype. Pinning new memory takes longer than a copy."""


class HostCopy:
    """Tokens, or other numbers, whose copy to the host is under way; on the CPU, the tensor's own memory."""

    __slots__ = ("_array", "_buffer", "_chances", "_list", "tokens")

    def __init__(self, tokens: Tensor) -> None:
        """Starts the copy. `tokens` itself stays valid on the device until its memory is written again."""
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
        """The numbers as nested lists in the tensor's shape. Waits for the copy."""
        values = self.array().tolist() if self._list is None else self._list
        self._list = values
        return values

    def array(self) -> np.ndarray:
        """The numbers as an array, which must not be modified. Waits for the copy."""
        if self._array is None:
            self._array = self.tokens.numpy() if self._buffer is None else self._take(self._buffer)
        return self._array

    def kept(self) -> HostCopy:
        """This copy, with the values of now: on the CPU they are copied from memory that is written again later."""
        if self._buffer is None:
            self._array = self.tokens.numpy().copy()
        return self

    def chances(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """The numbers as probabilities, float64 from 0 to 1; NaN counts as 0. Waits for the copy."""
        if self._chances is None:
            stated = np.fmax(self.array(), 0.0, dtype=np.float64)  # fmax gives 0 for NaN
            self._chances = np.fmin(stated, 1.0, out=stated)
        return self._chances

    def _take(self, buffer: _Buffer) -> np.ndarray:
        """Wait for the copy, take its numbers out of the buffer, and keep the buffer for later copies."""
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
    except IndexError:  # no check before the pop: engines in other threads take buffers too
        return _new_buffer(tokens, free)


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _new_buffer(tokens: Tensor, free: list[_Buffer]) -> _Buffer:
    with torch.inference_mode(False):  # the buffer is written both in inference mode and outside it
        memory = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        stream = torch.cuda.current_stream(tokens.device)
        return _Buffer(memory, memory.numpy(), torch.cuda.Event(), stream, free)
