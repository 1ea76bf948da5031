"""benchmarks/gpu.py on a tiny shape on the CPU: every part that needs no GPU has its rows, in a table and in JSON."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PARTS = "plain,spec,widths,waits,graphs,transformers,pinned,small,context,start,drafters"


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--shape", "tiny", "--device", "cpu", *args]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=300)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    folder = tmp_path_factory.mktemp("gpu")
    done = run("--json", str(folder / "out.json"), OUTRIDER_HOME=str(folder))  # no demo model: its shape
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((folder / "out.json").read_text())


def test_every_part_reports_rows(report):
    table, found = report
    assert found["skipped"] == []
    assert {row["section"] for row in found["rows"]} == set(PARTS.split(","))
    for row in found["rows"]:
        assert row["name"] in table
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float))


def test_what_the_rows_say(report):
    rows = {(row["section"], row["name"], row["batch"], row["context"]): row for row in report[1]["rows"]}
    plain, spec = rows["plain", "plain", 4, 24], rows["spec", "draft-model k=5", 4, 24]
    assert (plain["tau"], plain["alpha"]) == (1.0, None)
    assert 5 < spec["tau"] <= 6
    assert spec["alpha"] == 1.0
    for row in (plain, spec):
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * row["tau"] / row["round_ms"] * 1000, rel=1e-6)
        parts = row["draft_ms"] + row["verify_ms"] + row["rest_ms"]
        assert parts == pytest.approx(row["round_ms"])
        assert row["host_share"] == pytest.approx(row["rest_ms"] / parts)
    assert {name for section, name, *_ in rows if section == "drafters"} == {"suffix", "prompt-lookup", "mix"}
    assert {context for section, _, _, context in rows if section == "context"} == {24, 96}
    assert [name for section, name, *_ in rows if section == "widths"] == [f"score, {n} rows" for n in (1, 4, 6)]
    assert next(row["equal"] for row in rows.values() if row["section"] == "pinned") == 1.0
    assert all(row["seconds"] > 0 for row in rows.values() if row["section"] == "start")
    assert "random weights" in rows["small", "small model, plain", 1, 24]["note"]


def test_the_limit_is_what_a_pass_reads_over_the_bandwidth(report):
    found = report[1]
    layer = 128 * 64 + 64 * 64 + 3 * 128 * 64
    assert found["weight_bytes"] == 4 * (4 * layer + 512 * 64)
    assert found["limit_tokens_per_second"] == pytest.approx(found["bandwidth"] / found["weight_bytes"])
    plain = next(row for row in found["rows"] if row["section"] == "plain" and row["batch"] == 1)
    weights_alone = plain["tokens_per_second"] / found["limit_tokens_per_second"]
    assert weights_alone < plain["of_limit"] < 1.2 * weights_alone  # the cache is read too


def test_a_part_alone_and_no_time_at_all(tmp_path):
    done = run("--only", "plain,spec", "--seconds", "0", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["rows"] == []
    assert found["skipped"] == ["plain: out of time", "spec: out of time"]
    wrong = run("--only", "plane")
    assert wrong.returncode == 2
    assert "no part called 'plane'" in wrong.stderr
