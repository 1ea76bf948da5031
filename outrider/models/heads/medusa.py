"""Medusa: heads of residual layers, each of which predicts one position ahead from the target's hidden state."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.decoder import Attend, Decoder
from outrider.models.heads.config import HeadConfig


class ResidualLayer(nn.Module):
    """x + silu(linear(x))"""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Head i reads the target's hidden state at a token and predicts the token i + 2 positions later.

    The target itself predicts the next one. A head does not see the tokens in between: its layers have no attention.
    """

    skip = 0

    def __init__(self, config: HeadConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config, self._decoder = config, decoder
        hidden = config.hidden_size
        for i in range(config.medusa_heads):  # children are named by their numbers, as in the checkpoint
            layers: list[nn.Module] = [ResidualLayer(hidden) for _ in range(config.medusa_layers)]
            if config.own_head:
                layers.append(nn.Linear(hidden, config.vocab_size, bias=False))
            self.add_module(str(i), nn.Sequential(*layers))

    def fuse(self, features: Tensor) -> Tensor:
        """The last layer's outputs [N, hidden] -> [N, hidden], as the target's output head reads them"""
        return self._decoder.weights.norm(features).to(features.dtype)

    def step(self, ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, heads, vocab]"""
        return torch.stack([self.head_logits(i, hidden) for i in range(self.config.medusa_heads)], 1)

    def head_logits(self, i: int, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocab] of one head"""
        out = cast(nn.Sequential, self.get_submodule(str(i)))(hidden)
        return out.float() if self.config.own_head else self._decoder.logits(out)
