"""The number of CPU threads: chosen by measurement, on a simulated machine, and without effect on packed weights."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.openmp import SPIN_COUNT, bound_spinning
from outrider.core.sequence import Span
from outrider.llm import LLM
from outrider.loading import load as loading
from outrider.loading.load import LoadOptions, load
from outrider.runners.native import NativeRunner
from outrider.runners.threads import (
    MAX_INTERVAL,
    MAX_LOSS,
    MAX_ROWS,
    TRIAL_PASSES,
    ThreadChooser,
    choose_threads,
    thread_counts,
    threads_of,
    use_threads,
)
from outrider.testing.synthetic import SHAPES, save_decoder, synthetic_pair


@pytest.fixture(autouse=True)
def own_threads() -> Iterator[None]:
    """Every test begins with three threads, a number that no chooser here has."""
    with use_threads(3):
        yield
        assert torch.get_num_threads() == 3


class Machine:
    """Time passes only in passes: `speed` gives the seconds of one by its threads. Notes the threads of each."""

    def __init__(self, speed: dict[int, float]) -> None:
        self.now, self.speed, self.seen = 0.0, speed, list[int]()

    def clock(self) -> float:
        return self.now

    def work(self) -> None:
        self.seen.append(torch.get_num_threads())
        self.now += self.speed[self.seen[-1]]

    def run(self, chooser: ThreadChooser, passes: int, rows: int = 1) -> list[int]:
        """The threads of so many passes."""
        first = len(self.seen)
        for _ in range(passes):
            with chooser.run_pass(rows):
                self.work()
        return self.seen[first:]


QUIET = {1: 0.020, 2: 0.012}
BUSY = {1: 0.022, 2: 0.030}


def test_counts_are_halves():
    assert thread_counts(1) == (1,)
    assert thread_counts(2) == (2, 1)
    assert thread_counts(12) == (12, 6, 3, 1)


def test_a_count_holds_within_and_not_after():
    machine = Machine({})  # that fails
    with pytest.raises(KeyError), use_threads(2):
        machine.work()
    assert machine.seen == [2]
    assert torch.get_num_threads() == 3
    with use_threads(None):
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("counts", "expected"), [((), 3), ((5,), 5)])
def test_without_a_choice_every_pass_has_the_same_count(counts: tuple[int, ...], expected: int):
    machine = Machine({3: 0.1, 5: 0.1})
    assert set(machine.run(ThreadChooser(counts, clock=machine.clock), 100)) == {expected}


@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("speed", [QUIET, BUSY])
def test_the_faster_count_is_found_and_trials_cost_little(speed: dict[int, float], first: int):
    machine = Machine(speed)
    chooser = ThreadChooser((2, 1), first, clock=machine.clock)
    machine.run(chooser, 100)
    best = min(speed, key=speed.__getitem__)
    assert chooser.count == best
    seen = machine.run(chooser, 2000)
    assert set(seen) == {1, 2}, "it keeps trying"
    assert sum(speed[count] for count in seen) <= speed[best] * len(seen) * (1 + MAX_LOSS)


def test_it_follows_a_machine_that_gets_busy_and_quiet():
    machine = Machine(QUIET)
    chooser = ThreadChooser((2, 1), clock=machine.clock)
    machine.run(chooser, 1000)
    while machine.run(chooser, 1) != [1]:
        pass
    assert set(machine.run(chooser, 150)[TRIAL_PASSES:]) == {2}, "no trial is due for long"
    machine.speed = BUSY
    machine.run(chooser, 12)
    assert chooser.count == 1, "a slow pass is noticed at once"
    machine.run(chooser, 1000)
    machine.speed = QUIET  # which one thread does not notice
    machine.run(chooser, round(2 * MAX_INTERVAL / QUIET[1]))
    assert chooser.count == 2


def test_of_many_counts_the_best_is_reached_step_by_step():
    machine = Machine({16: 0.03, 8: 0.015, 4: 0.010, 2: 0.013, 1: 0.025})
    chooser = ThreadChooser(thread_counts(16), clock=machine.clock)
    machine.run(chooser, 300)
    assert chooser.count == 4
    machine.speed = {16: 0.005, 8: 0.008, 4: 0.014, 2: 0.025, 1: 0.05}
    machine.run(chooser, 1000)
    assert chooser.count == 16


def test_a_move_is_not_taken_for_a_change_of_the_machine():
    machine = Machine({2: 0.03, 1: 0.01})
    chooser = ThreadChooser((2, 1), clock=machine.clock)
    while chooser.count != 1:
        machine.run(chooser, 1)
    assert set(machine.run(chooser, 20)) == {1}, "a faster pass would have called for a trial"


def test_a_hopeless_trial_is_a_single_pass():
    machine = Machine({2: 0.01, 1: 0.5})
    chooser = ThreadChooser((2, 1), clock=machine.clock)
    seen = machine.run(chooser, 1000)
    assert "11" not in "".join(map(str, seen))
    assert 1 <= seen.count(1) <= 2, "what it lost is made up for first"


def test_only_passes_that_can_be_compared_are_tried():
    machine = Machine(QUIET)
    chooser = ThreadChooser((2, 1), clock=machine.clock)
    machine.run(chooser, 3)
    seen = [machine.run(chooser, 1, rows)[0] for rows in range(2, MAX_ROWS)]
    assert set(seen) == {2}, "each of these has a number of rows not seen before"
    assert set(machine.run(chooser, 500, MAX_ROWS + 1)) == {2}
    assert machine.run(chooser, 2, 1)[-1] == 1


def test_what_was_known_before_a_change_is_no_measure():
    machine = Machine(QUIET)
    chooser = ThreadChooser((2, 1), clock=machine.clock)
    machine.run(chooser, 3, rows=5)
    machine.run(chooser, 3)
    machine.speed = BUSY
    assert set(machine.run(chooser, 7)) == {2}, "until the usual time has followed"
    assert machine.run(chooser, 1, rows=5) == [2], "its usual time is that of a quiet machine"
    assert machine.run(chooser, 1) == [1]


def test_a_pass_that_raises_is_not_counted():
    machine = Machine(QUIET)
    chooser = ThreadChooser((2, 1), clock=machine.clock)
    machine.run(chooser, 3)
    machine.speed = {}
    for _ in range(100):
        machine.now += 10
        with pytest.raises(KeyError):
            machine.run(chooser, 1)
    machine.speed = QUIET
    assert machine.run(chooser, 2) == [2, 1], "the first is followed by a trial, which has long been due"


def test_the_first_count_is_measured():
    machine = Machine({8: 0.01, 4: 0.004, 2: 0.005, 1: 0.009})
    chooser = choose_threads(8, machine.work, clock=machine.clock)
    assert chooser.count == 4
    assert chooser.told == "4 of 8 (measured: 1 thread 111, 2 threads 200, 4 threads 250, 8 threads 100 passes/s)"
    assert machine.now < 0.6
    assert machine.seen.count(8) == 2, "one that is far behind is tried once, after a run that is not measured"


def test_a_large_model_is_measured_no_longer_than_it_must_be():
    machine = Machine({2: 3.0, 1: 5.0})
    chooser = choose_threads(2, machine.work, clock=machine.clock)
    assert (chooser.count, chooser.counts, machine.seen) == (2, (2, 1), [2, 2])
    falling = Machine({8: 0.01, 4: 0.021, 2: 0.04, 1: 9.0})
    assert choose_threads(8, falling.work, clock=falling.clock).count == 8
    assert 1 not in falling.seen, "fewer threads than a count that is far behind"


def test_nothing_is_measured_where_nothing_can_be_chosen():
    def fail() -> None:
        raise AssertionError("ran")

    assert choose_threads(1, fail).counts == (1,)
    assert threads_of(torch.device("cpu"), 7, fail).counts == (7,)
    assert threads_of(torch.device("meta"), None, fail).counts == ()
    assert threads_of(torch.device("meta"), 7, fail).counts == ()


# A model's threads


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model on disk."""
    path = tmp_path_factory.mktemp("tiny")
    save_decoder(synthetic_pair("tiny", dtype=torch.float32).draft, SHAPES["tiny"] | {"num_hidden_layers": 2}, path)
    return str(path)


