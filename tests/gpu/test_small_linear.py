"""The product of one row, and of a few rows and a small matrix, against its plain reference, by every kind of tile.

On a CUDA device, or anywhere in Triton's interpreter (TRITON_INTERPRET=1), which runs the small cases.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PDL = not INTERPRETED
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter reads bfloat16 wrongly

PRODUCTS = [  # outputs, inputs, gated, normed, added: of SmolLM2, of Qwen2.5's 0.5B, and one that fits no tile
    (960, 576, False, True, False),
    (576, 576, False, False, True),
    (1536, 576, True, True, False),
    (576, 1536, False, False, True),
    (1152, 896, False, True, True),
    (4864, 896, True, True, False),
    (130, 96, False, True, True),
]
TILES = [  # outputs, inputs of a warp, warps, blocks loaded ahead
    (8, 64, 4, 4),
    (8, 64, 8, 4),
    (16, 64, 4, 1),
    (32, 32, 4, 2),
    (8, 128, 4, 1),
    (8, 256, 1, 1),
]
ONE_ROW_TILES = [  # outputs, inputs, warps, blocks loaded ahead
    (1, 512, 2, 3),
    (4, 512, 2, 3),
    (2, 2048, 8, 2),
    (4, 64, 4, 9),
    (8, 1024, 4, 0),
]
ROWS = [1, 2, 6, 8, 9, 16, 20]
if INTERPRETED:
    PRODUCTS = [(24, 288, False, True, False), (16, 288, True, True, False), (27, 96, False, True, True)]
    TILES = [(8, 32, 4, 4), (16, 16, 4, 1), (8, 128, 1, 2)]
    ONE_ROW_TILES = [(1, 128, 2, 3), (4, 64, 2, 2), (8, 512, 4, 1), (4, 32, 4, 0)]
    ROWS = [1, 6, 9, 20]


def random(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=g, device=DEVICE) * scale).to(HALF)


class Case:
    """A product with random operands of so many rows."""

    def __init__(self, product: tuple[int, int, bool, bool, bool], rows: int) -> None:
        from outrider.kernels.triton_linear import LinearWorkspace

        n, k, gated, normed, added = product
        self.x, self.w = random(rows, k, seed=rows), random(n * (1 + gated), k, seed=n, scale=k**-0.5)
        self.residual = random(rows, n, seed=n + 1) if added else None
        self.eps, self.gated, self.outputs = 1e-5 if normed else None, gated, n
        self.scratch = LinearWorkspace(DEVICE)

    def run(self, tile, rows: slice = slice(None)) -> torch.Tensor:
        """The product of some rows, by this tile or the one for the shape."""
        from outrider.kernels.triton_linear import linear

        x, residual = self.x[rows].contiguous(), None if self.residual is None else self.residual[rows].contiguous()
        out = torch.full((len(x), self.outputs), torch.nan, device=DEVICE, dtype=HALF)
        linear(x, self.w, out, self.scratch, residual=residual, eps=self.eps, gated=self.gated, pdl=PDL, tile=tile)
        return out

    def judge(self) -> torch.Tensor:
        from outrider.kernels.triton_linear import plain_linear

        residual = None if self.residual is None else self.residual.double()
        return plain_linear(self.x.double(), self.w.double(), residual=residual, eps=self.eps, gated=self.gated)


def by_warps(outputs: int, inputs: int, warps: int, ahead: int):
    from outrider.kernels.triton_tiles import Tile

    return Tile(outputs, inputs, 1, warps, 3, ahead, by_warps=True)


def one_row(outputs: int, inputs: int, warps: int, ahead: int):
    from outrider.kernels.triton_tiles import Tile

    return Tile(outputs, inputs, 1, warps, 1, ahead)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_every_tile_gives_the_plain_product(product, tile, rows):
    case = Case(product, rows)
    out, judge = case.run(by_warps(*tile)), case.judge()
    assert float((out.double() - judge).norm() / judge.norm()) < 5e-3


@pytest.mark.parametrize("tile", ONE_ROW_TILES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_every_tile_of_one_row_gives_the_plain_product(product, tile):
    case = Case(product, 1)
    out, judge = case.run(one_row(*tile)), case.judge()
    assert float((out.double() - judge).norm() / judge.norm()) < 5e-3


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_a_row_has_the_same_bits_whatever_the_others(product):
    """Among rows padded to the same number: 2 to 8, and 9 to 16."""
    case = Case(product, 16)
    tile = by_warps(*TILES[0])
    few, more = case.run(tile, slice(0, 8)), case.run(tile)
    for first, end in ((0, 2), (3, 8), (6, 8), (7, 8)):
        assert torch.equal(case.run(tile, slice(first, end)), few[first:end])
    for first, end in ((0, 9), (5, 16)):
        assert torch.equal(case.run(tile, slice(first, end)), more[first:end])


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_blocks_loaded_ahead_change_no_bit(product, rows):
    case, tile = Case(product, rows), one_row(*ONE_ROW_TILES[1]) if rows == 1 else by_warps(*TILES[1])
    outs = [case.run(replace(tile, ahead=ahead)) for ahead in (1, 2, 3, 9)]
    assert outs[0].isfinite().all()
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_small_matrices_have_tiles_of_this_kernel():
    from outrider.kernels.triton_tiles import small_tile

    for n, k, gated in ((960, 576, False), (576, 576, False), (1536, 576, True), (576, 1536, False)):
        for rows in (2, 8) if k == n else (2, 8, 16):  # 16 rows of the square one are faster by the other kernel
            tile = small_tile(n, k, gated, rows)
            assert tile is not None
            assert tile.by_warps
            assert tile.splits == 1
            assert tile.ahead >= 1
        assert small_tile(n, k, gated, 17) is None
    assert small_tile(4096, 14336, False, 6) is None  # of an 8B model


@pytest.mark.parametrize(
    ("product", "tile"),
    [
        ((6144, 4096, False), (4, 2048, 8, 1)),  # an 8B model: 0.97 of the bandwidth with these
        ((4096, 4096, False), (4, 4096, 8, 1)),
        ((14336, 4096, True), (1, 4096, 8, 1)),
        ((4096, 14336, False), (4, 2048, 8, 1)),
        ((128256, 4096, False), (4, 2048, 8, 1)),
        ((2048, 1536, False), (8, 512, 4, 3)),  # Qwen2.5-1.5B
        ((1536, 1536, False), (4, 512, 2, 3)),
        ((8960, 1536, True), (1, 512, 2, 3)),
        ((1536, 8960, False), (2, 2048, 8, 2)),
        ((151936, 1536, False), (2, 1024, 4, 1)),
        ((1152, 896, False), (4, 512, 2, 2)),  # Qwen2.5-0.5B
        ((896, 896, False), (2, 1024, 4, 1)),
        ((4864, 896, True), (8, 128, 4, 7)),
        ((896, 4864, False), (2, 2048, 8, 2)),
        ((151936, 896, False), (4, 1024, 4, 1)),
        ((960, 576, False), (8, 1024, 4, 1)),  # SmolLM2-135M
        ((576, 576, False), (2, 1024, 2, 1)),
        ((1536, 576, True), (4, 1024, 4, 1)),
        ((576, 1536, False), (2, 512, 2, 3)),
        ((49152, 576, False), (8, 1024, 4, 1)),
    ],
    ids=str,
)
def test_one_row_has_the_tile_of_its_shape(product, tile):
    from outrider.kernels.triton_tiles import one_row_tile, small_tile

    assert (small_tile(*product, 1) or one_row_tile(*product)) == one_row(*tile)
