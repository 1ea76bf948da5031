"""Find where the end of a text occurred before, in Triton: lookup.py's `look_up`, in launches that can be captured.

Everything that changes from one lookup to the next, addresses included, is read from device memory: `write_header` says
where texts and gains are, so that neither is copied for a captured lookup, and texts may move to a larger tensor.

`_find` splits the places between programs, chunk by chunk; the best key of all is an atomic maximum. Hardly any place
matches more than a token or two: a program stops comparing where no place of its chunk matches any longer.
"""

from __future__ import annotations

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import MAX_WIDTH
from outrider.kernels.lookup import (
    AIM,
    BUDGET,
    CHANCE_SHIFT,
    END,
    GAIN,
    LENGTH,
    LIMITS,
    MAX_TOKENS,
    OWNER,
    PUBLIC,
    SHIFT,
    SLOT,
    Gains,
    History,
)

CHUNK = 1024
MIN_PROGRAMS, MAX_PROGRAMS = 4, 64
"""Programs that the places of one sequence are split between."""
ALL_PROGRAMS = 2048
"""Max programs of all sequences, about what a device runs at a time."""
HEADER = 10
"""int64 fields before the rows of a lookup, see `write_header`; an even number, so that rows are aligned."""
_TEXTS, _COLUMNS, _HEAD, _USED, _LENGTHS, _LAST, _TOKENS, _ACCEPTED, _WIDTH = (tl.constexpr(i) for i in range(9))
_SLOT, _SHIFT, _END, _AIM = tl.constexpr(SLOT), tl.constexpr(SHIFT), tl.constexpr(END), tl.constexpr(AIM)
_OWNER, _BUDGET, _LIMITS = tl.constexpr(OWNER), tl.constexpr(BUDGET), tl.constexpr(LIMITS)
_LENGTH, _GAIN, _PUBLIC = tl.constexpr(LENGTH), tl.constexpr(GAIN), tl.constexpr(PUBLIC)
_MAX_TOKENS, _CHANCE_SHIFT = tl.constexpr(MAX_TOKENS), tl.constexpr(CHANCE_SHIFT)
_DISTANCE_BITS = tl.constexpr(33)
_MAX_DISTANCE = tl.constexpr((1 << 32) - 1)


@triton.jit
def _text_of(header, row):
    """The address of a sequence's text."""
    texts = tl.load(header + _TEXTS).to(tl.pointer_type(tl.int32))
    return texts + tl.load(row + _SLOT) * tl.load(header + _COLUMNS)


@triton.jit(do_not_specialize=["inputs"])
def _append(header, rows, ends, keys, inputs, WIDTH: tl.constexpr):
    """Append a text's gained tokens to it, store where it ends now, and reset its key to no match."""
    b = tl.program_id(0)
    row = rows + b * inputs
    shift = tl.load(row + _SHIFT)
    end = tl.load(row + _LENGTH) + shift
    gain = tl.load(row + _GAIN) - 1
    if gain >= 0:
        count = tl.load(tl.load(header + _ACCEPTED).to(tl.pointer_type(tl.int64)) + gain)
        end = tl.load(tl.load(header + _LENGTHS).to(tl.pointer_type(tl.int64)) + gain) + shift
        last = tl.load(tl.load(header + _LAST).to(tl.pointer_type(tl.int64)) + 2 * gain + 1)
        tokens = tl.load(header + _TOKENS).to(tl.pointer_type(tl.int64)) + gain * tl.load(header + _WIDTH)
        w = tl.arange(0, WIDTH)
        token = tl.where(w == count, last, tl.load(tokens + w + 1, mask=w < count, other=0))
        tl.store(_text_of(header, row) + end - 1 - count + w, token.to(tl.int32), mask=w <= count)
    tl.store(ends + b, end)
    tl.store(keys + b, tl.zeros((), dtype=tl.int64))


