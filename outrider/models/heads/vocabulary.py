"""The embedding and output head that a drafting head shares with its target, whole or in part."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.models.decoder import Decoder
from outrider.models.heads.config import HeadConfig
from outrider.models.linear import Int8Linear, Linear, LinearOp


class VocabularyHead(nn.Module):
    """Embedding and output head are the target's, unless the checkpoint brings its own.

    With a reduced vocabulary column i of its logits is token i + d2t[i]; the rows of the target's output head are then
    copied on first use, before which `d2t` must be set.
    """

    d2t: Tensor | None

    def __init__(self, config: HeadConfig, decoder: Decoder) -> None:
        super().__init__()
        self.config, self.decoder = config, decoder
        hidden, reduced = config.hidden_size, config.draft_vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if config.own_embedding else None
        self.lm_head = nn.Linear(hidden, config.outputs, bias=False) if config.own_head else None
        self.register_buffer("d2t", torch.zeros(reduced, dtype=torch.int64) if reduced else None)
        self._rows: LinearOp | None = None

    def tokens(self) -> Tensor | None:
        """int64 [outputs]: the token of each column of its logits; None: columns are tokens."""
        return None if self.d2t is None else torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [N] -> [N, hidden]"""
        own = self.embed_tokens
        return self.decoder.weights.embed(ids) if own is None else F.embedding(ids, own.weight)

    def output_head(self) -> LinearOp:
        """[N, hidden] -> [N, outputs]"""
        if self.lm_head is not None:
            return self.lm_head
        if self._rows is None:
            whole, tokens = self.decoder.weights.head, self.tokens()
            self._rows = whole if tokens is None else cast("Linear | Int8Linear", whole).take(tokens)
        return self._rows

    def output_logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden], after any final norm -> float32 [N, outputs]"""
        if self.lm_head is not None:
            return self.lm_head(hidden).float()
        return self.decoder.logits(hidden, self.output_head())
