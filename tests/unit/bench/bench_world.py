"""A tiny pair of models on disk, whose draft model always agrees with its target."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.energy import EnergyMeter
from outrider.bench.engines import Engines, load_target
from outrider.bench.offline import Axes, OfflineBench
from outrider.bench.prompts import BenchPrompt
from outrider.bench.record import RunFile, make_header, open_run
from outrider.testing.synthetic import synthetic_pair

PROMPTS = [
    BenchPrompt("a", "one", ("first words here",)),
    BenchPrompt("b", "one", ("other words, and more",)),
    BenchPrompt("c", "two", ("a question", "and another", "a third")),
]


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return synthetic_pair("tiny", seed=3).save(tmp_path_factory.mktemp("pair"))


def offline_bench(folders: tuple[Path, Path], axes: Axes, out: Path | None = None, k: int = 4) -> OfflineBench:
    """Plain decoding, the draft model and a lookup, over the tiny target."""
    drafters = [f"draft-model:model={folders[1]},k={k}", "suffix"]
    batch = max(axes.batches)
    engines = Engines(
        lambda: load_target(str(folders[0]), drafters, max_batch=batch, device="cpu", threads=1),
        drafters,
        max_batch=batch,
    )
    run = open_run(make_header("offline", {"axes": axes.repeats}, FACTS), out)
    return OfflineBench(engines, PROMPTS, axes, run, METER)


FACTS = {"machine": {"cpu": "a processor", "cores": 2, "system": "Linux"}, "versions": {}, "commit": "", "command": ""}
JOULES = iter(range(1 << 30))
METER = EnergyMeter("a counter", lambda: 5.0 * next(JOULES))
"""Every reading is 5 joules above the one before."""


def quiet(what: str, done: int, total: int) -> None:
    pass


def lines_of(run: RunFile, row: str, category: str) -> list[dict]:
    return [line for line in run.of("measure") if line["row"] == row and line["cell"]["category"] == category]