def logits(folder: str, quantize: str, threads: int) -> torch.Tensor:
    """Of a prompt of 300 tokens in chunks, and of drafts of several lengths behind it."""
    target = load(folder, device="cpu", quantize=quantize, cache_tokens=1024, context=512, threads=threads).target
    assert isinstance(target, NativeRunner)
    tokens = [i * 7 % 100 for i in range(300)]
    target.pool.open(0, tokens)
    target.pool.reserve(0, 400)
    parts = [target.score([Span(0, 0, tuple(tokens[:200]))]), target.score([Span(0, 200, tuple(tokens[200:]))])]
    drafts = [Draft(tuple(tokens[:length])) for length in (0, 1, 4, 15, 63)]
    parts += [target.score([Span(0, 300, (5,), draft)]) for draft in drafts]
    return torch.cat([part.logits for part in parts])


@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_packed_weights_have_the_same_bits_with_any_number_of_threads(folder: str, quantize: str):
    expected = logits(folder, quantize, 1)
    for threads in (2, 3, 4):
        assert torch.equal(logits(folder, quantize, threads), expected), threads


def test_given_threads_are_those_of_loading_and_of_every_pass(folder: str, monkeypatch: pytest.MonkeyPatch):
    models: list[list[int]] = []
    load_decoder = loading.load_decoder

    def noting(*args: Any, **options: Any) -> Any:
        decoder = load_decoder(*args, **options)
        seen, forward = [torch.get_num_threads()], decoder.forward
        models.append(seen)

        def noted(*args: Any) -> Any:
            seen.append(torch.get_num_threads())
            return forward(*args)

        monkeypatch.setattr(decoder, "forward", noted)
        return decoder

    monkeypatch.setattr(loading, "load_decoder", noting)
    llm = LLM(folder, drafter=f"draft-model:model={folder},k=2", device="cpu", threads=2, cache_tokens=256)
    llm.generate([1, 2, 3], max_tokens=8)
    assert len(models) == 2, "the target and its draft model"
    for seen in models:
        assert len(seen) >= 3
        assert set(seen) == {2}
    assert llm.loaded.threads == "2"


