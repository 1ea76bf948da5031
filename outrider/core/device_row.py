"""Draft tokens and confidences computed on a device: rows of a tensor whose copy to the host is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, overload

import numpy as np

from outrider.core.host_copy import HostCopy


class DeviceRow(Sequence[int]):
    """The first `count` numbers of one row of a block [rows, columns]. Reading a number waits for the copy.

    padded: only the device knows how many of the `count` numbers are tokens. Those behind the tokens are negative:
    padding, which is never accepted.
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
        """The tokens before the padding. Waits for the copy where the row is padded."""
        if not self.padded:
            return self
        numbers = self.block.list()[self.row][: self._count]
        for i, number in enumerate(numbers):
            if number < 0:
                return tuple(numbers[:i])
        return tuple(numbers)


class ConfidenceRow(NamedTuple):
    """For each token of a draft, the probability its drafter states that it is accepted, given those before it are.

    One row of a block [rows, tokens]. The row also holds the tokens that were cut off the draft.
    """

    block: HostCopy
    row: int

    def read(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        """float64 [tokens], from 0 to 1; NaN counts as 0. Waits for the copy. The array must not be modified."""
        return self.block.chances()[self.row]
