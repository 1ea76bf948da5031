"""`outrider bench`: which command is meant, a run on a tiny model, its table, its file, and what it refuses."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from outrider.bench.prompts import SUITES
from outrider.cli.bench_offline import OfflineOptions, _prompts
from outrider.testing.synthetic import synthetic_pair


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    return str(synthetic_pair("tiny", seed=3).save(tmp_path_factory.mktemp("pair"))[0])


def words(target: str, *more: str) -> list[str]:
    asked = ["bench", target, "--suites", "chat,code", "--limit", "1", "--max-tokens", "10", "--repeats", "2"]
    return [*asked, "--device", "cpu", "--threads", "1", "--drafter", "suffix", *more]


def test_a_table_with_each_speed_beside_its_check(cli, target):
    done = cli(*words(target))
    assert done.code == 0, done.err
    head, *rows = done.out.splitlines()
    assert head.split() == ["prompts", "row", "tok/s", "speed-up", "identical", "limit", "acc.", "length", "α"]
    assert [row.split()[:2] for row in rows] == [[c, r] for c in ("chat", "code", "all") for r in ("plain", "suffix")]
    for row in rows:
        assert re.search(r"\d of \d +(\d\.\d\d|not told)", row), row
    assert "2 prompts, 2 times by each of plain, suffix: takes about " in done.err
    assert "--suites all" not in done.err, "of the demo alone"
    assert "speeds are medians of 2 repetitions; a text has at most 10 tokens" in done.err
    assert "next: --out FILE" in done.err


def test_json_says_what_was_measured_and_where(cli, target, tmp_path):
    out = tmp_path / "run.jsonl"
    asked = words(target, "--temperatures", "0,1", "--batches", "1,2", "--json", "--lengths", "2,3", "--out", str(out))
    told = json.loads(cli(*asked).out)
    assert told["settings"]["drafters"] == ["suffix:k=2", "suffix:k=3"]
    assert told["settings"]["controlled"] == []
    assert told["machine"]["cores"] >= 1
    assert told["versions"]["torch"]
    assert told["energy"]
    cells = {(row["cell"]["temperature"], row["cell"]["batch"], row["row"]) for row in told["rows"]}
    assert cells == {(t, b, r) for t in (0.0, 1.0) for b in (1, 2) for r in ("plain", "suffix:k=2", "suffix:k=3")}
    assert all(row["identical"] == row["texts"] for row in told["rows"])
    before = out.read_text()
    again = cli(*asked)
    assert "continuing" in again.err
    assert json.loads(again.out)["rows"] == told["rows"]
    assert out.read_text() == before


def test_ctrl_c_reports_what_was_measured(cli, target, tmp_path, monkeypatch):
    from outrider.bench import offline

    measure, calls = offline.OfflineBench._measure, []

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(*given)

    monkeypatch.setattr(offline.OfflineBench, "_measure", interrupted)
    out = tmp_path / "run.jsonl"
    done = cli(*words(target, "--out", str(out)))
    assert done.code == 130
    assert "interrupted" in done.err
    assert "chat" in done.out
    assert "code" not in done.out
    assert len(out.read_text().splitlines()) == 1 + 1 + 3  # what it is, the texts to compare with, three measurements
    calls[:] = [1, 1, 1]
    assert cli(*words(target)).code == 130  # nothing measured: as an interrupt anywhere


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--suites", "chats"], "no suite called 'chats'"),
        (["--batches", "0"], "--batches takes numbers from 1 to 1024"),
        (["--temperatures", "warm"], "--temperatures takes numbers with commas"),
        (["--thinking", "on"], "has no enable_thinking"),
        (["--thinking", "maybe"], "--thinking takes on, off"),
        (["--repeats", "0"], "--repeats must be 1 to 1000"),
        (["--prompts", "/no/such.jsonl"], "No such file"),
        (["--drafter", "suffiks"], "suffix"),
        (["--contexts", "5000"], "the prompt has"),
    ],
)
def test_what_cannot_be_is_said(cli, target, more, said):
    done = cli(*words(target, *more))
    assert done.code == 2
    assert said in done.err


def test_the_demo_answers_fewer_prompts_unless_options_say_more(tmp_path):
    (tmp_path / "own.txt").write_text("one\ntwo\nthree\nfour\n")

    def counts(**options) -> Counter[str]:
        return Counter(prompt.category for prompt in _prompts(OfflineOptions(**options)))

    assert counts() == counts(suites="chat,code,edit", limit=2) == Counter(chat=2, code=2, edit=2)
    assert counts(name="model") == counts(suites="all", limit=3)
    assert len(counts(name="model")) == len(SUITES)
    assert counts(limit=0) == counts(name="model", suites="chat,code,edit", limit=0)
    assert counts(prompts=[tmp_path / "own.txt"]) == Counter(own=2)
    assert counts(name="model", prompts=[tmp_path / "own.txt"]) == Counter(own=3)


def test_a_server_that_is_not_there(cli):
    done = cli("bench", "serve", "http://127.0.0.1:9/v1")
    assert done.code == 2, "as `prove --url` and `advise --url`"
    assert not done.out
    assert "/v1/models does not answer (Connection refused)" in done.err
    assert "`outrider serve MODEL` starts one at http://127.0.0.1:8000/v1" in done.err


def test_commands_of_the_group(cli):
    shown = cli("bench", "--help").out
    for name in ("offline", "rounds", "serve", "peers", "report"):
        assert re.search(rf"^│ {name} ", shown, re.MULTILINE), name
        assert cli("bench", name, "--help").code == 0
    assert "--temperatures" in cli("bench", "offline", "--help").out
    assert cli("bench", "--suites", "none").err == cli("bench", "offline", "--suites", "none").err
