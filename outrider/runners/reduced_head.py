"""A draft model's head over part of its vocabulary: fewer rows to read at every step.

Half of a small model's pass is its head. What a draft leaves out it does not guess, and that is
all: the target verifies with its whole vocabulary. Chains that are drafted in one go on the device
begin with a guess by the whole head, see drafting.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import cast

import torch
from torch import Tensor

from outrider.core.sampling import Token
from outrider.models.decoder import Decoder
from outrider.models.linear import Int8Linear, Linear


class ReducedHead:
    """Some rows of a decoder's head, copied, and the token that each column of their logits stands for."""

    def __init__(self, decoder: Decoder, tokens: Seq[Token]) -> None:
        """tokens: all different, each below the vocabulary's size."""
        self.decoder = decoder
        self._whole = cast("Linear | Int8Linear", decoder.weights.head)  # the loader packs a head in no other way
        self.ids = torch.tensor(tokens, dtype=torch.int64, device=decoder.device)
        self.rows = self._whole.take(self.ids)

    @torch.inference_mode()
    def put(self, columns: Seq[int], tokens: Seq[Token]) -> None:
        """Let these columns stand for these tokens from now on; passes launched before are not touched.

        The caller sees to it that no token stands in two columns. One transfer, not waited for.
        """
        both = torch.tensor([list(columns), list(tokens)], dtype=torch.int64)
        if self.ids.is_cuda:
            both = both.pin_memory()
        places, ids = both.to(self.ids.device, non_blocking=True)
        self.rows.put(places, self._whole, ids)  # pyright: ignore[reportArgumentType] - of one kind: taken from it
        self.ids.index_copy_(0, places, ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> float32 [M, vocab], -inf for every token that is left out"""
        return self.widen(self.decoder.logits(hidden, self.rows))

    def widen(self, logits: Tensor) -> Tensor:
        """Its own logits [M, len(ids)] over the whole vocabulary: [M, vocab], -inf for what is left out"""
        wide = logits.new_full((len(logits), self.decoder.config.vocab_size), float("-inf"))
        return wide.scatter_(1, self.ids.expand(len(logits), -1), logits)


class OutputHeads:
    """A decoder's whole head, and the narrow ones made of it; one of them is in use.

    A narrow head stays where it is in memory, since recorded passes read it there: asked for
    another of the same width, it takes up the new tokens in place.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._narrow: dict[int, ReducedHead] = {}
        self.width = 0
        """Tokens the head in use says; 0: all."""

    def use(self, tokens: Seq[Token]) -> ReducedHead | None:
        """Say only these tokens from now on; none given: all, by the whole head."""
        self.width = len(tokens)
        if self.width in self._narrow:
            self._narrow[self.width].put(range(self.width), tokens)
        elif self.width:
            self._narrow[self.width] = ReducedHead(self._decoder, tokens)
        return self.narrow(self.width)

    def narrow(self, width: int) -> ReducedHead | None:
        """The narrow head of this width; None for 0."""
        return self._narrow.get(width)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> float32 [M, vocab] by the head in use"""
        head = self.narrow(self.width)
        return self._decoder.logits(hidden) if head is None else head.logits(hidden)
