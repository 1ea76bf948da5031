"""Times a model's passes at start, in a second or two, and keeps the times for the next start."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from outrider.control.costs import PassTable
from outrider.core.draft import Draft
from outrider.core.sequence import Span
from outrider.runners.base import Runner

VERSION = 1
"""Of the file; times of another version are measured again."""
_REPEATS = 5
_FIRST_ID = -1_000_000
"""Sequences of measurements have ids that no request has."""


def measure_passes(runner: Runner, shapes: Seq[tuple[int, int]], seconds: float) -> PassTable:
    """Times of passes of these (sequences, rows of each) of a text of as many tokens.

    Begins no shape after `seconds`. Shapes that the cache has no room for are left out.
    """
    times: dict[tuple[int, int], float] = {}
    end = time.perf_counter() + seconds
    for batch, width in shapes:
        if times and time.perf_counter() > end:
            break
        with suppress(MemoryError):
            times[batch, width] = _time_pass(runner, batch, width)
    return PassTable(times, padded=runner.asynchronous)


def _time_pass(runner: Runner, batch: int, width: int) -> float:
    ids = range(_FIRST_ID, _FIRST_ID + batch)
    opened: list[int] = []
    try:
        for seq_id in ids:
            runner.pool.open(seq_id, ())
            opened.append(seq_id)
            if not runner.pool.reserve(seq_id, width):
                raise MemoryError
        draft = Draft(tuple(i % runner.vocab_size for i in range(1, width)))
        spans = [Span(seq_id, 0, (0,), draft) for seq_id in ids]
        return _median_seconds(lambda: runner.score(spans), runner.device)
    finally:
        for seq_id in opened:
            runner.release(seq_id, unpublish=True)


def _median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """The median of a few runs. On a device they are launched one behind the other, and its own clock counts."""
    work()
    if device.type != "cuda":
        return median(_timed(work) for _ in range(_REPEATS))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
    for event in events:
        event.record()
        work()
    torch.cuda.synchronize(device)
    return median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def key_of(*facts: object) -> str:
    """A file name for the times of a model on a machine, by all that they depend on."""
    return sha256(json.dumps([VERSION, *map(str, facts)]).encode()).hexdigest()[:32]


def load_table(folder: Path, key: str, runner: Runner) -> PassTable | None:
    """Times measured before; None where there are none that can be read."""
    try:
        kept = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        times = {(int(b), int(w)): float(s) for b, w, s in kept["seconds"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not times or not all(b > 0 and w > 0 and 0 < s < 3600 for (b, w), s in times.items()):
        return None
    return PassTable(times, padded=runner.asynchronous)


def save_table(folder: Path, key: str, table: PassTable) -> None:
    """Keep times for the next start; where the folder cannot be written they are measured again."""
    rows = [[b, w, s] for (b, w), s in table.seconds.items()]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{key}.{os.getpid()}.tmp"
        new.write_text(json.dumps({"seconds": rows}), encoding="utf-8")
        new.replace(folder / f"{key}.json")
