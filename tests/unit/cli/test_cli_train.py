"""What `outrider train` says when it is done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.cli.screen import Screen
from outrider.cli.train import _say_done


def report(speedup: float | None) -> Any:
    """Of a head that was trained; speedup: None where speed was not measured."""
    tau = SimpleNamespace(tau=1.5, tau_sampled=1.2)
    measured = None if speedup is None else SimpleNamespace(tau=1.4, speedup=speedup)
    return SimpleNamespace(after=tau, before=tau, measured=measured, target="demo", drafter="eagle:model=run/drafter")


@pytest.mark.parametrize(
    ("speedup", "word", "warned"), [(1.4, "use it", False), (None, "use it", False), (0.31, "try it", True)]
)
def test_a_head_that_is_slower_is_not_recommended(
    speedup: float | None, word: str, warned: bool, capsys: pytest.CaptureFixture[str]
):
    _say_done(Screen(), report(speedup), Path("run"))
    said = capsys.readouterr().out
    assert f"{word}: outrider serve demo --drafter eagle:model=run/drafter" in said
    assert ("not faster" in said) == warned
