"""Top-k, top-p, min-p and typical-p, in Triton: the range of logits that each row keeps.

Each keeps the tokens nearest to some centre, in the scaled logits y = (x - peak) / T: top-k, top-p and min-p those
nearest to the best one, where y is 0; typical-p those whose surprise is nearest to the entropy, and
|surprise - entropy| = |y - mean y|, the mean taken under the probabilities. So all four ask for the radius around a
centre that holds a given number or mass of tokens. The top logits of a row nearly always contain it; where they do not,
the whole row is read in a bisection over float32 numbers. verify/probs.py is the plain reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

TRUNCATE_BLOCK = 8192  # logits read at a time
NUM_TOP = 1024  # sorted logits of a row that are searched first


@triton.jit
def _sum_within(row, count, peak, scale, least, centre, radius, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The number, or the mass, of the tokens at or above `least` and within `radius` of `centre`."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < count, other=float("-inf"))
        y = (x - peak) * scale
        each = tl.exp(y) if MASS else tl.full((BLOCK,), 1.0, dtype=tl.float32)
        total += tl.where((x >= least) & (tl.abs(y - centre) <= radius), each, 0.0)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _bisect_radius(row, count, peak, scale, least, centre, wanted, low, high, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest radius that holds `wanted`, above the float of bits `low` and at most that of bits `high`."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        radius = middle.to(tl.float32, bitcast=True)
        enough = _sum_within(row, count, peak, scale, least, centre, radius, MASS, BLOCK) >= wanted
        low = tl.where(enough, low, middle)
        high = tl.where(enough, middle, high)
    return high.to(tl.float32, bitcast=True)


@triton.jit
def _covered_radius(last, peak, scale, least, centre):
    """The radius around `centre` inside which all tokens are among the top logits, of which `last` is the lowest."""
    bound = centre - (last - peak) * scale
    return tl.where(least > last, float("inf"), tl.where(bound > 0, bound, 0.0))


@triton.jit
def _find_radius(
    row, top_logits, vocab, num_top, last, peak, scale, least, centre, wanted,
    MASS: tl.constexpr, TOP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The smallest radius around `centre` whose tokens hold `wanted`."""
    inner = _covered_radius(last, peak, scale, least, centre).to(tl.int32, bitcast=True) - 1
    near = inner.to(tl.float32, bitcast=True)  # NaN, which holds nothing, where the top logits cover nothing
    if _sum_within(top_logits, num_top, peak, scale, least, centre, near, MASS, TOP_BLOCK) >= wanted:
        none = tl.full((), -1, dtype=tl.int32)
        radius = _bisect_radius(top_logits, num_top, peak, scale, least, centre, wanted, none, inner, MASS, TOP_BLOCK)
    else:
        # exp is 0 at 128 below the best logit; a number of tokens may need any float
        max_bits = tl.full((), 0x43000000 if MASS else 0x7F7FFFFF, dtype=tl.int32)
        radius = _bisect_radius(row, vocab, peak, scale, least, centre, wanted, inner, max_bits, MASS, BLOCK)
    return radius


