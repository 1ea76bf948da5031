"""A draft model's output head over part of its vocabulary: fewer rows to read at every step.

Half of a small model's pass is its head. Tokens that are left out are never drafted, which costs acceptance at most:
the target verifies with its whole vocabulary. Chains that are drafted in one go on the device begin with a token by the
whole head, see graphed_chain.py.
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
    """Some rows of a decoder's head, copied, and the token of each column of their logits."""

    def __init__(self, decoder: Decoder, tokens: Seq[Token]) -> None:
        """tokens: all different, each below the vocabulary's size."""
        self.decoder = decoder
        self._whole = cast("Linear | Int8Linear", decoder.weights.head)  # the loader packs a head in no other way
        self.ids = torch.tensor(tokens, dtype=torch.int64, device=decoder.device)
        self.rows = self._whole.take(self.ids)

    @torch.inference_mode()
    def put(self, columns: Seq[int], tokens: Seq[Token]) -> None:
        """Give these columns to these tokens from now on; passes launched before are not affected.

        The caller makes sure that no token has two columns. One transfer, not waited for.
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
    """A decoder's whole head, and the reduced ones made of it; one of them is in use.

    A reduced head keeps its addresses, since captured passes read it there: for other tokens of the same number, its
    rows are replaced in place.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._reduced: dict[int, ReducedHead] = {}
        self.size = 0
        """The number of tokens of the reduced head in use; 0: the whole head is."""

    def use(self, tokens: Seq[Token]) -> ReducedHead | None:
        """Score only these tokens from now on; none given: all, by the whole head."""
        self.size = len(tokens)
        if self.size in self._reduced:
            self._reduced[self.size].put(range(self.size), tokens)
        elif self.size:
            self._reduced[self.size] = ReducedHead(self._decoder, tokens)
        return self.reduced(self.size)

    def reduced(self, size: int) -> ReducedHead | None:
        """The reduced head of this size; None for 0."""
        return self._reduced.get(size)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, hidden] -> float32 [M, vocab] by the head in use"""
        head = self.reduced(self.size)
        return self._decoder.logits(hidden) if head is None else head.logits(hidden)
