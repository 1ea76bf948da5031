"""Times a model's passes at start, in a second or two, and keeps the times for the next start."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median

import torch

from outrider.control.costs import PassTable
from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Span
from outrider.runners.base import Runner
from outrider.runners.pass_work import Experts

VERSION = 5
"""The version of kept times; those of another version are measured again."""
_REPEATS = 5
_FIRST_ID = -1_000_000
"""Sequences of measurements have ids that no request has."""
_MAX_CLOCK_HZ = 2e9
"""Roughly the highest clock rate of CUDA devices: the number of cycles that keeps one busy for a second."""
_DRAFT_ROWS = 2 + 64
"""Tokens of a made-up text, and rows that a head runs behind it, at most."""


def measure_passes(
    runner: Runner, shapes: Seq[tuple[int, int]], packed: Seq[tuple[int, int, int]], seconds: float
) -> PassTable:
    """Times of passes of these shapes (sequences, rows of each), over made-up texts of as many tokens.

    packed: shapes (sequences, max rows of one, rows of all) of further passes. No further shape of either list is begun
    after it took `seconds`. Shapes that the cache has no room for are left out.
    """
    times = _time_passes(runner, {(b, w): [w] * b for b, w in shapes}, seconds)
    ragged = {(b, rows): _widths(b, w, rows) for b, w, rows in packed}
    packed_times = _time_passes(runner, ragged, seconds)
    return PassTable(times, padded=runner.asynchronous, packed=packed_times, experts=_experts_of(runner))


def measure_drafts(
    target: Runner, draft: Callable[[Seq[Sequence]], bool], batches: Seq[int], tokens: int, seconds: float
) -> PassTable | None:
    """Times of drafts over the target's pages, for each batch, divided by their tokens; None where none is made.

    draft: drafts `tokens` tokens for each sequence; False: it made none. No further batch is begun after `seconds`.
    Each is timed behind a pass of the target, as in a round: alone, the drafter's weights would stay in the cache.
    """
    times: dict[tuple[int, int], float] = {}
    end = time.perf_counter() + seconds
    for batch in batches:
        if times and time.perf_counter() > end:
            break
        with suppress(MemoryError), _made_up(target, [_DRAFT_ROWS] * batch) as ids:
            seqs = [Sequence(seq_id, [0, 0], 1, SamplingParams(), 0) for seq_id in ids]
            if not draft(seqs):
                return None
            spans = [Span(seq_id, 0, (0,)) for seq_id in ids]
            before = partial(target.score, spans)
            times[batch, 1] = _median_seconds(partial(draft, seqs), target.device, before) / tokens
    return PassTable(times, padded=target.asynchronous) if times else None


def _experts_of(runner: Runner) -> Experts | None:
    return None if runner.work is None else runner.work.experts


def _time_passes(
    runner: Runner, passes: Mapping[tuple[int, int], Seq[int]], seconds: float
) -> dict[tuple[int, int], float]:
    """Times of passes, each of sequences of these widths; no further one is begun after `seconds`."""
    if runner.device.type == "cpu":
        return _time_in_turn(runner, passes, seconds)
    times: dict[tuple[int, int], float] = {}
    end = time.perf_counter() + seconds
    for key, widths in passes.items():
        if times and time.perf_counter() > end:
            break
        with suppress(MemoryError), _made_up_spans(runner, widths) as spans:
            times[key] = _median_seconds(lambda spans=spans: runner.score(spans), runner.device)
    return times


def _time_in_turn(
    runner: Runner, passes: Mapping[tuple[int, int], Seq[int]], seconds: float
) -> dict[tuple[int, int], float]:
    """The least time of each pass: how passes compare is what counts, and other work on the cores comes and goes.

    Passes take turns, so that such work slows all of them. At least two are timed, which tell what a row costs.
    """
    times: dict[tuple[int, int], float] = {}
    end = time.perf_counter() + seconds
    for _ in range(1 + _REPEATS):
        for key, widths in passes.items():
            if len(times) > 1 and time.perf_counter() > end:
                return times
            with suppress(MemoryError), _made_up_spans(runner, widths) as spans:
                took = _timed(lambda spans=spans: runner.score(spans))
                times[key] = min(took, times.get(key, took))
    return times


def _widths(batch: int, width: int, rows: int) -> list[int]:
    """The rows of each sequence, `rows` in all: the first sequences have `width`, the last ones one each."""
    widths = [1] * batch
    for i in range(batch):
        widths[i] = min(width, 1 + rows - sum(widths))
    return widths


@contextmanager
def _made_up_spans(runner: Runner, widths: Seq[int]) -> Iterator[list[Span]]:
    """Made-up sequences of one token and a draft, with this many rows each. MemoryError where they do not fit."""
    with _made_up(runner, widths) as ids:
        drafts = [Draft(tuple(i % runner.vocab_size for i in range(1, width))) for width in widths]
        yield [Span(seq_id, 0, (0,), draft) for seq_id, draft in zip(ids, drafts, strict=True)]


@contextmanager
def _made_up(runner: Runner, lengths: Seq[int]) -> Iterator[list[int]]:
    """The ids of made-up sequences with pages for this many tokens each. MemoryError where they do not fit."""
    opened: list[int] = []
    try:
        for seq_id, length in enumerate(lengths, start=_FIRST_ID):
            runner.pool.open(seq_id, ())
            opened.append(seq_id)
            if length > runner.context or not runner.pool.reserve(seq_id, length):
                raise MemoryError
        yield opened
    finally:
        for seq_id in opened:
            runner.release(seq_id, unpublish=True)


def _median_seconds(
    work: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None
) -> float:
    """The median seconds of a few runs, on a CUDA device by its own clock. before: run before each, and not timed."""
    work()
    if device.type != "cuda":
        return median(_timed(work, before) for _ in range(_REPEATS))
    torch.cuda.synchronize(device)
    launching = _timed(work) + _timed(before)
    return median(_device_seconds(work, before, 2 * launching) for _ in range(_REPEATS))


def _device_seconds(work: Callable[[], object], before: Callable[[], object], launching: float) -> float:
    """Seconds of the work on a CUDA device that need not wait for the host. launching: at most what a launch takes."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(launching * _MAX_CLOCK_HZ))
    before()
    began.record()
    work()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3