def test_by_default_they_are_measured(folder: str):
    loaded = load(folder, device="cpu", cache_tokens=256)
    assert isinstance(loaded.target, NativeRunner)
    assert loaded.target.model.threads.counts == (3, 1)
    assert loaded.target.model.threads.told == loaded.threads
    assert " of 3 (measured: 1 thread " in loaded.threads


@pytest.mark.parametrize("threads", [0, -1, 4097, 1.5, "2", True])
def test_threads_are_a_number_within_bounds(threads: Any):
    with pytest.raises(ConfigError, match="threads"):
        LoadOptions(threads=threads)


# Spinning


@pytest.mark.parametrize(
    ("environ", "modules", "expected"),
    [
        ({}, {"os"}, SPIN_COUNT),
        ({}, {"torch"}, None),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"os"}, None),
        ({"GOMP_SPINCOUNT": "7"}, {"os"}, "7"),
    ],
)
def test_spinning_is_bounded_unless_the_environment_says_otherwise(
    environ: dict[str, str], modules: set[str], expected: str | None
):
    bound_spinning(environ, modules)
    assert environ.get("GOMP_SPINCOUNT") == expected


def test_importing_the_package_bounds_it():
    environ = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    code = "import outrider, os; print(os.environ['GOMP_SPINCOUNT'])"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == SPIN_COUNT
