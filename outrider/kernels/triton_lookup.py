"""Where the end of a text occurred before, in Triton: the functions of lookup.py.

`find` splits the places between programs, a chunk each; the best key of all is an atomic maximum. Hardly any place
matches more than a token or two: a program stops comparing where no place of its chunk matches any longer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import MAX_WIDTH
from outrider.kernels.lookup import AIM, BUDGET, END, LIMITS, OWNER, PUBLIC, SHIFT, SLOT, Found, History

CHUNK = 1024
_SLOT, _SHIFT, _END, _AIM = tl.constexpr(SLOT), tl.constexpr(SHIFT), tl.constexpr(END), tl.constexpr(AIM)
_OWNER, _BUDGET, _LIMITS = tl.constexpr(OWNER), tl.constexpr(BUDGET), tl.constexpr(LIMITS)
_PUBLIC = tl.constexpr(PUBLIC)
_DISTANCE_BITS = tl.constexpr(33)
_MAX_DISTANCE = tl.constexpr((1 << 32) - 1)


@triton.jit(
    do_not_specialize=["columns", "inputs", "width"],
    do_not_specialize_on_alignment=["texts", "rows", "lengths", "last", "tokens", "accepted"],
)
def _append(texts, rows, lengths, last, tokens, accepted, columns, inputs, width, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    row = rows + b * inputs
    count = tl.load(accepted + b)
    first = tl.load(lengths + b) + tl.load(row + _SHIFT) - 1 - count
    text = texts + tl.load(row + _SLOT) * columns + first
    w = tl.arange(0, WIDTH)
    token = tl.load(tokens + b * width + w + 1, mask=w < count, other=0)
    token = tl.where(w == count, tl.load(last + 2 * b + 1), token)
    tl.store(text + w, token.to(tl.int32), mask=w <= count)


@triton.jit(
    do_not_specialize=["columns", "inputs", "head", "size", "first", "max_match"],
    do_not_specialize_on_alignment=["texts", "ring", "owners", "rows", "lengths", "keys"],
)
def _find(
    texts, ring, owners, rows, lengths, keys, columns, inputs, head, size, first, max_match,
    RING: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best place of one chunk: of the text's own row, or of the ring from its `first` oldest token on."""
    b = tl.program_id(0)
    row = rows + b * inputs
    text = texts + tl.load(row + _SLOT) * columns
    end = (tl.load(lengths + b) + tl.load(row + _SHIFT)).to(tl.int32)
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    if RING:
        place += first
        stop, target, low, source = size, size, first, ring
    else:
        own_stop = tl.load(row + _END).to(tl.int32)
        stop, target, low = tl.where(own_stop < 0, end, own_stop), end - tl.load(row + _AIM).to(tl.int32), 0
        source = text
    alive = (place < stop) & (place > low)
    match = tl.zeros((CHUNK,), dtype=tl.int32)
    j = 0
    more = tl.where(end > 0, tl.max(alive.to(tl.int32), 0), 0)
    while more > 0:
        want = tl.load(text + end - 1 - j)
        at = place - 1 - j
        alive = alive & (at >= low)
        if RING:
            at = tl.where(at + head >= size, at + head - size, at + head)
        alive = alive & (tl.load(source + at, mask=alive, other=-2) == want)
        match += alive.to(tl.int32)
        j += 1
        more = tl.where((j < max_match) & (j < end), tl.max(alive.to(tl.int32), 0), 0)
    if RING:
        at = tl.where(place + head >= size, place + head - size, place + head)
        owner = tl.load(owners + at, mask=match > 0, other=-1)
        match = tl.where((owner == tl.load(row + _OWNER).to(tl.int32)) | (owner == _PUBLIC), match, 0)
    offset = place - target
    near = ((-tl.abs(offset).to(tl.int64) + _MAX_DISTANCE) << 1) | (offset > 0).to(tl.int64)
    key = (match.to(tl.int64) << (_DISTANCE_BITS + 1)) | near
    if not RING:
        key |= tl.full((CHUNK,), 1, dtype=tl.int64) << _DISTANCE_BITS
    best = tl.max(tl.where(match > 0, key, 0), 0)
    if best > 0:
        tl.atomic_max(keys + b, best)


