"""The command line in a test: no terminal but a pretended one, no model but one that recites."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from reciting import Ran, Stage, Terminal

from outrider.cli.main import main


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "OUTRIDER_DEBUG", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    stage = Stage()
    monkeypatch.setattr("outrider.llm.load", stage.load)
    # what a controller decides follows measured times: here drafts are always made
    monkeypatch.setattr("outrider.llm.CostMeter.row_price", lambda meter, width: None)
    monkeypatch.setattr("outrider.llm.CostMeter.controller", lambda meter, drafter: None)
    return stage


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs the command line; stdin is a terminal unless text is piped in."""

    def call(*words: str, piped: str | None = None) -> Ran:
        monkeypatch.setattr(sys, "stdin", Terminal() if piped is None else io.StringIO(piped))
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            main(words)
        said = capsys.readouterr()
        return Ran(int(left.value.code or 0), said.out, said.err)

    return call
