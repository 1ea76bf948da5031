"""The contract of a drafting head that drafts token by token: a few layers over the target's own hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from outrider.models.decoder import Attend
from outrider.models.heads.config import HeadConfig


class Head(Protocol):
    """An `nn.Module`, so that training and drafting share one definition.

    At position j of a text it reads token j and a hidden state of position j - 1, and predicts token j + 1. That hidden
    state is the target's (`fuse`) where the target has read position j - 1, else the head's own output there. So its
    keys and values at position j depend only on tokens 0 to j, as the target's do.
    """

    config: HeadConfig
    skip: int
    """The number of first positions that only their own rows see. EAGLE has 1: it is trained without a row for the
    first token of a text, which has no hidden state before it."""

    def fuse(self, features: Tensor) -> Tensor:
        """The target's tapped outputs [N, taps * hidden] -> [N, hidden]"""
        ...

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """int64 [N], [N, hidden] of the positions before, int64 [N] -> [N, hidden]"""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, outputs]"""
        ...