@triton.jit
def _logit_range(row, count, peak, scale, least, centre, radius, BLOCK: tl.constexpr):
    """The lowest and the highest logit at or above `least` and within `radius` of `centre`."""
    low = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
    high = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < count, other=float("-inf"))
        kept = (x >= least) & (tl.abs((x - peak) * scale - centre) <= radius)
        low = tl.minimum(low, tl.where(kept, x, float("inf")))
        high = tl.maximum(high, tl.where(kept, x, float("-inf")))
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _kept_range(
    row, top_logits, vocab, num_top, last, peak, scale, least, centre, radius,
    TOP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_logit_range` of a row, from its top logits where those cover the radius."""
    if radius < _covered_radius(last, peak, scale, least, centre):
        low, high = _logit_range(top_logits, num_top, peak, scale, least, centre, radius, TOP_BLOCK)
    else:
        low, high = _logit_range(row, vocab, peak, scale, least, centre, radius, BLOCK)
    return low, high


@triton.jit
def _mass_and_mean(row, count, peak, scale, least, BLOCK: tl.constexpr):
    """The mass of the tokens at or above `least`, and the mean of their scaled logits under their probabilities."""
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    moment = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, count, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < count, other=float("-inf"))
        y = (x - peak) * scale
        kept = (x >= least) & (y > float("-inf"))
        each = tl.where(kept, tl.exp(y), 0.0)
        mass += each
        moment += each * tl.where(kept, y, 0.0)
    whole = tl.sum(mass.to(tl.float64), 0)
    return whole, (tl.sum(moment.to(tl.float64), 0) / whole).to(tl.float32)


@triton.jit
def _row_mass_and_mean(
    row, top_logits, vocab, num_top, last, peak, scale, least, TOP_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """`_mass_and_mean` of a row, from its top logits where no others are kept."""
    if _covered_radius(last, peak, scale, least, 0.0) == float("inf"):
        mass, mean = _mass_and_mean(top_logits, num_top, peak, scale, least, TOP_BLOCK)
    else:
        mass, mean = _mass_and_mean(row, vocab, peak, scale, least, BLOCK)
    return mass, mean


# these may be rows of one tensor, at any address: alignment must not cause another variant to be compiled
@triton.jit(
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "typical_ps", "lows", "highs"]
)
def _cutoffs(
    logits, top_logits, temperatures, top_ks, top_ps, min_ps, typical_ps, lows, highs, vocab, stride, num_top,
    TOP_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: top-k, then top-p of what that keeps, then min-p, then typical-p."""
    r = tl.program_id(0)
    row = logits + r.to(tl.int64) * stride
    top_logits += r * num_top
    temperature = tl.load(temperatures + r)
    top_k = tl.load(top_ks + r)
    top_p = tl.load(top_ps + r)
    min_p = tl.load(min_ps + r)
    typical_p = tl.load(typical_ps + r)
    peak = tl.load(top_logits)
    last = tl.where(num_top == vocab, float("-inf"), tl.load(top_logits + num_top - 1))
    low = tl.full((), float("-inf"), dtype=tl.float32)
    high = tl.full((), float("inf"), dtype=tl.float32)
    zero = tl.full((), 0.0, dtype=tl.float32)
    usable = (peak > float("-inf")) & (peak < float("inf")) & (temperature > 0)
    scale = 1.0 / tl.where(usable, temperature, 1.0)
    if usable & (top_k > 0) & (top_k < vocab):
        one = tl.full((), 1.0, dtype=tl.float32)  # the order of logits is the same at any temperature
        k = top_k.to(tl.float64)
        radius = _find_radius(row, top_logits, vocab, num_top, last, peak, one, low, zero, k, False, TOP_BLOCK, BLOCK)
        low, _ = _kept_range(row, top_logits, vocab, num_top, last, peak, one, low, zero, radius, TOP_BLOCK, BLOCK)
    if usable & (top_p < 1):
        mass, _ = _row_mass_and_mean(row, top_logits, vocab, num_top, last, peak, scale, low, TOP_BLOCK, BLOCK)
        radius = _find_radius(
            row, top_logits, vocab, num_top, last, peak, scale, low, zero, top_p * mass, True, TOP_BLOCK, BLOCK
        )
        low, _ = _kept_range(row, top_logits, vocab, num_top, last, peak, scale, low, zero, radius, TOP_BLOCK, BLOCK)
    if usable & (min_p > 0):
        low, _ = _kept_range(
            row, top_logits, vocab, num_top, last, peak, scale, low, zero, -tl.log(min_p), TOP_BLOCK, BLOCK
        )
    if usable & (typical_p < 1):
        mass, mean = _row_mass_and_mean(row, top_logits, vocab, num_top, last, peak, scale, low, TOP_BLOCK, BLOCK)
        radius = _find_radius(
            row, top_logits, vocab, num_top, last, peak, scale, low, mean, typical_p * mass, True, TOP_BLOCK, BLOCK
        )
        low, high = _kept_range(row, top_logits, vocab, num_top, last, peak, scale, low, mean, radius, TOP_BLOCK, BLOCK)
    tl.store(lows + r, low)
    tl.store(highs + r, high)


@dataclass(frozen=True, slots=True)
class Truncation:
    """The truncation of each of R rows, on the device. Rows of temperature 0 keep all tokens."""

    temperatures: Tensor  # float32
    top_ks: Tensor  # int64; 0: all
    top_ps: Tensor  # float64; 1: all
    min_ps: Tensor  # float32; 0: all
    typical_ps: Tensor  # float64; 1: all


def cutoffs(logits: Tensor, truncation: Truncation, num_top: int = NUM_TOP) -> Tensor:
    """float32 [2, R]: the lowest and the highest logit each row keeps; -inf and inf where it keeps all.

    logits float32 [R, vocab]. Top-k keeps exactly the tokens that the reference keeps, except for logits that only
    division by the temperature makes equal. The others keep all tokens nearer to their centre than the last one kept,
    and all that tie with it; which one is the last agrees with the reference up to float32 rounding of sums and
    distances. What a row keeps depends on that row alone. Rows without a finite best logit (NaN, inf, or all -inf)
    keep all.
    """
    rows, vocab = logits.shape
    # sorted: otherwise topk orders them by the number of rows, and rounding depends on the order
    top_logits = logits.topk(min(num_top, vocab), dim=-1).values  # [R, num_top]
    bounds = torch.empty(2, rows, device=logits.device)
    _cutoffs[(rows,)](
        logits, top_logits, truncation.temperatures, truncation.top_ks, truncation.top_ps, truncation.min_ps,
        truncation.typical_ps, *bounds, vocab, logits.stride(0), top_logits.shape[1],
        triton.next_power_of_2(top_logits.shape[1]), TRUNCATE_BLOCK, num_warps=16,
        enable_fp_fusion=False,  # a distance rounds the same in every function
    )  # fmt: skip
    return bounds
