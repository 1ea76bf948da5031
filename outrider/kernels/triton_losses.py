"""Cross entropy and L1 distance of a head's logits to a target's distribution, with their gradient, in Triton.

One program computes the losses of one row and reads it twice; the gradient kernel reads it once more. The only tensor
as large as the logits that is written is their gradient. train/vocabulary.py has the plain reference.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8


@triton.jit
def _load_logits(first, second, row, column, inside, first_stride, second_stride, BOTH: tl.constexpr):
    z = tl.load(first + row * first_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    if BOTH:
        z += tl.load(second + row * second_stride + column, mask=inside, other=0.0).to(tl.float32)
    return z


@triton.jit
def _load_probs(target, total, row, column, inside, stride):
    logits = tl.load(target + row * stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.exp(logits - total)


@triton.jit
def _signs(q, p):
    return tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))


@triton.jit
def _losses(
    first, second, target, totals, made, columns, first_stride, second_stride, target_stride, rows,
    BOTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """made: float32 [5, rows]: cross entropy, L1, the target's mass, log of the head's sum, sum of q sign(q - p)"""
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(totals + row)
    peak, scaled, mass, dot = float("-inf"), 0.0, 0.0, 0.0
    for begin in range(0, columns, SIZE):
        column = begin + tl.arange(0, SIZE)
        inside = column < columns
        z = _load_logits(first, second, row, column, inside, first_stride, second_stride, BOTH)
        p = _load_probs(target, total, row, column, inside, target_stride)
        higher = tl.maximum(peak, tl.max(z, 0))
        scaled = scaled * tl.exp(peak - higher) + tl.sum(tl.exp(z - higher), 0)
        peak = higher
        mass += tl.sum(p, 0)
        dot += tl.sum(tl.where(inside, p * z, 0.0), 0)
    log_sum = peak + tl.log(scaled)
    distance, signed = 0.0, 0.0
    for begin in range(0, columns, SIZE):
        column = begin + tl.arange(0, SIZE)
        inside = column < columns
        z = _load_logits(first, second, row, column, inside, first_stride, second_stride, BOTH)
        p = _load_probs(target, total, row, column, inside, target_stride)
        q = tl.exp(z - log_sum)
        distance += tl.sum(tl.abs(q - p), 0)
        signed += tl.sum(q * _signs(q, p), 0)
    tl.store(made + row, log_sum * mass - dot)
    tl.store(made + rows + row, distance + tl.maximum(1.0 - mass, 0.0))
    tl.store(made + 2 * rows + row, mass)
    tl.store(made + 3 * rows + row, log_sum)
    tl.store(made + 4 * rows + row, signed)


@triton.jit
def _gradient(
    first, second, target, totals, made, upstream, out, columns, first_stride, second_stride, target_stride, rows,
    BOTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One part of one row. upstream: float32 [2, rows], of the cross entropy and of the L1 distance."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < columns
    z = _load_logits(first, second, row, column, inside, first_stride, second_stride, BOTH)
    p = _load_probs(target, tl.load(totals + row), row, column, inside, target_stride)
    mass, log_sum, signed = (
        tl.load(made + 2 * rows + row),
        tl.load(made + 3 * rows + row),
        tl.load(made + 4 * rows + row),
    )
    q = tl.exp(z - log_sum)
    by_entropy, by_distance = tl.load(upstream + row), tl.load(upstream + rows + row)
    found = by_entropy * (mass * q - p) + by_distance * q * (_signs(q, p) - signed)
    tl.store(out + row * columns + column, found.to(out.dtype.element_ty), mask=inside)


def distance_losses(
    first: Tensor, second: Tensor | None, target: Tensor, totals: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """first, second [N, outputs]: a head's logits in two summands, the second may be None. target [N, outputs]: the
    target's logits of the same tokens. totals float32 [N]: log of the sum of exp over all of its logits.

    -> float32 [N] three times: cross entropy, L1 distance, and the mass that the target gives these tokens. The first
    two have a gradient with respect to `first` and `second`.
    """
    return _DistanceLosses.apply(first, second, target, totals)  # pyright: ignore[reportReturnType]


class _DistanceLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor | None, target: Tensor, totals: Tensor) -> tuple[Tensor, ...]:
        rows, columns = first.shape
        other = first if second is None else second
        made = torch.empty(5, rows, device=first.device)
        strides = first.stride(0), other.stride(0), target.stride(0)
        both = second is not None
        _losses[rows,](
            first, other, target, totals, made, columns, *strides, rows, BOTH=both, SIZE=BLOCK, num_warps=WARPS
        )
        ctx.save_for_backward(first, other, target, totals, made)
        ctx.both = both
        ce, l1, mass = (part.clone() for part in made[:3])
        ctx.mark_non_differentiable(mass)
        return ce, l1, mass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        first, other, target, totals, made = ctx.saved_tensors
        rows, columns = first.shape
        upstream = torch.stack([grads[0], grads[1]]).float().contiguous()
        out = torch.empty_like(first, memory_format=torch.contiguous_format)
        strides = first.stride(0), other.stride(0), target.stride(0)
        grid = rows, triton.cdiv(columns, BLOCK)
        _gradient[grid](
            first, other, target, totals, made, upstream, out, columns, *strides, rows, BOTH=ctx.both, SIZE=BLOCK,
            num_warps=WARPS,
        )  # fmt: skip
        other_gradient = out.to(other.dtype) if ctx.both else None
        return out, other_gradient, None, None
