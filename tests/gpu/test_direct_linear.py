"""The product whose operands go straight to the tensor cores, against its plain reference and the other kernels.

Only on a CUDA device: Triton's interpreter does not run Gluon.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.gpu

PRODUCTS = [  # outputs, inputs, gated, normed, added: of SmolLM2, of Qwen2.5's 0.5B and 1.5B, and a narrow one
    (960, 576, False, True, False),
    (576, 576, False, False, True),
    (1536, 576, True, True, False),
    (576, 1536, False, False, True),
    (1152, 896, False, True, True),
    (896, 4864, False, False, True),
    (2048, 1536, False, True, True),
    (96, 72, True, False, True),
]
TILES = [(16, 64, 2), (16, 64, 4), (32, 64, 4), (16, 32, 4), (16, 16, 2), (16, 64, 8)]  # outputs, inputs, warps
GROUPS = [8, 16, 32]  # rows of a program
ROWS = [2, 7, 8, 9, 33, 64]


def tile_of(outputs: int, inputs: int, warps: int, rows: int):
    from outrider.kernels.triton_tiles import Tile

    return Tile(outputs, inputs, 1, warps, 1, rows=rows)


def fits(product: tuple[int, int, bool, bool, bool], tile: tuple[int, int, int]) -> bool:
    """All weights of a thread in at most 160 registers, and whole programs."""
    outputs, _, warps = tile
    n, k, gated, *_ = product
    return n % outputs == 0 and outputs * k * (1 + gated) // (64 * warps) <= 160


class Case:
    """A product with random operands of 64 rows."""

    def __init__(self, product: tuple[int, int, bool, bool, bool]) -> None:
        from outrider.kernels.triton_linear import LinearWorkspace

        n, k, gated, normed, added = product
        g = torch.Generator("cuda").manual_seed(n + k)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*shape, generator=g, device="cuda") * scale).bfloat16()

        self.x, self.w = random(64, k), random(n * (1 + gated), k, scale=k**-0.5)
        self.residual = random(64, n) if added else None
        self.eps, self.gated, self.outputs = 1e-5 if normed else None, gated, n
        self.scratch = LinearWorkspace(torch.device("cuda"))

    def run(self, tile, rows: slice = slice(None), *, pdl: bool = True) -> torch.Tensor:
        from outrider.kernels.triton_linear import linear

        x, residual = self.x[rows].contiguous(), None if self.residual is None else self.residual[rows].contiguous()
        out = torch.full((len(x), self.outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
        linear(x, self.w, out, self.scratch, residual=residual, eps=self.eps, gated=self.gated, pdl=pdl, tile=tile)
        return out

    def judge(self) -> torch.Tensor:
        from outrider.kernels.triton_linear import plain_linear

        residual = None if self.residual is None else self.residual.double()
        return plain_linear(self.x.double(), self.w.double(), residual=residual, eps=self.eps, gated=self.gated)


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_every_tile_gives_the_plain_product(product, tile):
    if not fits(product, tile):
        pytest.skip("such a tile holds too much")
    case = Case(product)
    judge = case.judge()
    for rows in ROWS:
        out = case.run(tile_of(*tile, 8), slice(0, rows))
        assert float((out.double() - judge[:rows]).norm() / judge[:rows].norm()) < 5e-3, rows


@pytest.mark.parametrize("product", PRODUCTS, ids=str)
def test_a_row_has_the_same_bits_whatever_the_others_and_their_number(product):
    case, tile = Case(product), next(tile for tile in reversed(TILES) if fits(product, tile))
    whole = case.run(tile_of(*tile, 8))
    for group in GROUPS[: 2 if product[2] else 3]:
        for first, end in ((0, 2), (3, 8), (5, 21), (60, 64)):
            assert torch.equal(case.run(tile_of(*tile, group), slice(first, end)), whole[first:end]), (group, first)
    assert torch.equal(case.run(tile_of(*tile, 8), pdl=False), whole)


@pytest.mark.parametrize("rows", [2, 8, 20, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_are_rotated_and_stored_as_by_the_other_kernels(rows, bias):
    from outrider.kernels.batch import RowPlaces
    from outrider.kernels.triton_linear import LinearWorkspace, linear, linear_rope
    from outrider.kernels.triton_rope import rotate_and_store

    heads, kv, dim, k = 9, 3, 64, 576
    g = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, k, generator=g, device="cuda").bfloat16()
    w = (torch.randn((heads + 2 * kv) * dim, k, generator=g, device="cuda") * k**-0.5).bfloat16()
    added = torch.randn(len(w), generator=g, device="cuda").bfloat16() if bias else None
    angles = torch.rand(rows, dim // 2, generator=g, device="cuda") * 6
    places = RowPlaces(torch.arange(rows, device="cuda") * 3 + 1, torch.stack([angles.cos(), angles.sin()], -1))
    tile, scratch = tile_of(32, 64, 4, 8), LinearWorkspace(torch.device("cuda"))

    def empty() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        q = torch.zeros(rows, heads, dim, device="cuda", dtype=torch.bfloat16)
        keys, values = torch.zeros(2, 3 * rows + 4, kv, dim, device="cuda", dtype=torch.bfloat16)
        return q, (keys, values)

    q, cache = empty()
    linear_rope(x, w, q, cache, places, scratch, bias=added, eps=1e-5, tile=tile)
    plain_q, plain_cache = empty()
    made = torch.empty(rows, len(w), device="cuda", dtype=torch.bfloat16)
    linear(x, w, made, scratch, residual=added, eps=1e-5, tile=tile)
    rotate_and_store(made, places, plain_q, plain_cache)
    assert torch.equal(q, plain_q)
    assert torch.equal(cache[0], plain_cache[0])
    assert torch.equal(cache[1], plain_cache[1])
    assert cache[0].abs().sum() > 0
