"""A token from each row of logits, in Triton: the best of logits / T + noise over what truncation leaves.

The noise is that of verify/noise.py, in the same integer arithmetic and in float64; a row of
temperature 0 takes the best logit. Each program takes a part of the vocabulary; a second kernel
compares the parts' best, the lowest id first among equals. A row that holds a NaN, or no finite
best, yields NOTHING.

`cutoffs` finds the least logit that top-k, top-p and min-p leave: all three keep what lies above
some value. A row whose best logits do not tell is walked through, halving the range of float32
numbers each time. The plain references are verify/law.py and verify/noise.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
HEAD = 1024  # logits of a row that are sorted to find where truncation cuts
NOTHING = -1


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _best_of_part(
    logits, temperatures, seeds, positions, cutoffs, values, tokens, vocab, stride,
    PARTS: tl.constexpr, SAMPLED: tl.constexpr, CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best noisy value of one part of one row, and its token; NaN where the part holds one."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    raw = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=float("-inf"))
    x = raw.to(tl.float64)
    if SAMPLED:
        temperature = tl.load(temperatures + row)
        if temperature > 0:
            golden = tl.full((), 0x9E3779B97F4A7C15, dtype=tl.uint64)
            key = _mix(tl.load(seeds + row).to(tl.uint64, bitcast=True) + golden)
            key = _mix(key + tl.load(positions + row).to(tl.uint64) * golden)
            key = _mix(key)  # stream 0, the target's own
            bits = _mix(key + token.to(tl.uint64) * golden) >> 12
            v = (bits.to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)
            x = x / temperature - tl.log(-tl.log(1.0 - v))
            x = tl.where(inside, x, float("-inf"))
    if CUT:
        x = tl.where(raw < tl.load(cutoffs + row), float("-inf"), x)
    broken = tl.max((raw != raw).to(tl.int32), 0)
    best = tl.max(tl.where(x == x, x, float("-inf")), 0)
    first = tl.min(tl.where(x == best, token, vocab), 0)
    tl.store(values + row * PARTS + part, tl.where(broken > 0, float("nan"), best))
    tl.store(tokens + row * PARTS + part, first)


@triton.jit
def _best_of_parts(values, tokens, out, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One row's token: of the best part, the first among equals."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    value = tl.load(values + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    token = tl.load(tokens + row * PARTS + part, mask=part < PARTS, other=0)
    broken = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value == value, value, float("-inf")), 0)
    first = tl.min(tl.where(value == best, token, 2147483647), 0)
    fine = (broken == 0) & (best > float("-inf")) & (best < float("inf"))
    tl.store(out + row, tl.where(fine, first, -1).to(tl.int64))


def choose(
    logits: Tensor,
    temperatures: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    cut: Tensor | None = None,
) -> Tensor:
    """[R]: each row's token, NOTHING where there is none. logits [R, vocab], rows contiguous.

    temperatures float64 [R]; seeds and positions int64 [R]; without them every row takes its best.
    cut float32 [R]: lower logits are out of the running.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    values = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sampled = temperatures is not None
    noise = (temperatures, seeds, positions) if sampled else (values, tokens, tokens)
    _best_of_part[(rows, parts)](
        logits, *noise, values if cut is None else cut, values, tokens, vocab, logits.stride(0),
        parts, sampled, cut is not None, BLOCK, num_warps=8,
    )  # fmt: skip
    _best_of_parts[(rows,)](values, tokens, out, parts, triton.next_power_of_2(parts), num_warps=1)
    return out


@triton.jit
def _key(x):
    """An unsigned number that grows with the float."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, ~bits, bits | 0x80000000)


@triton.jit
def _value(key):
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, ~key)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _reach(row, vocab, peak, temperature, least, pivot, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Over the tokens at or above both `least` and `pivot`: their number, or their mass, in float64."""
    total = tl.full((), 0.0, dtype=tl.float64)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(row + token, mask=token < vocab, other=float("-inf"))
        kept = (token < vocab) & (x >= least) & (_key(x) >= pivot)
        each = tl.exp((x - peak) / temperature) if MASS else tl.full((BLOCK,), 1.0, dtype=tl.float32)
        total += tl.sum(tl.where(kept, each, 0.0), 0).to(tl.float64)
    return total


