"""Other engines beside this one: Transformers on a tiny model, one that fails, and who wins."""

from __future__ import annotations

import json
import sys

import pytest
from bench_world import FACTS, PROMPTS, pair_folders, quiet  # noqa: F401 - a fixture

from outrider.bench.engines import Engines, load_target
from outrider.bench.peers import PeerError, PeerPlan, PeersBench, installed, started, summarize_peers
from outrider.bench.record import RunFile, make_header, open_run, read_run
from outrider.cli.bench_peers import remarks


@pytest.fixture(scope="module")
def finished(pair_folders, tmp_path_factory):  # noqa: F811 - the fixture
    folder = tmp_path_factory.mktemp("peers")
    target, draft = map(str, pair_folders)
    engines = Engines(
        lambda: load_target(target, ["suffix"], max_batch=1, device="cpu", threads=1),
        ["suffix"],
        max_batch=1,
    )
    run = open_run(make_header("peers", {}, FACTS), folder / "run.jsonl")
    bench = PeersBench(engines, PROMPTS, run, max_tokens=12, repeats=2)
    options = {"folder": target, "dtype": "float32", "device": "cpu", "threads": 1, "draft": draft}
    plans = [
        PeerPlan("transformers", sys.executable, options, ("generate", "prompt lookup", "assisted")),
        PeerPlan(
            "vllm", sys.executable, {"folder": "x", "dtype": "float32", "context": 8, "lookup": False}, ("generate",)
        ),
    ]
    bench.measure_all(plans, folder / "log.txt", quiet)
    engines.close()
    return bench


def test_transformers_writes_the_same_texts(finished):
    found = {(row.category, row.system): row for row in summarize_peers(read_run(finished.run.path))}
    names = (
        "outrider plain",
        "outrider suffix",
        *(f"transformers {r}" for r in ("generate", "prompt lookup", "assisted")),
    )
    assert found.keys() == {(category, name) for category in ("one", "two") for name in names}
    for row in found.values():
        assert (row.identical, row.repetitions) == (row.texts, 2)
        assert row.time_to_first_token > 0
    (system,) = finished.run.of("system")
    assert system["kind"] == "transformers"
    assert {line["tokens"] for line in finished.run.of("measure") if line["category"] == "one"} == {24}


def test_an_engine_that_is_not_here_is_left_out_and_named(finished):
    (why,) = finished.left_out
    assert why.startswith("vllm: ModuleNotFoundError")


def test_a_worker_that_dies_says_so(tmp_path):
    with (
        pytest.raises(PeerError, match=r"llama\.cpp: ModuleNotFoundError"),
        started(PeerPlan("llama.cpp", sys.executable, {"gguf": "x", "context": 8, "threads": 1}, ()), tmp_path / "log"),
    ):
        pass
    with (
        pytest.raises(PeerError, match="cannot be run"),
        started(PeerPlan("vllm", "/no/python", {}, ()), tmp_path / "log"),
    ):
        pass
    assert installed("/no/python") == {}
    assert installed(sys.executable)["transformers"]


def measured(rates: dict[str, list[float]]) -> RunFile:
    run = RunFile(make_header("peers", {}, FACTS))
    for system, values in rates.items():
        for repetition, rate in enumerate(values):
            place = {"part": "measure", "category": "c", "system": system, "repetition": repetition}
            run.add(
                place | {"tokens": rate, "seconds": 1.0, "first_token_seconds": [None], "texts": ["x"], "identical": 1}
            )
    return run


A = [10, 11, 12, 10, 11]


def test_who_wins_is_said_only_where_it_is_clear():
    steady = {
        row.system: row for row in summarize_peers(measured({"a": A, "b": [9, 10, 11, 9, 10], "c": [1, 2, 3, 2, 1]}))
    }
    assert (steady["a"].wins, steady["b"].wins, steady["c"].wins) == ("wins", "", "")
    assert steady["a"].ratio.value == pytest.approx(11 / 10)
    assert steady["b"].ratio.value == pytest.approx(10 / 11)
    assert steady["a"].time_to_first_token is None
    mixed = {row.system: row.wins for row in summarize_peers(measured({"a": A, "b": [9, 12, 9, 9, 9]}))}
    assert mixed == {"a": "first, not clearly", "b": ""}
    few = {row.system: row.wins for row in summarize_peers(measured({"a": A[:4], "b": [1, 1, 1, 1]}))}
    assert few == {"a": "first, not clearly", "b": ""}  # four repetitions say it with a chance of 87.5 %
    json.dumps([row.as_dict() for row in summarize_peers(measured({"a": [1.0]}))], allow_nan=False)


def test_engines_that_were_not_tried_and_other_formats_are_told():
    assert remarks({"transformers", "vllm", "llama.cpp"}, {"outrider": "float32", "vllm": "float32"}) == []
    missing, formats = remarks({"transformers"}, {"outrider": "int4", "transformers": "float32"})
    assert missing.startswith("not compared: vllm, llama.cpp;")
    assert formats.endswith("outrider int4, transformers float32")
