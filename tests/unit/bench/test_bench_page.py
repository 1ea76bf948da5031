"""Pages and tables of runs, and the command that makes them."""

from __future__ import annotations

import json
import re

import pytest
from bench_world import FACTS

from outrider.bench.machine import arm_name
from outrider.bench.page import report_markdown, report_page
from outrider.bench.record import RunFile, make_header, open_run
from outrider.bench.summary import summarize
from outrider.bench.tables import COLUMNS, fastest, markdown
from outrider.cli.main import main


def cell(category: str = "chat", **more) -> dict:
    return {"category": category, "temperature": 0.0, "batch": 1, "context": 0, "thinking": ""} | more


def line(row: str, repetition: int, seconds: float, where: dict, identical: int = 2) -> dict:
    """Two texts of 10 tokens; but in the row plain, three drafts of 2 tokens accept 0, 1 and 2."""
    drafts = row != "plain"
    return {
        "part": "measure",
        "cell": where,
        "row": row,
        "repetition": repetition,
        "tokens": 20,
        "seconds": seconds,
        "passes": 10,
        "prompt_tokens": 8,
        "decode_tokens": 18,
        "decode_seconds": seconds * 0.9,
        "first_token_seconds": [0.01, 0.03],
        "rounds": [10, 10],
        "drafts": [3, 0] if drafts else [0, 0],
        "drafted": 6 * drafts,
        "accepted": [3, 0] if drafts else [0, 0],
        "accepted_at": [2, 1] if drafts else [],
        "rejected_at": [1, 1] if drafts else [],
        "lengths": [10, 10],
        "distinct_bigrams": 9,
        "bigrams": 18,
        "texts": ["a", "b"],
        "joules": None,
        "read_seconds": seconds / 4,
        "identical": identical,
    }


def offline(name: str = "demo", identical: int = 2, path=None, slower: float = 1.0) -> RunFile:
    run = open_run(make_header("offline", {"model": name}, FACTS | {"command": "outrider bench <x>"}), path)
    for batch in (1, 4):
        for category in ("chat", "code"):
            for repetition in range(2):
                where = cell(category, batch=batch)
                run.add(line("plain", repetition, slower * (2.0 + repetition), where))
                run.add(line("suffix", repetition, slower * (1.0 + repetition), where, identical))
    return run


def test_the_figures_by_hand():
    row = next(row for row in summarize(offline()) if row.row == "suffix")
    assert (row.speedup.low, row.speedup.high) == (1.5, 2.0)  # 3 s over 2 s, 2 s over 1 s
    assert row.speedup.value == 1.75
    assert row.tokens_per_second.value == (20 / 1 + 20 / 2) / 2
    assert row.acceptance_length.value == pytest.approx(1 + 6 / 6)
    assert row.per_position_acceptance_rates == [2 / 3, 1 / 3]
    assert row.per_position_conditional_rates == [2 / 3, 1 / 2]
    assert (row.alpha, row.acceptance_rate) == (6 / 10, 6 / 12)
    assert (row.draft_length, row.limit_share, row.distinct_bigram_share) == (2, 0.25, 0.5)
    assert row.time_to_first_token == 0.02
    whole = [row for row in summarize(offline()) if row.cell["category"] == "all" and row.row == "plain"]
    assert [row.cell["batch"] for row in whole] == [1, 4]
    assert whole[0].tokens_per_second.value == (40 / 4 + 40 / 6) / 2


def test_a_page_of_two_runs_compares_them_and_escapes_what_they_hold():
    found = report_page({"one": offline("<b>"), "two": offline(slower=2.0)})
    assert "The runs compared" in found
    assert "Every text that was compared is the one of plain decoding" in found
    assert "<b>" not in found.replace("<body>", "").replace("<b>plain", "")
    assert "outrider bench &lt;x&gt;" in found
    for heading in COLUMNS:
        assert f"<th>{heading}</th>" in found
    for plot in ("Speed-up over plain decoding", "Speed-up by batch", "position, conditional"):
        assert plot in found
    assert "a processor" in found
    assert not re.search(r"https?://(?!www\.w3\.org)", found)
    assert "hold with a chance of 50.0 %, from 2 repetitions" in found