@triton.jit(
    do_not_specialize=["columns", "inputs", "head", "size", "k"],
    do_not_specialize_on_alignment=["texts", "ring", "rows", "lengths", "keys", "out"],
)
def _draft(texts, ring, rows, lengths, keys, out, columns, inputs, head, size, k, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    row, out = rows + b * inputs, out + b * (2 * k + 4)
    end = (tl.load(lengths + b) + tl.load(row + _SHIFT)).to(tl.int32)
    key = tl.load(keys + b)
    match, own = key >> (_DISTANCE_BITS + 1), (key >> _DISTANCE_BITS) & 1
    low = key & ((tl.full((), 1, dtype=tl.int64) << _DISTANCE_BITS) - 1)
    distance = (-(low >> 1) + _MAX_DISTANCE).to(tl.int32)
    offset = tl.where((low & 1) == 1, distance, -distance)
    step = tl.arange(0, WIDTH)
    from_text = tl.where((match > 0) & (own == 1), k, 0)  # how many tokens are read from where
    from_ring = tl.where((match > 0) & (own == 0), k, 0)
    place = end - tl.load(row + _AIM).to(tl.int32) + offset
    period = tl.where(tl.load(row + _END) < 0, tl.maximum(end - place, 1), k)
    text = texts + tl.load(row + _SLOT) * columns
    token = tl.load(text + place + step % period, mask=step < from_text, other=-1)
    age = size + offset + step
    at = tl.where(age + head >= size, age + head - size, age + head)
    token = tl.maximum(token, tl.load(ring + at, mask=(step < from_ring) & (age < size), other=-1))
    count = tl.min(tl.where(token < 0, step, WIDTH), 0)
    count = tl.minimum(count, k)
    token = tl.where(step < count, token, -1).to(tl.int64)
    limit = tl.load(row + _LIMITS + (1 - own) * ((inputs - _LIMITS) // 2) + match)
    wanted = tl.minimum(limit, count.to(tl.int64))
    tl.store(out + k + step, token, mask=step < k)
    tl.store(out + step, tl.where(step < tl.load(row + _BUDGET), tl.where(step < wanted, token, -1), -1), mask=step < k)
    tl.store(out + 2 * k, match)
    tl.store(out + 2 * k + 1, own)
    tl.store(out + 2 * k + 2, wanted)
    tl.store(out + 2 * k + 3, tl.where(match > 0, tl.where(own == 1, end - place, -offset), 0).to(tl.int64))


def append(texts: Tensor, rows: Tensor, lengths: Tensor, last: Tensor, tokens: Tensor, accepted: Tensor) -> None:
    """As the plain `append`; all contiguous."""
    sizes = texts.shape[1], rows.shape[1], tokens.shape[1]
    _append[(len(rows),)](texts, rows, lengths, last, tokens, accepted, *sizes, WIDTH=MAX_WIDTH, num_warps=1)


def find(texts: Tensor, history: History, rows: Tensor, lengths: Tensor, max_match: int, columns: int = 0) -> Tensor:
    """As the plain `find`; all contiguous."""
    keys = torch.zeros(len(rows), dtype=torch.int64, device=texts.device)
    ring, owners, head, used = history
    size = len(ring)
    for is_ring, first, count in ((False, 0, columns or texts.shape[1]), (True, size - used, used)):
        if count:
            _find[len(rows), triton.cdiv(count, CHUNK)](
                texts, ring, owners, rows, lengths, keys, texts.shape[1], rows.shape[1], head, size, first, max_match,
                RING=is_ring, CHUNK=CHUNK,
            )  # fmt: skip
    return keys


def draft(texts: Tensor, history: History, rows: Tensor, lengths: Tensor, keys: Tensor, k: int) -> Tensor:
    """As the plain `draft`; all contiguous, k below MAX_WIDTH."""
    if k >= MAX_WIDTH:
        raise ValueError(f"drafts of at most {MAX_WIDTH - 1} tokens, got {k}")
    out = torch.empty(len(rows), Found.of(k).distance + 1, dtype=torch.int64, device=texts.device)
    _draft[(len(rows),)](
        texts, history.tokens, rows, lengths, keys, out, texts.shape[1], rows.shape[1], history.head,
        len(history.tokens), k, WIDTH=MAX_WIDTH, num_warps=1,
    )  # fmt: skip
    return out
