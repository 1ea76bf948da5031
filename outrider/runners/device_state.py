"""Where texts stand once a round in flight is through: known to the device before the host has heard of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_WIDTH = 32
"""Rows of one text that a pass behind another takes at most: those of a recorded pass."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """The texts of a round, in its order, on the device that scored it."""

    lengths: Tensor  # int64 [B]: tokens of each text; all but the last are cached
    last: Tensor  # int64 [B, 2]: its last two tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Seq[int]) -> DeviceState:
        """Of some of the texts, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        index = torch.tensor(rows, dtype=torch.int64)
        if self.lengths.is_cuda:
            index = index.pin_memory().to(self.lengths.device, non_blocking=True)
        return DeviceState(self.lengths[index], self.last[index])
