"""The largest value of each row, and where it is."""

from __future__ import annotations

import torch
from torch import Tensor


def largest(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[N, columns] -> [N] values and int64 [N] columns, the first among equals; NaN counts as the largest.

    On the CPU by numpy, in one thread: torch divides even a single row between threads, and waits for all of them where
    other work occupies the cores.
    """
    if not largest_of_numpy(rows):
        values, at = rows.max(-1)
        return values, at
    at = torch.from_numpy(rows.detach().numpy().argmax(-1))
    return rows.gather(-1, at[:, None])[:, 0], at


def largest_of_numpy(rows: Tensor) -> bool:
    """Whether `largest` uses numpy for these rows."""
    return rows.device.type == "cpu" and rows.dtype in (torch.float32, torch.float64)
