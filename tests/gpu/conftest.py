"""Triton's interpreter (TRITON_INTERPRET=1), in less time."""

from __future__ import annotations

import os
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure() -> None:
    """Patch Triton's language once for each module of device functions, not at each of their calls.

    Those patches stay, and a launch adds its own: at later calls there is nothing left to patch, and looking for it
    takes a third of the time of these tests.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    patched: set[str] = set()

    def call(function: interpreter.InterpretedFunction[Any], *args: Any, **options: Any) -> Any:
        if function.fn.__module__ not in patched:
            interpreter._patch_lang(function.fn)
            patched.add(function.fn.__module__)
        return function.rewrite()(*args, **options)

    interpreter.InterpretedFunction.__call__ = call


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 4 programs of attention for the keys of a text: short texts need fewer, and idle ones take time."""
    if INTERPRETED:
        monkeypatch.setattr("outrider.kernels.triton_attention.MAX_KV_SPLITS", 4)