@triton.jit
def _last_to_reach(row, vocab, peak, temperature, least, wanted, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """The highest value such that what lies at or above it reaches `wanted`."""
    low = tl.full((), 0, dtype=tl.uint64)  # reaches; the answer is below `high`
    high = _key(peak).to(tl.uint64) + 1
    while high - low > 1:
        step = tl.maximum((high - low) >> 1, 1)
        middle = low + step
        enough = _reach(row, vocab, peak, temperature, least, middle.to(tl.uint32), MASS, BLOCK) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return _value(low.to(tl.uint32))


@triton.jit
def _cutoff(logits, temperatures, top_ks, top_ps, min_ps, wanted, out, vocab, stride, BLOCK: tl.constexpr):
    """One row, where it is wanted: top-k, then top-p of what that leaves, then min-p."""
    r = tl.program_id(0)
    if tl.load(wanted + r) == 0:
        return
    row = logits + r.to(tl.int64) * stride
    temperature = tl.load(temperatures + r)
    top_k = tl.load(top_ks + r)
    top_p = tl.load(top_ps + r)
    min_p = tl.load(min_ps + r)
    peak = tl.full((), float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        peak = tl.maximum(peak, tl.max(tl.load(row + token, mask=token < vocab, other=float("-inf")), 0))
    cut = tl.full((), float("-inf"), dtype=tl.float32)
    usable = (peak > float("-inf")) & (peak < float("inf")) & (temperature > 0)
    if usable & (top_k > 0) & (top_k < vocab):
        cut = _last_to_reach(row, vocab, peak, temperature, cut, top_k.to(tl.float64), False, BLOCK)
    if usable & (top_p < 1):
        whole = _reach(row, vocab, peak, temperature, cut, tl.full((), 0, dtype=tl.uint32), True, BLOCK)
        cut = tl.maximum(cut, _last_to_reach(row, vocab, peak, temperature, cut, top_p * whole, True, BLOCK))
    if usable & (min_p > 0):
        cut = tl.maximum(cut, peak + temperature * tl.log(min_p))
    tl.store(out + r, cut)


def cutoffs(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, head: int = HEAD
) -> Tensor:
    """float32 [R]: the least logit each row keeps; -inf where it keeps all.

    logits float32 [R, vocab]; temperatures float32 [R], top_ks int64 [R] (0: all), top_ps float64 [R]
    (1: all), min_ps float32 [R] (0: all). Rows of temperature 0 keep all. The `head` best logits of a
    row nearly always tell; rows they do not tell enough of are walked through.
    """
    best = logits.topk(min(head, logits.shape[1]), dim=-1).values  # [R, head]
    peak, scale = best[:, :1], temperatures.clamp(min=1e-30)[:, None]
    usable = peak[:, 0].isfinite() & (temperatures > 0)
    ranked, chosen = (top_ks > 0) & (top_ks < logits.shape[1]), top_ps < 1
    kth = best.gather(1, (top_ks - 1).clamp(0, best.shape[1] - 1)[:, None])[:, 0]
    cut = torch.where(ranked, kth, float("-inf"))
    # sums in float64: how torch splits one depends on the number of rows, what a row keeps must not
    mass = torch.where(best >= cut[:, None], ((best - peak) / scale).exp(), 0.0).double().cumsum(-1)
    whole = torch.where(ranked, mass[:, -1], ((logits - peak) / scale).exp().sum(-1, dtype=torch.float64))
    reached = (mass < (top_ps * whole)[:, None]).sum(-1)
    nucleus = best.gather(1, reached.clamp(max=best.shape[1] - 1)[:, None])[:, 0]
    cut = torch.where(chosen, torch.maximum(cut, nucleus), cut)
    cut = torch.maximum(cut, torch.where(min_ps > 0, peak[:, 0] + temperatures * min_ps.log(), float("-inf")))
    out = torch.where(usable, cut, float("-inf"))
    untold = (ranked & (top_ks >= best.shape[1])) | (chosen & (reached >= best.shape[1]))
    _cutoff[(len(logits),)](
        logits, temperatures, top_ks, top_ps, min_ps, (usable & untold).int(), out, logits.shape[1],
        logits.stride(0), 2 * BLOCK, num_warps=16,
    )  # fmt: skip
    return out
