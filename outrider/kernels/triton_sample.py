"""Sampling a token from each row of logits, in Triton: the argmax of logits / T + Gumbel noise over the kept tokens.

The noise is that of verify/noise.py, in the same integer arithmetic and in float64; a row of temperature 0 takes the
best logit. Each program computes one part of the vocabulary; a second kernel takes the best of all parts, the lowest id
among equals. A row that holds a NaN, or no finite best, yields NO_TOKEN.

verify/noise.py is the plain reference; triton_truncate.py finds which tokens are kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.core.sampling import NO_TOKEN
from outrider.kernels.batch import AttentionBatch

SAMPLE_BLOCK = 4096  # columns of one program


@triton.jit
def _splitmix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def gumbel_noise(seed, position, token):
    """The target's noise (stream 0) of tokens [...] at a position: float64 [...]"""
    golden = tl.full((), 0x9E3779B97F4A7C15, dtype=tl.uint64)
    key = _splitmix64(seed.to(tl.uint64, bitcast=True) + golden)
    key = _splitmix64(key + position.to(tl.uint64) * golden)
    key = _splitmix64(key)
    bits = _splitmix64(key + token.to(tl.uint64) * golden) >> 12
    v = (bits.to(tl.float64) + 0.5) * (1.0 / 4503599627370496.0)
    return -tl.log(-tl.log(1.0 - v))


# these may be columns of one tensor, at any address: alignment must not cause another variant to be compiled
@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["temperatures", "seeds", "positions", "row_index", "depths", "cutoffs", "ids"],
)
def _best_of_part(
    logits, temperatures, seeds, positions, row_index, depths, cutoffs, ids, values, tokens, columns, stride, width,
    PARTS: tl.constexpr, SAMPLED: tl.constexpr, PLACED: tl.constexpr, CUT: tl.constexpr, NAMED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The best noisy value of one part of one row, and its token; NaN where the part holds one.

    PLACED: temperatures and seeds are given per sequence, and positions are where the sequences' rows start; those of a
    row follow from its place.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    raw = tl.load(logits + row.to(tl.int64) * stride + column, mask=inside, other=float("-inf"))
    token = column
    if NAMED:
        token = tl.load(ids + column, mask=inside, other=2147483647).to(tl.int32)
    x = raw.to(tl.float64)
    if SAMPLED:
        of = row.to(tl.int64)
        ahead = tl.zeros((), dtype=tl.int64)
        if PLACED:
            place = tl.maximum(tl.load(row_index + row), 0)
            of = place // width
            ahead = tl.load(depths + place) + 1
        temperature = tl.load(temperatures + of)
        if temperature > 0:
            x = x / temperature + gumbel_noise(tl.load(seeds + of), tl.load(positions + of) + ahead, token)
            x = tl.where(inside, x, float("-inf"))
    if CUT:
        low, high = tl.load(cutoffs + row), tl.load(cutoffs + tl.num_programs(0) + row)
        x = tl.where((raw < low) | (raw > high), float("-inf"), x)
    broken = tl.max((raw != raw).to(tl.int32), 0)
    best = tl.max(tl.where(x == x, x, float("-inf")), 0)
    first = tl.min(tl.where(x == best, token, 2147483647), 0)
    tl.store(values + row * PARTS + part, tl.where(broken > 0, float("nan"), best))
    tl.store(tokens + row * PARTS + part, first)


@triton.jit
def _best_of_parts(values, tokens, out, MISSING: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """One row's token: the best of all parts, the lowest id among equals."""
    row = tl.program_id(0)
    part = tl.arange(0, BLOCK)
    value = tl.load(values + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    token = tl.load(tokens + row * PARTS + part, mask=part < PARTS, other=0)
    broken = tl.max((value != value).to(tl.int32), 0)
    best = tl.max(tl.where(value == value, value, float("-inf")), 0)
    first = tl.min(tl.where(value == best, token, 2147483647), 0)
    fine = (broken == 0) & (best > float("-inf")) & (best < float("inf"))
    tl.store(out + row, tl.where(fine, first, MISSING).to(tl.int64))


def sample_tokens(
    logits: Tensor,
    temperatures: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    cut: Tensor | None = None,
    ids: Tensor | None = None,
) -> Tensor:
    """Each row's token, int64 [R]; NO_TOKEN where there is none. logits [R, vocab], rows contiguous.

    temperatures float64 [R]; seeds and positions int64 [R]; without them every row takes its best token. cut float32
    [2, R]: logits below the first or above the second are excluded. ids int64 [columns]: the token of each column, in
    any order, where logits [R, columns] cover part of the vocabulary; a token's noise does not depend on its column.
    """
    sampled = temperatures is not None
    noise = (temperatures, seeds, positions) if sampled else (logits, logits, logits)
    return _sample(logits, noise, None, cut, ids, sampled=sampled)


def sample_rows(logits: Tensor, temperatures: Tensor, seeds: Tensor, batch: AttentionBatch, out: Tensor) -> None:
    """The token after each of a pass's N rows, as `sample_tokens`, to out int64 [N]; arbitrary for padding rows.

    logits [N, vocab]; temperatures float64 [B] and seeds int64 [B]: of the batch's sequences.
    """
    _sample(logits, (temperatures, seeds, batch.starts), batch, None, None, sampled=True, out=out)


def _sample(
    logits: Tensor,
    noise: tuple[Tensor | None, ...],
    batch: AttentionBatch | None,
    cut: Tensor | None,
    ids: Tensor | None,
    *,
    sampled: bool,
    out: Tensor | None = None,
) -> Tensor:
    rows, columns = logits.shape
    parts = triton.cdiv(columns, SAMPLE_BLOCK)
    values = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    places = (tokens, tokens, 1) if batch is None else (batch.packing.row_index, batch.depths, batch.width)
    _best_of_part[(rows, parts)](
        logits, *noise, *places[:2], values if cut is None else cut, tokens if ids is None else ids, values, tokens,
        columns, logits.stride(0), places[2], parts, sampled, batch is not None, cut is not None, ids is not None,
        SAMPLE_BLOCK, num_warps=8,
    )  # fmt: skip
    _best_of_parts[(rows,)](values, tokens, out, NO_TOKEN, parts, triton.next_power_of_2(parts), num_warps=1)
    return out