def test_the_fastest_is_named_and_clear_only_with_enough_repetitions():
    told = [text for text, _ in fastest(summarize(offline()))]
    assert told == [
        "all: suffix is the fastest drafter, 1.75 [1.50, 2.00] x plain decoding, no certain gain",
        "all, batch 4: suffix is the fastest drafter, 1.75 [1.50, 2.00] x plain decoding, no certain gain",
    ]
    many = open_run(make_header("offline", {"model": "m"}, FACTS | {"command": ""}), None)
    for repetition in range(5):
        many.add(line("plain", repetition, 2.0, cell("chat")))
        many.add(line("suffix", repetition, 1.0, cell("chat")))
        many.add(line("slow", repetition, 4.0, cell("chat")))
    assert [clear for _, clear in fastest(summarize(many))] == [True]
    assert "suffix is the fastest drafter, 2.00 [2.00, 2.00] x plain decoding, a clear gain." in report_page(
        {"m": many}
    )
    slow = [row for row in summarize(many) if row.row != "suffix"]
    assert fastest(slow)[0][0].endswith("no gain")
    assert fastest(summarize(offline(identical=1))) == [], "a speed whose text differs is none"


def test_the_name_of_an_arm_core():
    assert arm_name({"CPU implementer": "0x41", "CPU part": "0xd0c"}) == "Neoverse-N1"
    assert arm_name({"CPU implementer": "0x41", "CPU part": "0xfff"}) == "ARM core 0xfff of 0x41"
    assert arm_name({"model name": "x"}) == ""


def test_texts_that_differ_are_said_first():
    found = report_page({"one": offline(identical=1)})
    assert found.index("Not all texts are equal") < found.index("<table")
    assert "1 of 2" in report_markdown({"one": offline(identical=1)})


def test_markdown_escapes_what_would_end_a_cell():
    assert markdown(["a", "b"], [["x|y", "1\n2"]]) == "| a | b |\n| --- | --- |\n| x\\|y | 1 2 |\n"


def serve_run() -> RunFile:
    run = RunFile(make_header("serve", {"url": "http://x/v1"}, FACTS | {"served_model": "m", "server": "outrider"}))
    for repetition in range(2):
        for concurrency in (1, 4):
            for condition, rate in (("on", 30.0), ("off", 20.0)):
                figures = {"output_throughput": rate * concurrency, "request_throughput": 1.0, "failed": 0}
                figures |= {f"{kind}_ms": 12.0 for kind in ("median_ttft", "p99_ttft", "median_tpot", "p99_e2el")}
                place = {"load": {"concurrency": concurrency, "rate": None}, "speculation": condition}
                more = {"prefix_hit_rate": 0.25, "texts": {"a 0": "x"}, "repetition": repetition}
                run.add({"part": "measure", **place, **figures, **more})
    return run


def test_a_page_of_a_server_and_of_peers():
    peers = RunFile(make_header("peers", {"model": "demo"}, FACTS))
    peers.add({"part": "system", "kind": "transformers", "version": "5", "format": "float32"})
    for system, rate in (("outrider plain", 10), ("transformers generate", 5)):
        for repetition in range(5):
            place = {"part": "measure", "category": "chat", "system": system, "repetition": repetition}
            same = int(system.startswith("outrider"))
            figures = {"tokens": rate, "seconds": 1.0, "first_token_seconds": [0.1], "texts": ["t"], "identical": same}
            peers.add(place | figures)
    found = report_page({"s": serve_run(), "p": peers})
    assert "tok/s by conversations at once" in found
    assert "1.50 [1.50, 1.50]" in found
    assert "25.0 %" in found
    assert "5, float32" in found
    assert "Every text that was compared" in found  # another engine's text is not ours to keep
    assert "| chat | outrider plain | 10.0 | 2.00 [2.00, 2.00] | 1 of 1 | 100 ms | wins |" in report_markdown(
        {"p": peers}
    )


def test_the_command(tmp_path, capsys):
    offline(path=tmp_path / "run.jsonl")
    with pytest.raises(SystemExit) as left:
        main(["bench", "report", str(tmp_path / "run.jsonl")])
    assert left.value.code == 0
    assert "| chat | suffix |" in capsys.readouterr().out
    assert (tmp_path / "run.html").read_text().startswith("<!doctype html>")
    open_run(make_header("offline", {}, FACTS), tmp_path / "empty.jsonl")
    (tmp_path / "no.jsonl").write_text(json.dumps({}))
    for words, said in (
        ([], "name at least one"),
        (["empty.jsonl"], "nothing is measured yet"),
        (["no.jsonl"], "no file of `outrider bench --out`"),
    ):
        with pytest.raises(SystemExit) as left:
            main(["bench", "report", *(str(tmp_path / word) for word in words)])
        assert left.value.code == 2
        assert said in capsys.readouterr().err
