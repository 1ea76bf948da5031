"""Passes on the CPU are timed in turn, and the least time of each counts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import cast

import pytest
import torch

from outrider.control import measure
from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool
from outrider.runners.base import Runner

SHAPES = [(1, 1), (1, 8), (1, 4)]


class TimedRunner:
    """Passes advance a clock of their own: 6 s and 1 more for each row, times `slower` of the number of the pass."""

    device, vocab_size, context, asynchronous, work = torch.device("cpu"), 100, 64, False, None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slower: Callable[[int], float]) -> None:
        self.pool, self.now, self.passes, self.slower = PagePool(64, 16), 0.0, list[int](), slower
        monkeypatch.setattr(measure.time, "perf_counter", lambda: self.now)

    def score(self, spans: Seq[Span]) -> None:
        rows = sum(span.width for span in spans)
        self.now += (6 + rows) * self.slower(len(self.passes))
        self.passes.append(rows)

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        self.pool.close(seq_id, unpublish=unpublish)

    def times(self, seconds: float) -> dict[tuple[int, int], float]:
        return dict(measure.measure_passes(cast(Runner, self), SHAPES, [], seconds).seconds)


def test_other_work_for_a_while_does_not_change_what_a_row_costs(monkeypatch: pytest.MonkeyPatch):
    """The cores are shared while the first passes are timed: medians of one shape after another would mislead."""
    runner = TimedRunner(monkeypatch, lambda number: 3.0 if number < 8 else 1.0)
    assert runner.times(1e9) == {(1, 1): 7.0, (1, 8): 14.0, (1, 4): 10.0}
    assert runner.passes[:6] == [1, 8, 4, 1, 8, 4]
    assert not runner.pool.used


def test_two_passes_are_timed_however_slow(monkeypatch: pytest.MonkeyPatch):
    runner = TimedRunner(monkeypatch, lambda number: 1.0)
    assert runner.times(1.0) == {(1, 1): 7.0, (1, 8): 14.0}
    assert runner.passes == [1, 8]
