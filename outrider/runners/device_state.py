"""Where a round leaves its sequences, on the device: known there before the host has read the round's tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_WIDTH = 32
"""Rows of one decoding sequence in a pass: its last token and its draft. An ancestor mask has a bit for each."""


@dataclass(frozen=True, slots=True)
class DeviceState:
    """B sequences after a round, in the round's order. All tensors are on the target's device."""

    lengths: Tensor  # int64 [B]: tokens of each text; all but the last are cached
    last: Tensor  # int64 [B, 2]: its last two tokens
    tokens: Tensor | None = None  # int64 [B, W]: what the round committed, accepted + 1 of them; the rest is undefined
    accepted: Tensor | None = None  # int64 [B]: draft tokens among them
    features: Tensor | None = None  # [B, W, taps * hidden]: of the text's last token, then of each accepted node

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Seq[int]) -> DeviceState:
        """The state of some of the sequences, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        index = torch.tensor(rows, dtype=torch.int64)
        if self.lengths.is_cuda:
            index = index.pin_memory().to(self.lengths.device, non_blocking=True)

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index]

        return DeviceState(
            self.lengths[index], self.last[index], some(self.tokens), some(self.accepted), some(self.features)
        )
