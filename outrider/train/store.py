"""What the target computed for packed rows, kept on the device and read by many steps."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from outrider.train.packing import PackedRows
from outrider.train.target import TargetOutputs, TrainingTarget

CUDA_SHARE, CPU_SHARE = 0.6, 0.25  # of the free memory that kept outputs may take
READ_TOKENS = {"cuda": 65_536}  # of one pass of the target; elsewhere a row at a time


class KeptRows:
    """A number of packed rows with the target's outputs, in tensors that stay where they are.

    `load` fills them, `take` copies some of them out. The target reads a row once for all the steps that use it.
    """

    def __init__(self, target: TrainingTarget, packed: PackedRows, count: int) -> None:
        """packed: all rows there are, on the CPU. count: how many are kept at a time."""
        self._target, self._packed = target, packed
        decoder, length = target.decoder, packed.tokens.shape[1]
        device, hidden = decoder.device, decoder.config.hidden_size
        made = {f.name: getattr(packed, f.name) for f in fields(packed)}
        shape = (count, length)
        self._rows = PackedRows(*(torch.empty(shape, dtype=each.dtype, device=device) for each in made.values()))
        self._outputs = TargetOutputs(
            torch.empty((*shape, len(target.taps) * hidden), dtype=decoder.dtype, device=device),
            torch.empty((*shape, hidden), dtype=decoder.dtype, device=device),
            torch.empty(shape, device=device),
            torch.empty(shape, dtype=torch.int64, device=device),
        )

    def __len__(self) -> int:
        return len(self._rows)

    def load(self, chosen: Tensor) -> None:
        """Keep these rows. chosen: int64 [at most len(self)], on the CPU."""
        length = self._rows.tokens.shape[1]
        device = self._target.decoder.device
        step = max(1, READ_TOKENS.get(device.type, 1) // length)
        for begin in range(0, len(chosen), step):
            part = self._packed.take(chosen[begin : begin + step]).to(device)
            end = begin + len(part)
            outputs = self._target.read(part)
            for f in fields(PackedRows):
                getattr(self._rows, f.name)[begin:end] = getattr(part, f.name)
            for f in fields(TargetOutputs):
                kept = getattr(self._outputs, f.name)
                kept[begin:end] = getattr(outputs, f.name).view(kept[begin:end].shape)

    def take(self, slots: Tensor) -> tuple[PackedRows, TargetOutputs]:
        """Rows by their places here. slots: int64 [R], on the device."""
        parts = (getattr(self._outputs, f.name)[slots].flatten(0, 1) for f in fields(TargetOutputs))
        return self._rows.take(slots), TargetOutputs(*parts)


def row_bytes(target: TrainingTarget, length: int) -> int:
    """The bytes that one kept row takes."""
    decoder = target.decoder
    outputs = (len(target.taps) + 1) * decoder.config.hidden_size * decoder.dtype.itemsize + 12
    return length * (outputs + 4 * 8 + 1)


def rows_that_fit(target: TrainingTarget, length: int, free: int) -> int:
    """The number of rows that fit into the share of `free` bytes that kept rows may take."""
    share = CUDA_SHARE if target.decoder.device.type == "cuda" else CPU_SHARE
    return int(free * share) // row_bytes(target, length)
