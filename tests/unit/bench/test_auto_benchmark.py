"""benchmarks/auto.py on a tiny model: every cell has a second plain engine, that says how far noise goes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.testing.synthetic import synthetic_pair

ROOT = Path(__file__).parents[3]
OPTIONS = ["--kinds", "random", "--batches", "2", "--temperatures", "0", "--tokens", "8", "--texts", "4"]
ROW = re.compile(
    r"^ *random +0 +2 +\d+ +(?P<suffix>[\d.]+) +(?P<auto>[\d.]+) +(?P<control>[\d.]+) +(?P<best>[\d.]+) "
    r".*  (?P<taus>[\d.]+ [\d.]+ [\d.]+ [\d.]+); ",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("auto")
    target, _ = synthetic_pair("tiny", seed=3).save(folder)
    command = [sys.executable, str(ROOT / "benchmarks" / "auto.py"), str(target), *OPTIONS]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OUTRIDER_HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_cell_has_a_control(printed):
    head = re.split(r" {2,}", printed.splitlines()[0].strip())
    assert head[2:6] == ["plain", "0:suffix", "auto", "plain again"]
    rows = [match.groupdict() for match in ROW.finditer(printed)]
    assert len(rows) == 2  # random, and all kinds together, which are the same here
    for row in rows:
        assert float(row["control"]) > 0
        taus = row["taus"].split()
        assert (taus[0], taus[3]) == ("1.00", "1.00"), "neither drafts"
        fastest = max(1.0, float(row["suffix"]))  # of the others, without the control
        assert float(row["auto"]) / fastest == pytest.approx(float(row["best"]), abs=0.02)


def test_the_last_lines_tell_how_far_noise_goes(printed):
    controls = [float(match["control"]) for match in ROW.finditer(printed)]
    told = re.findall(
        r"^(.+) over plain by (.+): lowest ([\d.]+), median [\d.]+, highest ([\d.]+)$", printed, re.MULTILINE
    )
    assert [each[:2] for each in told] == [
        (name, clock) for clock in ("the clock", "processor time") for name in ("auto", "plain again")
    ]
    low, high = map(float, told[1][2:])
    assert (low, high) == pytest.approx((min(controls), max(controls)), abs=0.006)
