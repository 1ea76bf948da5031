"""Guesses that were made on the device and may stay there: who only passes them on need not wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from torch import Tensor

from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token


class DeviceRow(Sequence[Token]):
    """One text's guesses out of a block [texts, steps]. Their number is known; reading them waits for them."""

    def __init__(self, block: HostCopy, row: int, count: int) -> None:
        self.block, self.row, self._count = block, row, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Token]:
        return iter(self.block.list()[self.row][: self._count])

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | Sequence[Token]:
        if isinstance(index, slice) and index.start in (None, 0) and index.step in (None, 1):
            return DeviceRow(self.block, self.row, len(range(self._count)[index]))
        return tuple(self)[index]


def copy_guesses(ids: Tensor, waiting: list[tuple[int, int, DeviceRow]]) -> None:
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
