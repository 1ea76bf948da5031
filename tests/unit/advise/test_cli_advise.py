"""The whole command on a tiny target with a draft model that agrees with it."""

import json
import re
from dataclasses import replace

import pytest

from outrider.cli.advise import DEMO, USUAL, AdviseOptions
from outrider.cli.main import main
from outrider.testing.synthetic import synthetic_pair


def run(*words):
    with pytest.raises(SystemExit) as end:
        main(["advise", *map(str, words)])
    return end.value.code


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return synthetic_pair("tiny", agreement=0.9, seed=3).save(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("tell me\nask another\nand one more of these\n")
    return file


SMALL = (
    "--limit",
    2,
    "--max-tokens",
    12,
    "--temperatures",
    "0",
    "--batches",
    "1,2",
    "--contexts",
    "",
    "--device",
    "cpu",
)


def test_a_target_and_a_draft(pair, prompts, tmp_path, capsys):
    target, draft = pair
    page, kept = tmp_path / "advice.html", tmp_path / "advice.json"
    words = (target, "--draft", draft, "--prompts", prompts, *SMALL, "--out", kept, "--html", page, "--json")
    assert run(*words) == 0
    told = capsys.readouterr()
    assert re.match(
        r"3 drafters are tried, and the best 2 run beside plain decoding: takes about \d+ (s|min)\n", told.err
    )
    assert "more is measured" not in told.err, "of the demo alone"
    found = json.loads(told.out)
    assert all(3 <= each["repetitions"] <= 8 for each in found["verified"])
    names = [each["drafter"] for each in found["measured"]]
    assert names == ["suffix", "prompt-lookup", f"draft-model:model={draft}"]
    model = found["measured"][2]
    assert model["acceptance"][0]["accepted"][0] > 0.5, "it agrees with the target"
    assert {(each["batch"], each["length"]) for each in model["rounds"]} >= {(1, 0), (2, 0), (1, 1), (2, 1)}
    assert all(each["identical"] for each in found["verified"])
    assert {each["batch"] for each in found["verified"]} == {1, 2}
    assert f"draft-model:model={draft}" in page.read_text()
    stored = json.loads(kept.read_text())
    assert stored["measured"] == found["measured"]


def test_an_interrupted_run_continues(pair, prompts, tmp_path, capsys, monkeypatch):
    target, _ = pair
    kept = tmp_path / "advice.json"
    words = (target, "--prompts", prompts, *SMALL, "--out", kept, "--json")
    from outrider.advise import advice

    original, measured = advice.measure, []

    def counted(llm, candidate, scope, tell):
        measured.append(candidate.drafter)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return original(llm, candidate, scope, tell)

    monkeypatch.setattr(advice, "measure", counted)
    assert run(*words) == 130
    told = " ".join(capsys.readouterr().err.split())
    assert "suffix, loading" in told, "on no terminal, too"
    assert told.endswith("interrupted; the same command continues from here")
    assert [each["drafter"] for each in json.loads(kept.read_text())["measured"]] == ["suffix"]
    assert run(*words) == 0
    assert measured == ["suffix", "prompt-lookup", "prompt-lookup", "layer-skip"], "suffix is not measured again"
    assert "holds suffix" in capsys.readouterr().err
    before = kept.read_text()
    assert run(*words, "--limit", 1) == 2
    assert "name another file" in " ".join(capsys.readouterr().err.split())
    assert kept.read_text() == before, "what took minutes is not written over"
    kept.write_text("half")
    assert run(*words) == 2
    assert "delete it" in capsys.readouterr().err


def test_what_speeds_are_measured_from_is_told(pair, prompts, capsys):
    assert run(pair[0], "--prompts", prompts, *SMALL, "--batches", 1) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(r"Measured: \d( to \d)? runs of all prompts with drafts, and as many without\.", told)
    assert re.search(r"Prompts: 2 of .*; at most 12 tokens a text\.", told)


def test_the_demo_is_measured_on_less_unless_options_say_more():
    assert AdviseOptions(target="somewhere").extent == USUAL
    assert AdviseOptions().extent == DEMO
    assert AdviseOptions(limit=6, temperatures="0,1", batches="1,4", contexts="1024").extent == USUAL
    assert AdviseOptions(batches="8").extent == replace(DEMO, batches="8")
    assert AdviseOptions(target="somewhere", contexts="").extent == replace(USUAL, contexts="")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batches", "0"), "from 1 to 1024"),
        (("--temperatures", "x"), "numbers with commas"),
        (("--limit", 0), "--limit must be 1"),
        (("--prompts", "nowhere.txt"), "no such file"),
        (("--url", "ftp://x"), "--url takes an address"),
    ],
)
def test_bad_input_is_told(pair, words, said, capsys):
    assert run(pair[0], "--device", "cpu", *words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