@triton.jit(do_not_specialize=["inputs", "size", "max_match"])
def _find(
    header, rows, ring, owners, ends, keys, inputs, size, max_match, RING: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Find the best place in some chunks of the text's own row, or of the ring, counted from its oldest token."""
    b = tl.program_id(0)
    row = rows + b * inputs
    text = _text_of(header, row)
    end = tl.load(ends + b).to(tl.int32)
    if RING:
        head = tl.load(header + _HEAD).to(tl.int32)
        low = size - tl.load(header + _USED).to(tl.int32)
        stop, target, source = size, size, ring
        owner_wanted = tl.load(row + _OWNER).to(tl.int32)
    else:
        own_stop = tl.load(row + _END).to(tl.int32)
        stop, target, low = tl.where(own_stop < 0, end, own_stop), end - tl.load(row + _AIM).to(tl.int32), 0
        source = text
    stop = tl.where(end > 0, stop, 0)
    first = low + tl.program_id(1) * CHUNK
    best = tl.zeros((), dtype=tl.int64)
    while first < stop:
        place = first + tl.arange(0, CHUNK)
        alive = (place < stop) & (place > low)
        match = tl.zeros((CHUNK,), dtype=tl.int32)
        j = 0
        more = tl.max(alive.to(tl.int32), 0)
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
            match = tl.where((owner == owner_wanted) | (owner == _PUBLIC), match, 0)
        offset = place - target
        near = ((-tl.abs(offset).to(tl.int64) + _MAX_DISTANCE) << 1) | (offset > 0).to(tl.int64)
        key = (match.to(tl.int64) << (_DISTANCE_BITS + 1)) | near
        if not RING:
            key |= tl.full((CHUNK,), 1, dtype=tl.int64) << _DISTANCE_BITS
        best = tl.maximum(best, tl.max(tl.where(match > 0, key, 0), 0))
        first += tl.num_programs(1) * CHUNK
    if best > 0:
        tl.atomic_max(keys + b, best)


@triton.jit(do_not_specialize=["inputs", "size", "k"])
def _draft(header, rows, ring, ends, keys, out, inputs, size, k, WIDTH: tl.constexpr):
    b = tl.program_id(0)
    row, out = rows + b * inputs, out + b * (2 * k + 5)
    end, head = tl.load(ends + b).to(tl.int32), tl.load(header + _HEAD).to(tl.int32)
    key = tl.load(keys + b)
    match, own = key >> (_DISTANCE_BITS + 1), (key >> _DISTANCE_BITS) & 1
    low = key & ((tl.full((), 1, dtype=tl.int64) << _DISTANCE_BITS) - 1)
    distance = (-(low >> 1) + _MAX_DISTANCE).to(tl.int32)
    offset = tl.where((low & 1) == 1, distance, -distance)
    step = tl.arange(0, WIDTH)
    from_text = tl.where((match > 0) & (own == 1), k, 0)  # tokens read from the text, and from the ring
    from_ring = tl.where((match > 0) & (own == 0), k, 0)
    place = end - tl.load(row + _AIM).to(tl.int32) + offset
    period = tl.where(tl.load(row + _END) < 0, tl.maximum(end - place, 1), k)
    token = tl.load(_text_of(header, row) + place + step % period, mask=step < from_text, other=-1)
    age = size + offset + step
    at = tl.where(age + head >= size, age + head - size, age + head)
    token = tl.maximum(token, tl.load(ring + at, mask=(step < from_ring) & (age < size), other=-1))
    count = tl.min(tl.where(token < 0, step, WIDTH), 0)
    count = tl.minimum(count, k)
    token = tl.where(step < count, token, -1).to(tl.int64)
    limit = tl.load(row + _LIMITS + (1 - own) * ((inputs - _LIMITS) // 2) + match)
    wanted = tl.minimum(limit & _MAX_TOKENS, count.to(tl.int64))
    tl.store(out + k + step, token, mask=step < k)
    tl.store(out + step, tl.where(step < tl.load(row + _BUDGET), tl.where(step < wanted, token, -1), -1), mask=step < k)
    tl.store(out + 2 * k, match)
    tl.store(out + 2 * k + 1, own)
    tl.store(out + 2 * k + 2, wanted)
    tl.store(out + 2 * k + 3, tl.where(match > 0, tl.where(own == 1, end - place, -offset), 0).to(tl.int64))
    tl.store(out + 2 * k + 4, tl.where(match > 0, limit >> _CHANCE_SHIFT, 0))


def write_header(header: np.ndarray, texts: Tensor, history: History, gains: Gains | None) -> None:
    """Write into int64 [HEADER] the addresses of texts and gains, and which part of the ring is in use.

    The tensors must not be freed before the lookup is launched.
    """
    header[:4] = texts.data_ptr(), texts.shape[1], history.head, history.used
    if gains is not None:
        header[4:9] = *(part.data_ptr() for part in gains), gains.tokens.shape[1]


def look_up(
    header: Tensor, rows: Tensor, history: History, ends: Tensor, keys: Tensor, out: Tensor, max_match: int, k: int
) -> None:
    """As the plain `look_up`, to out [B, 2 * k + 5]; k below MAX_WIDTH, all contiguous.

    header int64 [HEADER]: see `write_header`; only the tensors of `history` are used, its numbers are read from the
    header. ends, keys int64 [B]: scratch space that the launches share.
    """
    if k >= MAX_WIDTH:
        raise ValueError(f"drafts of at most {MAX_WIDTH - 1} tokens, got {k}")
    (batch, inputs), size = rows.shape, len(history.tokens)
    _append[(batch,)](header, rows, ends, keys, inputs, WIDTH=MAX_WIDTH, num_warps=1)
    programs = max(MIN_PROGRAMS, min(MAX_PROGRAMS, ALL_PROGRAMS // batch))
    for is_ring in (False, True) if size else (False,):
        _find[batch, programs](
            header, rows, history.tokens, history.owners, ends, keys, inputs, size, max_match,
            RING=is_ring, CHUNK=CHUNK,
        )  # fmt: skip
    _draft[(batch,)](header, rows, history.tokens, ends, keys, out, inputs, size, k, WIDTH=MAX_WIDTH, num_warps=1)
