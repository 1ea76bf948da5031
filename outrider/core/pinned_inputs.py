"""Copies of integers from the host to a device that the host does not wait for."""

from __future__ import annotations

import numpy as np
import torch

_STAGES, _STAGED = 4, 1 << 14
"""The number of buffers of a `PinnedStage`, and how many numbers each holds at first."""


class PinnedInputs:
    """The int64 inputs of captured work: written on the host, sent in one copy that is not waited for.

    On the CPU the host writes to the memory that the work reads.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # the tensor is also written outside inference mode
            self.ints = torch.zeros(size, dtype=torch.int64, device=device)
        self.current = 0
        """The index of the array that is written to."""
        if device.type == "cpu":
            self.arrays = [self.ints.numpy()] * 2
            return
        self._hosts = [torch.zeros(size, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self.arrays = [host.numpy() for host in self._hosts]
        self._arrived = [torch.cuda.Event() for _ in self._hosts]
        self._stream = torch.cuda.current_stream(device)

    def array(self) -> np.ndarray:
        """The array to write the next inputs to. Waits until the last copy from it has arrived."""
        self.current ^= 1
        if self.ints.is_cuda and not self._arrived[self.current].query():
            self._arrived[self.current].synchronize()
        return self.arrays[self.current]

    def send(self) -> None:
        if self.ints.is_cuda:
            self.ints.copy_(self._hosts[self.current], non_blocking=True)
            self._arrived[self.current].record(self._stream)


class PinnedStage:
    """Sends any number of integers to a device through reused pinned memory: pinning anew takes longer than a copy."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._next = device, 0
        count = _STAGES if device.type == "cuda" else 0
        self._hosts = [torch.zeros(_STAGED, dtype=torch.int64, pin_memory=True) for _ in range(count)]
        self._arrived = [torch.cuda.Event() for _ in self._hosts]

    def send(self, values: np.ndarray) -> torch.Tensor:
        """values, int64 [rows, count], on the device; on the CPU, a tensor over the same memory."""
        if self.device.type != "cuda":
            return torch.from_numpy(values)
        host = self._buffer(values.size)[: values.size].view(values.shape)
        host.numpy()[:] = values
        sent = host.to(self.device, non_blocking=True)
        self._arrived[self._next].record()
        return sent

    def _buffer(self, size: int) -> torch.Tensor:
        """The next buffer, of at least `size` numbers. Waits until the last copy from it has arrived."""
        self._next = (self._next + 1) % len(self._hosts)
        self._arrived[self._next].synchronize()
        if len(self._hosts[self._next]) < size:
            grown = 1 << (size - 1).bit_length()
            self._hosts[self._next] = torch.zeros(grown, dtype=torch.int64, pin_memory=True)
        return self._hosts[self._next]
