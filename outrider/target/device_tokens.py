"""Guesses that were made on the device and may stay there: who only passes them on need not wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor

from outrider.core import Token


class TokenBlock:
    """Tokens [texts, steps] on a CUDA device, on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        """tokens int64 [texts, steps]; on the device they are good until the next round."""
        self.tokens = tokens
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        self._host.copy_(tokens, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()
        self._lists: list[list[Token]] | None = None

    def lists(self) -> list[list[Token]]:
        """On the host, waited for where they have not arrived."""
        if self._lists is None:
            if not self._arrived.query():
                self._arrived.synchronize()
            self._lists = self._host.tolist()
        return self._lists


class DeviceTokens(Sequence[Token]):
    """One text's guesses out of a block. Their number is known; reading them waits until they have arrived."""

    def __init__(self, block: TokenBlock, row: int, count: int) -> None:
        self.block, self.row, self._count = block, row, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Token]:
        return iter(self.block.lists()[self.row][: self._count])

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | Sequence[Token]:
        if isinstance(index, slice) and index.start in (None, 0) and index.step in (None, 1):
            return DeviceTokens(self.block, self.row, len(range(self._count)[index]))
        return tuple(self)[index]


def copy_guesses(ids: Tensor, waiting: list[tuple[int, int, DeviceTokens]]) -> None:
    """Copy guesses into ids [texts, width]: each (row, column, guesses) from its column on.

    In one go where they lie side by side and are equally long.
    """
    row, column, first = waiting[0]
    together = [(i, c, d.block, d.row, len(d)) for i, c, d in waiting]
    if together == [(row + i, column, first.block, first.row + i, len(first)) for i in range(len(waiting))]:
        source = first.block.tokens[first.row : first.row + len(waiting), : len(first)]
        ids[row : row + len(waiting), column : column + len(first)].copy_(source)
        return
    for i, c, guesses in waiting:
        ids[i, c : c + len(guesses)].copy_(guesses.block.tokens[guesses.row, : len(guesses)])
