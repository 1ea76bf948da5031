"""`outrider serve`: what is checked before it listens, and what --help says."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from outrider.checkpoints import resolve as hub
from outrider.core.errors import FetchError
from outrider.server import run as running
from outrider.server.ops import logs


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The settings of each socket that was opened."""
    opened: list[object] = []
    listen = running.listen
    monkeypatch.setattr(running, "listen", lambda settings: opened.append(settings) or listen(settings))
    return opened


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demooo"], "error: there is no file or folder 'demooo'"),
        (["--model", "demooo"], "error: there is no file or folder 'demooo'"),
        (["--drafter", "draft-model:model=demooo"], "error: draft model: there is no file or folder 'demooo'"),
        (["--drafter", "suffix+draft-model:model=demooo"], "error: draft model: there is no file"),
        (["--max-batch", "0"], "error: max_batch must be a whole number from 1"),
        (["--context", "1"], "error: context must be a whole number from 2"),
        (["--device", "gpu"], "error: no device called 'gpu'"),
        (["--dtype", "int3"], "error: no dtype called 'int3'"),
        (["--port", "99999"], "error: "),
        (["--speculative-config", '{"model": "demooo", "num_speculative_tokens": 3}'], "error: draft model: there is"),
    ],
)
def test_what_cannot_be_is_told_once_before_anything_listens(cli, bound, words, says):
    ran = cli("serve", "--port", "0", *words)
    assert (ran.code, ran.out, bound) == (2, "", [])
    assert ran.err.startswith(says)
    assert ran.err.count("\n") == 1


def test_a_folder_that_is_no_model_is_told_before_anything_listens(cli, bound, tmp_path: Path):
    ran = cli("serve", str(tmp_path), "--port", "0")
    assert (ran.code, bound) == (2, [])
    assert str(tmp_path) in ran.err


def test_a_model_that_cannot_be_fetched_is_told_once(cli, bound, monkeypatch, caplog):
    def unreachable(*args: object) -> Path:
        raise FetchError("no network today")

    monkeypatch.setattr(hub, "_download_snapshot", unreachable)
    monkeypatch.setattr(logs, "set_up_logs", lambda *args, **options: None)
    with caplog.at_level(logging.CRITICAL, "outrider.server"):
        ran = cli("serve", "org/name", "--port", "0")
    assert ran.code == 2
    assert len(bound) == 1
    assert [r.getMessage() for r in caplog.records] == ["the model cannot be loaded: no network today"]
    assert "no network" not in ran.err, "the log is on stderr, and has told it"


def test_help_names_the_drafter_that_is_used(cli):
    def drafter(verb: str) -> str:
        (lines,) = re.findall(r"--drafter +SPEC.*\n.*\n", cli(verb, "--help").out)
        assert "MODULE:CLASS" in lines
        return lines

    assert "(auto)" in drafter("serve")
    assert "(auto)" in drafter("run")
    assert "(auto)" in drafter("chat")
    assert "unless another drafter" not in cli("serve", "--help").out