def _timed(work: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    before()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def key_of(*facts: object) -> str:
    """A file name for measured times: a hash of all that they depend on."""
    return sha256(json.dumps([VERSION, *map(str, facts)]).encode()).hexdigest()[:32]


def load_table(folder: Path, key: str, runner: Runner) -> PassTable | None:
    """Times measured before; None where there are none that can be read."""
    try:
        kept = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        times, packed = ({(int(b), int(n)): float(s) for b, n, s in kept[part]} for part in ("seconds", "packed"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not times or not all(b > 0 and n > 0 and 0 < s < 3600 for (b, n), s in (*times.items(), *packed.items())):
        return None
    return PassTable(times, padded=runner.asynchronous, packed=packed, experts=_experts_of(runner))


def save_table(folder: Path, key: str, table: PassTable) -> None:
    """Keep times for the next start; where the folder cannot be written they are measured again."""
    seconds, packed = ([[b, n, s] for (b, n), s in part.items()] for part in (table.seconds, table.packed))
    _write(folder, key, {"seconds": seconds, "packed": packed})


def kept_numbers(folder: Path, key: str) -> list[float] | None:
    """Numbers measured before; None where there are none that can be read."""
    try:
        return [float(x) for x in json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        return None


def keep_numbers(folder: Path, key: str, numbers: Seq[float]) -> None:
    """Keep numbers for the next start, as `save_table` keeps times."""
    _write(folder, key, list(numbers))


def _write(folder: Path, key: str, data: object) -> None:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f"{key}.{os.getpid()}.tmp"
        new.write_text(json.dumps(data), encoding="utf-8")
        new.replace(folder / f"{key}.json")
