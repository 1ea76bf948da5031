"""Where compiled kernels are kept: in Outrider's folder, unless the user has said where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.loading.load import keep_compiled_kernels


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "environ", {"OUTRIDER_HOME": str(tmp_path)})


def test_kernels_are_kept_at_home(tmp_path: Path):
    keep_compiled_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_what_the_user_set_stays(name: str):
    os.environ[name] = "elsewhere"
    before = dict(os.environ)
    keep_compiled_kernels()
    assert os.environ == before
