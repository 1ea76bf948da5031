"""From the logits of blocks to chains of draft tokens, in Triton: one kernel a level.

`_best_of_level` adds the Markov head's part for the token before; each program finds the best column of its part of the
vocabulary, and the best of all is found by an atomic maximum of keys. A key holds a column's noisy logit in its upper
half, as an integer of the same order, and in its lower half a number that is larger for lower columns, which win among
equals. The next level reads the token before from the key. `_finish_chains` writes the tokens and the chances that they
are accepted.

With programmatic dependent launch a kernel may begin before the one before it has ended, so that it reads and writes
data of other kernels only after its wait. By then all earlier kernels have ended too: every program waits before it
ends, so that no kernel ends before the one it waits for. Keys are therefore read after `_add_noise` has reset them,
whichever kernels are between, and no late maximum follows a reset.

verify/block_sampling.py is the plain reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton_block import ROWS, add_noise, chunk_size, load_markov, score_columns


@triton.jit
def _keys_of(x, v):
    """int64, shaped as x: the keys of the numbers x, none of them NaN, in columns v."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0, which it equals
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (v ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _token_of(key, ids, live, NAMED: tl.constexpr):
    column = (key & 0x7FFFFFFF) ^ 0x7FFFFFFF
    return tl.load(ids + column, mask=live, other=0) if NAMED else column


@triton.jit(do_not_specialize=["n", "level"], do_not_specialize_on_alignment=["last", "temperatures", "ids", "keys"])
def _best_of_level(
    noisy, w1, w2, last, temperatures, ids, keys, n, level,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, NAMED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """At one level, for up to ROWS of n sequences: raise each key to the best one of a part of the vocabulary."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = b < n
    weight = v
    if (RANK > 0) & (RANK <= CHUNK):  # weights do not depend on the kernel before
        weight = load_markov(w2, v, tl.arange(0, CHUNK), COLUMNS, RANK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = (b * LEVELS + level).to(tl.int64)
    token = b.to(tl.int64)
    temperature = tl.load(temperatures + b, mask=live, other=1.0)
    x = tl.load(
        noisy + row[None, :] * COLUMNS + v[:, None], mask=(v < COLUMNS)[:, None] & live[None, :], other=0.0
    )  # fmt: skip
    if RANK > 0:
        if level > 0:
            token = _token_of(tl.load(keys + row - 1, mask=live, other=0), ids, live, NAMED)
        else:
            token = tl.load(last + b, mask=live, other=0)
    x = score_columns(x, w1, w2, weight, token, temperature, v, live, COLUMNS, RANK, CHUNK, BLOCK, ROWS)
    tl.atomic_max(keys + row, tl.max(_keys_of(x, v[:, None]), 0), mask=live, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["keys", "ids", "last", "tokens", "chances"])
def _finish_chains(
    keys, ids, last, hidden, weight, bias, w1, tokens, chances, stride,
    LEVELS: tl.constexpr, NAMED: tl.constexpr, HIDDEN: tl.constexpr, WIDE: tl.constexpr, RANK: tl.constexpr,
    RANKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token of one chain; HIDDEN > 0: and its chance of acceptance; RANK > 0: given the token before it, too."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, WIDE)
    r = tl.arange(0, RANKS)
    if HIDDEN > 0:
        inner = tl.load(weight + i, mask=i < HIDDEN, other=0.0).to(tl.float32)
        ahead = tl.load(weight + HIDDEN + r, mask=r < RANK, other=0.0).to(tl.float32)
        shift = tl.load(bias).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    b = row // LEVELS
    level = row % LEVELS
    tl.store(tokens + row, _token_of(tl.load(keys + row), ids, True, NAMED))
    if HIDDEN > 0:
        x = tl.load(hidden + b * stride + level * HIDDEN + i, mask=i < HIDDEN, other=0.0).to(tl.float32)
        total = tl.sum(x * inner, 0) + shift
        if RANK > 0:
            before = _token_of(tl.load(keys + row - 1), ids, True, NAMED) if level > 0 else tl.load(last + b)
            total += tl.sum(tl.load(w1 + before * RANK + r, mask=r < RANK, other=0.0).to(tl.float32) * ahead, 0)
        tl.store(chances + row, tl.sigmoid(total))


def chain_block(columns: int) -> int:
    """Columns of one part: few enough that the parts fill the GPU."""
    return min(max(triton.next_power_of_2(triton.cdiv(columns, 128)), 64), 512)


def draft_chains(
    rows: Tensor,
    last: Tensor,
    lengths: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    tokens: Tensor | None,
    markov: tuple[Tensor, Tensor] | None,
    *,
    confidence: tuple[Tensor, Tensor, Tensor] | None = None,
    out: tuple[Tensor, Tensor | None] | None = None,
    pdl: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Draft tokens int64 [B, K] and, where `confidence` is given, the chance that each is accepted, float32 [B, K].

    The arguments before `confidence` are the fields of a `BlockLogits`, whose rows float32 [B, K, V] are overwritten.
    confidence: the fields of a `ConfidenceLayer`. out: where to write; None: to new tensors.
    """
    rows, (batch, levels, columns), device = rows.contiguous(), rows.shape, rows.device
    block, rank = chain_block(columns), 0 if markov is None else markov[1].shape[1]
    chunk = chunk_size(rank, block)
    w1, w2 = (rows, rows) if markov is None else markov
    ids, named = (last, False) if tokens is None else (tokens, True)
    keys = torch.empty(batch, levels, dtype=torch.int64, device=device)
    made, chances = out or (torch.empty_like(keys), None if confidence is None else torch.empty_like(rows[..., 0]))
    add_noise(rows, lengths, seeds, temperatures, tokens, keys, pdl=pdl)
    for level in range(levels):
        _best_of_level[(triton.cdiv(columns, block), triton.cdiv(batch, ROWS))](
            rows, w1, w2, last, temperatures, ids, keys, batch, level,
            columns, levels, rank, chunk, named, block, ROWS, pdl,
            num_warps=4 if block * chunk < 1 << 14 else 8, num_stages=2, launch_pdl=pdl,
        )  # fmt: skip
    hidden, weight, bias = (rows, rows, rows) if confidence is None else confidence
    width = 0 if confidence is None else hidden.shape[2]
    read = rank if confidence is not None and len(weight) > width else 0
    _finish_chains[(batch * levels,)](
        keys, ids, last, hidden, weight, bias, w1, made, made if chances is None else chances, hidden.stride(0),
        levels, named, width, triton.next_power_of_2(max(1, width)), read, triton.next_power_of_2(max(1, read)), pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return made, chances
