"""Which tile a product takes: what tiles promise, and that measured ones go before rules."""

import pytest

pytest.importorskip("triton")

from outrider.kernels.triton_tiles import _DIRECT_TILES, Tile, direct_tile

SHAPES = [  # outputs, inputs, gated: of small models, of the shipped head, and of models that are not small
    (960, 576, False),
    (384, 576, False),
    (576, 2880, False),
    (256, 128, True),
    (2048, 2048, False),
    (6144, 4096, False),
    (16384, 576, False),
    (577, 576, False),
]


def registers(n: int, k: int, gated: bool, tile: Tile) -> int:
    """That hold the weights of a thread: two numbers each."""
    return tile.outputs * k * (1 + gated) // (64 * tile.warps)


@pytest.mark.parametrize("rows", [2, 7, 8, 9, 17, 33, 64])
def test_a_direct_tile_divides_the_outputs_and_fits_in_registers(rows: int) -> None:
    measured = {(n, k, gated) for n, k, gated, _ in _DIRECT_TILES}
    for n, k, gated in {*SHAPES, *measured}:
        tile = direct_tile(n, k, gated, rows)
        if tile is None:
            continue
        assert n % tile.outputs == 0
        assert tile.outputs % 16 == 0
        most = 224 if (n, k, gated) in measured else 160  # beyond, or where nobody measured, registers spill
        assert registers(n, k, gated, tile) <= most, (n, k, gated, rows)
        assert tile.rows in (8, 16)
        assert (tile.splits, tile.stages, tile.by_warps) == (1, 1, False)


def test_small_matrices_have_direct_tiles_and_others_have_none() -> None:
    assert direct_tile(384, 576, False, 7) == Tile(16, 64, 1, 2, 1, rows=8)
    assert direct_tile(384, 576, False, 56) == Tile(16, 64, 1, 2, 1, rows=16)
    assert direct_tile(256, 128, True, 2) is not None
    assert direct_tile(577, 576, False, 8) is None  # outputs of the last program would not exist
    assert direct_tile(16384, 576, False, 8) is None  # not small
    assert direct_tile(6144, 4096, False, 8) is None
    assert direct_tile(16, 8192, False, 8) is None  # too many inputs for the registers of 8 warps
    assert direct_tile(384, 576, False, 65) is None


def test_what_was_measured_goes_before_the_rule():
    assert direct_tile(960, 576, False, 20) == direct_tile(960, 576, False, 32) == Tile(32, 64, 1, 2, 1, rows=8)
    assert direct_tile(576, 576, False, 8) == Tile(32, 64, 1, 4, 1, rows=8)
    assert direct_tile(1152, 896, False, 32) is None  # another kernel's tile was measured
