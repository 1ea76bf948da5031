"""Triton's interpreter (TRITON_INTERPRET=1), in less time."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from outrider.kernels.triton_tiles import Tile

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure() -> None:
    if INTERPRETED:
        from fast_interpreter import speed_up

        speed_up()


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of fewer programs, each of which takes the interpreter milliseconds.

    Of attention, at most 4 for the keys of a text: short texts need fewer. Of small products, with 32 outputs each and
    not 8: test_small_linear.py runs their own tiles.
    """
    if not INTERPRETED:
        return
    from outrider.kernels import triton_linear

    own_tile = triton_linear.small_tile

    def wide_tile(n: int, k: int, gated: bool, rows: int) -> Tile | None:
        tile = own_tile(n, k, gated, rows)
        return replace(tile, outputs=32) if tile is not None and tile.by_warps else tile

    monkeypatch.setattr(triton_linear, "small_tile", wide_tile)
    monkeypatch.setattr("outrider.kernels.triton_attention.MAX_KV_SPLITS", 4)
