"""Linear layers for a few rows on CUDA: choosing the kernel and tile for a shape, and launching it.

One row, and two to 64 rows: triton_few_rows.py. Two to 64 rows and a small matrix: triton_direct_linear.py, or
triton_small_linear.py. Beyond 64 rows cuBLAS is as fast; triton_rows.py has the kernels around it. `plain_linear` is
the reference.

Fused with the product: the RMS norm of the input (its scale is applied to the output; its weight is folded into the
matrix), SiLU-gated pairs of outputs, the residual, and for attention heads RoPE and the store to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from outrider.kernels.batch import RowPlaces
from outrider.kernels.triton_direct_linear import direct_rows
from outrider.kernels.triton_few_rows import few_rows, one_row
from outrider.kernels.triton_small_linear import rows_by_warps
from outrider.kernels.triton_tiles import (
    MAX_K_SPLITS,
    MAX_LINEAR_ROWS,
    MAX_SPLIT_OUTPUTS,
    PADDED_ROWS,
    Tile,
    direct_tile,
    few_rows_tile,
    one_row_tile,
    padded_rows,
    small_tile,
)

DIRECT = not triton.knobs.runtime.interpret
"""Whether products take the kernel whose operands go straight to the tensor cores: the interpreter does not run it."""


class LinearWorkspace:
    """Partial sums of split products, and counts of those stored so far. One for each CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        outputs = MAX_SPLIT_OUTPUTS + MAX_SPLIT_OUTPUTS // 64 + 64  # the squares of each tile's rows follow the parts
        self.parts = torch.empty(MAX_K_SPLITS * MAX_LINEAR_ROWS * outputs, dtype=torch.float32, device=device)
        self.counters = torch.zeros(MAX_SPLIT_OUTPUTS // 16, dtype=torch.int32, device=device)


def plain_linear(
    x: Tensor, w: Tensor, *, residual: Tensor | None = None, eps: float | None = None, gated: bool = False
) -> Tensor:
    """What `linear` computes, in the precision of x."""
    if eps is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = x @ w.T
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual


@dataclass(frozen=True, slots=True)
class _LinearCall:
    """The arguments that the kernels share."""

    x: Tensor
    w: Tensor
    out: Tensor
    added: Tensor | None = None
    eps: float | None = None
    gated: bool = False
    heads: tuple[tuple[Tensor, Tensor], RowPlaces] | None = None
    """The cache and the places of rotated keys and values; `out` takes the queries."""

    @property
    def outputs(self) -> int:
        return len(self.w) // (1 + self.gated)

    def pointers(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if self.heads is None:
            return (self.x,) * 4
        cache, places = self.heads
        return places.slots, places.cos_sin, *cache

    def constants(self, pdl: bool) -> tuple[int, ...]:
        heads = (0, 0, 0) if self.heads is None else (self.out.shape[1], *self.heads[0][0].shape[1:])
        return self.outputs, self.x.shape[1], self.eps is not None, self.gated, self.added is not None, pdl, *heads


def linear(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    scratch: LinearWorkspace,
    *,
    residual: Tensor | None = None,
    eps: float | None = None,
    gated: bool = False,
    pdl: bool = True,
    pinned: bool = False,
    tile: Tile | None = None,
) -> None:
    """out [M, n] = f(norm(x [M, k]) @ w.T) + residual, M up to 64.

    eps: norm the rows of x first, with a weight of ones. gated: w [2n, k] holds gate and up, and out is silu(gate) *
    up. residual [M, n] may be out itself, or [n] a bias. pinned: sums have one order whatever the number of rows, so
    that a row has the same bits alone and in any batch. tile: used instead of the one chosen for the shape.
    """
    call = _LinearCall(x, w, out, residual, eps, gated)
    _launch(call, scratch, tile or _choose_tile(call, pinned), pinned, pdl)


def linear_rope(
    x: Tensor,
    w: Tensor,
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    places: RowPlaces,
    scratch: LinearWorkspace,
    *,
    bias: Tensor | None = None,
    eps: float | None = None,
    pdl: bool = True,
    pinned: bool = False,
    tile: Tile | None = None,
) -> None:
    """Query, key and value heads of x [M, k], rotated and stored: `linear` then `rotate_and_store`, bit for bit.

    w [(H + 2 KV) * D, k]; q [M, H, D] takes the queries, the cache, keys and values each [slots, KV, D], the rest.
    """
    call = _LinearCall(x, w, q, bias, eps, heads=(cache, places))
    _launch(call, scratch, tile or _choose_tile(call, pinned), pinned, pdl)


def _launch(call: _LinearCall, scratch: LinearWorkspace, tile: Tile, pinned: bool, pdl: bool) -> None:
    (m, k), n = call.x.shape, call.outputs
    added, eps = call.x if call.added is None else call.added, call.eps or 0.0
    given, known = call.pointers(), call.constants(pdl)
    stride, programs = n if added.dim() == 2 else 0, triton.cdiv(n, tile.outputs)
    if tile.rows:
        direct_rows[(programs, triton.cdiv(m, tile.rows))](
            call.x, call.w, added, call.out, *given, m, stride, eps, *known, tile.rows, tile.outputs, tile.inputs,
            tile.warps, num_warps=tile.warps, launch_pdl=pdl,
        )  # fmt: skip
    elif tile.by_warps:
        rows_by_warps[(programs,)](
            call.x, call.w, added, call.out, *given, m, stride, eps, *known, 8 if m <= 8 else padded_rows(m),
            tile.outputs, tile.inputs, tile.warps, min(tile.ahead, triton.cdiv(k, tile.inputs * tile.warps)),
            num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
        )  # fmt: skip
    elif m == 1 and not pinned:
        one_row[(programs,)](
            call.x, call.w, added, call.out, *given, eps, *known, tile.outputs, tile.inputs,
            min(tile.ahead, triton.cdiv(k, tile.inputs)), num_warps=tile.warps, launch_pdl=pdl,
        )  # fmt: skip
    else:
        few_rows[(programs, tile.splits)](
            call.x, call.w, added, call.out, scratch.parts, scratch.counters, *given, m, stride, eps, *known,
            padded_rows(m), tile.outputs, tile.inputs, tile.splits, min(tile.ahead, k // tile.splits // tile.inputs),
            num_warps=tile.warps, num_stages=tile.stages, launch_pdl=pdl,
        )  # fmt: skip


def _choose_tile(call: _LinearCall, pinned: bool) -> Tile:
    (m, k), n, gated = call.x.shape, call.outputs, call.gated
    if not pinned:
        tile = direct_tile(n, k, gated, m) if DIRECT and m > 1 else None
        tile = tile or small_tile(n, k, gated, m) or (one_row_tile(n, k, gated) if m == 1 else None)
        if tile is not None:
            return tile
    tile = few_rows_tile(n, k, gated, padded_rows(m)) if m <= MAX_LINEAR_ROWS else None
    if tile is None:
        raise ValueError(f"no kernel for {m} rows of {k} inputs and {n} outputs: see `supports_linear`")
    if pinned:  # one order of sums, whatever rows are padded to
        first = few_rows_tile(n, k, gated, PADDED_ROWS[0]) or tile
        tile = replace(first, stages=tile.stages, ahead=tile.ahead)
    return tile
