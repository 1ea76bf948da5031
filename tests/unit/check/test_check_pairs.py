"""The doctor on pairs that are broken in one way each, and on sound ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from broken_pairs import (
    BROKEN,
    GOOD,
    Bench,
    extra_token,
    other_bos,
    other_eos,
    padded_vocabulary,
    short_context,
    short_vocabulary,
    sound_pair,
    swapped_ids,
)
from typer.testing import CliRunner

from outrider.check.doctor import check_pair
from outrider.check.page import check_page
from outrider.check.smoke import RunOptions
from outrider.cli.main import app
from outrider.core.errors import ConfigError
from outrider.llm import LLM

QUICK = RunOptions(device="cpu", seconds=0.3)
HARMLESS = {"ok", "note"}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return Bench.make(tmp_path_factory.mktemp("pairs"))


@pytest.fixture
def bench(sound, tmp_path):
    return Bench(sound.target, sound.draft, tmp_path)


def names(cases):
    return [f"{case.make.__name__}{'-tried' if case.smoke else ''}" for case in cases]


@pytest.mark.parametrize("case", BROKEN, ids=names(BROKEN))
def test_what_is_broken_is_named(case, bench):
    target, draft = case.make(bench)
    report = check_pair(str(target), str(draft), QUICK, smoke=case.smoke)
    wrong = {finding.code: finding for finding in report.findings if finding.level not in HARMLESS}
    assert report.verdict == case.verdict
    assert case.code in wrong
    found = wrong[case.code]
    assert found.what
    assert found.consequence
    assert found.fix
    assert report.exit_code == case.expected_exit


@pytest.mark.parametrize("case", GOOD, ids=names(GOOD))
def test_what_is_sound_raises_no_alarm(case, bench):
    target, draft = case.make(bench)
    report = check_pair(str(target), str(draft), QUICK, smoke=case.smoke)
    assert [finding for finding in report.findings if finding.level not in HARMLESS] == []
    assert (report.verdict, report.exit_code) == ("use", 0)
    assert report.smoke is None or report.smoke.by_position[0] > 0.9


def test_enough_pairs_are_tried():
    assert len(BROKEN) >= 20
    assert len(GOOD) >= 5
    assert len({case.code for case in BROKEN}) >= 20, "each is broken in its own way"


@pytest.mark.parametrize(
    "make",
    [sound_pair, swapped_ids, short_vocabulary, padded_vocabulary, extra_token, other_bos, other_eos, short_context],
    ids=lambda make: make.__name__,
)
def test_the_engine_agrees(make, bench):
    """As a draft model it starts just where the verdict is to use it, with the options that are named."""
    target, draft = make(bench)
    report = check_pair(str(target), str(draft), QUICK, smoke=False)

    def starts(**options):
        try:
            LLM(str(target), drafter=f"draft-model:model={draft}", device="cpu", threads=1, max_batch=1, **options)
        except ConfigError:
            return False
        return True

    assert starts() == (report.exit_code == 0)
    if report.options:
        assert starts(context=int(report.options[1]))


def test_a_pair_that_needs_cross_vocabulary_drafts_through_it(bench):
    target, draft = swapped_ids(bench)
    report = check_pair(str(target), str(draft), QUICK)
    assert report.drafter.startswith("cross-model:")
    assert report.smoke is not None
    assert report.smoke.by_position[0] > 0.3, "a text with padding in it, as random models write, cannot be mapped"
    assert report.verdict == "needs cross-vocabulary"


def test_the_command_line(bench, tmp_path):
    target, draft = padded_vocabulary(bench)
    page = tmp_path / "check.html"
    words = ["check", str(target), str(draft), "--device", "cpu", "--seconds", "0.2"]
    run = CliRunner().invoke(app, [*words, "--json", "--html", str(page)])
    assert run.exit_code == 0
    said = json.loads(run.stdout)
    assert said["verdict"] == "use with padding"
    assert said["smoke"]["tokens"] > 0
    assert said["command"].endswith(f"--drafter draft-model:model={draft}")
    text = page.read_text()
    assert "use with padding" in text
    assert text.count("<svg") == 1
    shown = CliRunner().invoke(app, ["check", str(target), str(draft), "--no-smoke", "--device", "cpu"])
    assert "verdict: use with padding" in shown.output
    assert "fix:" in shown.output


@pytest.mark.parametrize(("make", "code"), [(other_eos, 1), (short_context, 1)])
def test_exit_codes(make, code, bench):
    target, draft = make(bench)
    run = CliRunner().invoke(app, ["check", str(target), str(draft), "--no-smoke", "--device", "cpu"])
    assert run.exit_code == code


def test_a_target_that_cannot_be_read_is_refused_as_such(bench, tmp_path):
    (tmp_path / "empty").mkdir()
    report = check_pair(str(tmp_path / "empty"), str(bench.draft), QUICK)
    assert report.exit_code == 2
    assert report.findings[0].code == "target-files"
    assert report.command == ""


def test_a_name_that_is_nothing_is_told_apart_from_a_broken_file(bench):
    (found,) = check_pair(str(bench.target), "nosuch", QUICK).findings
    assert "there is no file or folder 'nosuch'" in found.what
    assert "outrider list" in found.fix
    assert "download it again" not in found.what + found.fix


def test_a_draft_that_cannot_save_time_is_told_so(bench):
    run = CliRunner().invoke(app, ["check", str(bench.target), str(bench.target), "--no-smoke", "--device", "cpu"])
    assert run.exit_code == 0
    told = " ".join(run.output.split())
    assert "the draft is the target itself" in told
    assert "nothing can be saved" in told
    assert "outrider advise" in told


def test_text_of_models_is_escaped(bench):
    target, draft = swapped_ids(bench)
    report = check_pair(str(target), str(draft), QUICK, smoke=False)
    assert "<script" not in check_page(report)


def test_a_device_that_is_too_small_is_named_with_what_fits(bench, monkeypatch):
    monkeypatch.setattr("outrider.plan.forecast.available_memory", lambda: 3900 << 10)
    report = check_pair(str(bench.target), str(bench.draft), QUICK, smoke=False)
    (found,) = [finding for finding in report.findings if finding.code == "memory"]
    assert (found.level, report.exit_code) == ("option", 1)
    assert "--max-batch 1 --context " in report.command
    monkeypatch.setattr("outrider.plan.forecast.available_memory", lambda: 1 << 20)
    report = check_pair(str(bench.target), str(bench.draft), QUICK, smoke=False)
    assert (report.verdict, report.command) == ("refuse", "")


def test_the_docs_name_every_code():
    root = Path(__file__).parents[3]
    codes = {
        code
        for file in (root / "outrider" / "check").glob("*.py")
        for code in re.findall(r'Finding\(\s*"([a-z-]+)"', file.read_text())
    }
    assert len(codes) > 20
    told = set(re.findall(r"`([a-z-]+)`", (root / "docs" / "check.md").read_text()))
    assert codes - told == set()
