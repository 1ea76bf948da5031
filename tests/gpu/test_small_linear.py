"""The product of a few rows and a small matrix against its plain reference, by every kind of tile.

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
ROWS = [1, 2, 6, 8, 9, 16, 20]
if INTERPRETED:
    PRODUCTS = [(24, 288, False, True, False), (16, 288, True, True, False), (27, 96, False, True, True)]
    TILES = [(8, 32, 4, 4), (16, 16, 4, 1), (8, 128, 1, 2)]
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


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_every_tile_gives_the_plain_product(product, tile, rows):
    case = Case(product, rows)
    out, judge = case.run(by_warps(*tile)), case.judge()
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


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_blocks_loaded_ahead_change_no_bit(product):
    case, tile = Case(product, 6), by_warps(*TILES[1])
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
