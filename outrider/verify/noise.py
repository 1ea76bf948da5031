"""Counter-based noise: a pure function of (seed, position, stream, token id). No state, no order.

The definition, in unsigned 64-bit integers that wrap:

    mix(x)    x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
    key       mix(mix(mix(seed + G) + position * G) + stream * G),   G = 0x9E3779B97F4A7C15
    bits      mix(key + token * G)
    v         ((bits >> 12) + 0.5) * 2**-52          strictly between 0 and 1, exact in float64
    gumbel    -log(-log1p(-v))                       always finite: between -3.7 and 36.8

A token's noise does not depend on how many tokens there are, on the batch or on the device.
Large Gumbels come from v near 0, so a kernel that keeps v in float32 loses no precision where it
matters. In float64, 1 - v is exact too and log(1 - v) is log1p(-v) at a third of the cost.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache

import torch
from torch import Tensor

TARGET = 0  # the target's own choice at a position (mode `seeded`)
ROUND = 1  # the seed of one round (mode `distribution`)
ACCEPT = 2  # whether draft tokens are accepted
RESIDUAL = 3  # the token drawn at the end of a round
DRAFT = 4  # the tokens a draft model draws

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MANTISSA = (1 << 52) - 1
_EXPONENT_OF_1 = 0x3FF << 52
_CACHE_ELEMENTS = 1 << 17  # on a CPU, work in pieces of 1 MiB so that every pass stays in the cache


def gumbel(
    seed: int, position: int, vocab: int, *, stream: int = TARGET, device: torch.device | str | None = None
) -> Tensor:
    """The standard Gumbel noise of every token at one position: float64 [vocab]."""
    return gumbel_rows((seed,), (position,), vocab, stream=stream, device=device)[0]


def gumbel_rows(
    seeds: Seq[int],
    positions: Seq[int],
    vocab: int,
    *,
    stream: int = TARGET,
    device: torch.device | str | None = None,
) -> Tensor:
    """One row of `gumbel` for each seed and position: float64 [R, vocab]."""
    keys = [_signed(_key(s, p, stream)) for s, p in zip(seeds, positions, strict=True)]
    column = torch.tensor(keys, dtype=torch.int64, device=device)[:, None]  # [R, 1]
    ramp = _ramp(vocab, str(column.device))  # [vocab]
    rows = rows_at_once(vocab, column.device)
    out = torch.empty(len(keys), vocab, dtype=torch.float64, device=column.device)
    for start in range(0, len(keys), rows):
        piece = out[start : start + rows]
        _one_minus_v(piece, torch.add(ramp, column[start : start + rows], out=piece.view(torch.int64)))
        piece.log_().neg_().log_().neg_()
    return out


def uniform(seed: int, position: int, *, stream: int) -> float:
    """One number strictly between 0 and 1: the v of token 0."""
    return ((_mix(_key(seed, position, stream)) >> 12) + 0.5) * 2.0**-52


def round_seed(seed: int, length: int) -> int:
    """The seed of the round that starts with `length` tokens of text.

    The rules of mode `distribution` use noise for positions that they then do not commit (all of
    a rejected block), and whether they commit depends on that noise. A later round with the same
    noise at the same position would not draw from the target's distribution, so each round has
    its own.
    """
    return _key(seed, length, ROUND)


def rows_at_once(vocab: int, device: torch.device) -> int:
    """How many rows of float64 noise to compute at a time: as many as fit the CPU cache; 64 times that on a GPU."""
    return max(1, (_CACHE_ELEMENTS if device.type == "cpu" else _CACHE_ELEMENTS << 6) // vocab)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def _key(seed: int, position: int, stream: int) -> int:
    key = _mix((seed + _GOLDEN) & _MASK)
    key = _mix((key + position * _GOLDEN) & _MASK)
    return _mix((key + stream * _GOLDEN) & _MASK)


def _signed(x: int) -> int:
    """The same 64 bits as a signed integer, for torch's int64."""
    return x - (1 << 64) if x >> 63 else x


@lru_cache(maxsize=8)
def _ramp(vocab: int, device: str) -> Tensor:
    """token * G for every token: int64 [vocab]."""
    return torch.arange(vocab, dtype=torch.int64, device=device) * _signed(_GOLDEN)


def _one_minus_v(out: Tensor, x: Tensor) -> None:
    """Fill out, float64 [..., vocab], with 1 - v; x is the same memory as int64, holding key + token * G."""
    scratch = torch.empty_like(x)
    _xor_shift(x, 30, scratch)
    x.mul_(_signed(_MIX1))
    _xor_shift(x, 27, scratch)
    x.mul_(_signed(_MIX2))
    _xor_shift(x, 31, scratch)
    # n = bits >> 12 is v's mantissa and its complement that of 1 - v: with the exponent of 1.0
    # its value is 2 - v - 2**-53, so that one exact subtraction is left
    x.bitwise_right_shift_(12).bitwise_and_(_MANTISSA).bitwise_xor_(_MANTISSA | _EXPONENT_OF_1)
    out.sub_(1 - 2.0**-53)


def _xor_shift(x: Tensor, by: int, scratch: Tensor) -> None:
    """x ^= x >> by, in place; torch shifts in copies of the sign bit, which the mask removes."""
    torch.bitwise_right_shift(x, by, out=scratch)
    x.bitwise_xor_(scratch.bitwise_and_((1 << (64 - by)) - 1))


def keys_at(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """The noise keys of (seed, position) pairs that only the device knows: int64 [R], from int64 [R] each."""
    key = _mix_tensor(seeds + _signed(_GOLDEN))
    key = _mix_tensor(key + positions * _signed(_GOLDEN))
    return _mix_tensor(key + _signed((stream * _GOLDEN) & _MASK))


def gumbel_at(
    seeds: Tensor, positions: Tensor, vocab: int, *, stream: int = TARGET, tokens: Tensor | None = None
) -> Tensor:
    """As `gumbel_rows`, for seeds and positions int64 [R] on any device: float64 [R, vocab].

    tokens int64 [vocab]: the token of each column, where columns are not the tokens 0, 1, ...
    """
    out = torch.empty(len(seeds), vocab, dtype=torch.float64, device=seeds.device)
    keys = keys_at(seeds, positions, stream)[:, None]
    ramp = _ramp(vocab, str(seeds.device)) if tokens is None else tokens * _signed(_GOLDEN)
    _one_minus_v(out, torch.add(ramp, keys, out=out.view(torch.int64)))
    return out.log_().neg_().log_().neg_()


def _mix_tensor(x: Tensor) -> Tensor:
    """`_mix` of each number of int64 [R], taken as 64 unsigned bits."""
    scratch = torch.empty_like(x)
    for shift, factor in ((30, _MIX1), (27, _MIX2), (31, 1)):
        x = x.clone()
        _xor_shift(x, shift, scratch)
        x = x * _signed(factor)
    return x
