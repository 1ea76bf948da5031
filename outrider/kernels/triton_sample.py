"""A token for each row, in Triton: the best of logits / T + noise over the vocabulary.

The noise is that of verify/noise.py, in the same integer arithmetic and in float64; a row of
temperature 0 takes the best logit. Each program takes a part of the vocabulary; the parts' best
are compared afterwards, the lowest id first among equals.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _best_of_part(
    logits, temperatures, seeds, positions, values, tokens, vocab, stride, PARTS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The best noisy value of one part of one row, and its token."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + row.to(tl.int64) * stride + token, mask=inside, other=float("-inf")).to(tl.float64)
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
    best = tl.max(x, 0)
    first = tl.min(tl.where(x == best, token, vocab), 0)
    tl.store(values + row * PARTS + part, best)
    tl.store(tokens + row * PARTS + part, first.to(tl.int64))


def choose(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[R]: each row's token. logits [R, vocab]; temperatures float64 [R]; seeds and positions int64 [R]."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    values = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    _best_of_part[(rows, parts)](
        logits, temperatures, seeds, positions, values, tokens, vocab, logits.stride(0), parts, BLOCK, num_warps=8
    )
    return tokens.gather(1, values.argmax(1, keepdim=True))[:, 0].clamp_(max=vocab - 1)
