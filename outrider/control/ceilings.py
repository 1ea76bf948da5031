"""Measures a device's peak rates: bytes copied and operations computed in a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from outrider.control.limits import Ceilings, PassLimits
from outrider.control.measure import keep_numbers, kept_numbers, key_of
from outrider.runners.base import Runner

_REPEATS = 4
_COPIED_BYTES = {"cuda": 1 << 27, "cpu": 1 << 26}
"""The number of bytes copied, meant to exceed any cache."""
_PRODUCT_SIZE = {"cuda": 4096, "cpu": 768}
"""Rows and columns of the matrices: a product takes a fifth of a millisecond on an H200, tens of them on a CPU core."""


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings | None:
    """Measure a device's ceilings, in some hundredths of a second; None where it has no memory left for that."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    copied, size = _COPIED_BYTES[kind], _PRODUCT_SIZE[kind]
    try:
        source = torch.ones(copied, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        product = torch.empty_like(matrix)
        copying = _fastest(lambda: target.copy_(source), device)
        multiplying = _fastest(lambda: torch.mm(matrix, matrix, out=product), device)
    except torch.OutOfMemoryError:
        return None
    return Ceilings(2 * copied / copying, 2 * size**3 / multiplying)


def ceilings_of(device: torch.device, dtype: torch.dtype, folder: Path | None, *facts: object) -> Ceilings | None:
    """A device's ceilings: those that an earlier start with the same `facts` kept in the folder, else measured now."""
    key = key_of("ceilings", device, dtype, *facts)
    known = None if folder is None else kept_numbers(folder, key)
    if known is not None and len(known) == 2 and min(known) > 0:
        return Ceilings(*known)
    measured = measure_ceilings(device, dtype)
    if measured is not None and folder is not None:
        keep_numbers(folder, key, [measured.bandwidth, measured.arithmetic])
    return measured


def limits_of(target: Runner, folder: Path | None, facts: Seq[object]) -> PassLimits | None:
    """What a target's passes are bound by; None where its work is not known, or nothing could be measured."""
    if target.work is None:
        return None
    dtype = torch.float32 if target.device.type == "cpu" else torch.bfloat16
    ceilings = ceilings_of(target.device, dtype, folder, *facts)
    return None if ceilings is None else PassLimits(target.work, ceilings)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs, after one that is not counted."""
    work()
    times: list[float] = []
    for _ in range(_REPEATS):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - began)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
