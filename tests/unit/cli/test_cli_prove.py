"""`outrider prove`: its options, its report, its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reciting import Ran, Stage

from outrider.prove import local


@pytest.fixture
def few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the parts of a proof that take no time."""
    tasks = local.LocalProof.tasks
    wanted = ("rounding", "rules", "texts, seeded, 1", "drafts, seeded")
    monkeypatch.setattr(local.LocalProof, "tasks", lambda self: (t for t in tasks(self) if t.key.startswith(wanted)))


def test_a_model_is_proved(cli: Callable[..., Ran], stage: Stage, few_tasks: None, tmp_path: Path):
    ran = cli("prove", "demo", "--drafter", "prompt-lookup:min_prob=0", "--out", str(tmp_path), "--max-tokens", "12")
    assert (ran.code, ran.out.count("fails")) == (0, 0), ran.out + ran.err
    assert "holds: all" in ran.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["verdict"] == "holds"
    assert report["subject"]["drafter"] == "prompt-lookup:min_prob=0"
    page = (tmp_path / "report.html").read_text()
    assert "No change by speculation was found</b>: holds: all" in page
    assert "tokens are the same, token by token. No sampled texts were compared" in ran.out
    assert report["shown"] == [each for each in report["shown"] if each in ran.out]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json"]


def test_json_is_one_object_on_stdout(cli: Callable[..., Ran], stage: Stage, few_tasks: None, tmp_path: Path):
    ran = cli("prove", "demo", "--drafter", "suffix", "--mode", "seeded", "--json", "--out", str(tmp_path))
    assert {check["group"] for check in json.loads(ran.out)["checks"]} == {"rounding", "rules", "texts"}


def test_what_fails_is_told_and_exits_1(
    cli: Callable[..., Ran], stage: Stage, few_tasks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(local, "measure_rounding", lambda target, prompts: 9.0)
    ran = cli("prove", "demo", "--drafter", "suffix", "--mode", "seeded", "--out", str(tmp_path))
    assert ran.code == 1
    assert "does not hold" in ran.out
    assert "would be no rounding" in ran.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "takes a MODEL"),
        (("demo", "--url", "http://x"), "one of them"),
        (("demo", "--plain-url", "http://x"), "belong to --url"),
        (("--url", "http://127.0.0.1:9", "--drafter", "suffix"), "has its own"),
        (("demo", "--draws", "3"), "--draws must be 64"),
        (("demo", "--mode", "other"), "--mode has no 'other'"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(cli: Callable[..., Ran], stage: Stage, words: tuple[str, ...], said: str):
    ran = cli("prove", *words)
    assert ran.code == 2
    assert said in ran.err


def test_a_server_that_is_not_there(cli: Callable[..., Ran], tmp_path: Path):
    ran = cli("prove", "--url", "http://127.0.0.1:9", "--out", str(tmp_path))
    assert ran.code == 2  # 1 would be a check that failed
    assert "is the server running there" in ran.err
