"""Drafts made on a device, and how sure of them it is: rows of numbers whose copy to the host is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from outrider.core.host_copy import HostCopy


class DeviceRow(Sequence[int]):
    """The first `count` numbers of one row of a block [rows, columns]. Reading them waits for the copy.

    padded: only the device knows how many there are. Of the `count` numbers those at the end may be negative,
    which is no token: no choice of the target equals it.
    """

    __slots__ = ("_count", "block", "padded", "row")

    def __init__(self, block: HostCopy, row: int, count: int, *, padded: bool = False) -> None:
        self.block, self.row, self.padded, self._count = block, row, padded, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return iter(self.block.list()[self.row][: self._count])

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, int) and 0 <= index < self._count:
            return self.block.list()[self.row][index]
        if isinstance(index, slice) and index.start in (None, 0) and index.step in (None, 1):
            return DeviceRow(self.block, self.row, len(range(self._count)[index]), padded=self.padded)
        return self.block.list()[self.row][: self._count][index]

    def without_padding(self) -> Sequence[int]:
        """The numbers that are there. Waits for them where the row is padded."""
        if not self.padded:
            return self
        numbers = self.block.list()[self.row][: self._count]
        for i, number in enumerate(numbers):
            if number < 0:
                return tuple(numbers[:i])
        return tuple(numbers)


class ConfidenceRow(NamedTuple):
    """How likely each token of a draft is accepted where those before it are, as its drafter states it.

    One row of a block [rows, tokens]; tokens that the draft was cut by are told of, too.
    """

    block: HostCopy
    row: int

    def read(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """[tokens], from 0 to 1; NaN counts as 0. To be read only. Waits for them."""
        return self.block.chances()[self.row]
