"""From the logits of blocks to trees of draft tokens, in Triton: two kernels a level. Chains: triton_chain.py.

`_add_noise` adds the target's noise to the rows of texts that sample. Then, level by level, `_best_columns` adds the
Markov head's part for every node of the level before and finds the best columns of each part of the vocabulary;
`_best_nodes` picks the level's nodes among those of all parts. `_rank_nodes` orders the nodes of a tree.

verify/block_sampling.py is the plain reference and defines a node's score.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.triton_sample import SAMPLE_BLOCK, gumbel_noise

ROWS = 16
"""Nodes of one program."""
MAX_TILE = 1 << 15
"""Weights that one program holds at a time: two such tiles fit the shared memory."""
MIN_LOG_PROB = -100.0
STEP = 1e-3
"""Both as in verify/block_sampling.py."""
_FLOOR = tl.constexpr(-1e30)  # replaces NaN and lower logits; a column beyond the last has -inf
_NONE = tl.constexpr(2147483647)
LOWEST_KEY = tl.constexpr(-(1 << 63))
"""Below the key of every column, see triton_chain.py."""


@triton.jit(do_not_specialize_on_alignment=["temperatures", "seeds", "lengths", "ids", "keys"])
def _add_noise(
    rows, temperatures, seeds, lengths, ids, keys, columns, levels: tl.constexpr,
    NAMED: tl.constexpr, KEYED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One part of one row [columns], in place: times 1 / T, plus noise; unchanged if T is 0. KEYED: resets its key."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    b = row // levels
    if KEYED:
        tl.store(keys + row, tl.full((), LOWEST_KEY, dtype=tl.int64), mask=tl.program_id(1) == 0)
    temperature = tl.load(temperatures + b)
    if temperature > 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        token = column
        if NAMED:
            token = tl.load(ids + column, mask=inside, other=0).to(tl.int32)
        at = rows + row.to(tl.int64) * columns + column
        noise = gumbel_noise(tl.load(seeds + b), tl.load(lengths + b) + row % levels, token)
        x = tl.load(at, mask=inside, other=0.0).to(tl.float64) / temperature + noise
        tl.store(at, x.to(tl.float32), mask=inside)


@triton.jit
def load_markov(w2, v, i, COLUMNS: tl.constexpr, RANK: tl.constexpr):
    """The Markov head's output weights of columns v and inputs i: [columns, inputs]"""
    inside = (v < COLUMNS)[:, None] & (i < RANK)[None, :]
    return tl.load(w2 + v[:, None].to(tl.int64) * RANK + i[None, :], mask=inside, other=0.0)


@triton.jit
def score_columns(
    x, w1, w2, first, token, temperature, v, live,
    COLUMNS: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Noisy logits x of columns v for nodes that follow these tokens, with the Markov head's part: [columns, nodes].

    first: `load_markov` of all inputs where they are at most CHUNK. Columns and nodes that do not exist have -inf.
    """
    if RANK > 0:
        i = tl.arange(0, CHUNK)
        rows = w1 + token[None, :] * RANK + i[:, None]
        if RANK <= CHUNK:
            row = tl.load(rows, mask=live[None, :] & (i < RANK)[:, None], other=0.0)
            bias = tl.dot(first, row, input_precision="ieee")
        else:
            bias = tl.zeros((BLOCK, ROWS), dtype=tl.float32)
            for k in range(0, RANK, CHUNK):
                weight = load_markov(w2, v, k + i, COLUMNS, RANK)
                row = tl.load(rows + k, mask=live[None, :] & (k + i < RANK)[:, None], other=0.0)
                bias = tl.dot(weight, row, bias, input_precision="ieee")
        scale = tl.where(temperature > 0, 1.0 / tl.where(temperature > 0, temperature, 1.0), 1.0).to(tl.float32)
        x += bias * scale[None, :]
    inside = (v < COLUMNS)[:, None] & live[None, :]
    return tl.where(inside, tl.where(x > _FLOOR, x, _FLOOR), float("-inf"))


@triton.jit(
    do_not_specialize=["n", "frontier", "before_stride", "level", "parts"],
    do_not_specialize_on_alignment=["before", "temperatures", "values", "peaks", "sums"],
)
def _best_columns(
    noisy, w1, w2, before, temperatures, values, found, peaks, sums, n, frontier, before_stride, level, parts,
    COLUMNS: tl.constexpr, LEVELS: tl.constexpr, RANK: tl.constexpr, CHUNK: tl.constexpr, TOP: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The TOP best columns of one part of the vocabulary for up to ROWS nodes, and the part's sum of exponentials.

    Node r of n is node r % frontier of its sequence; before: the tokens that the nodes follow.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    part = tl.program_id(0)
    v = part * BLOCK + tl.arange(0, BLOCK)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = r < n
    weight = v
    if (RANK > 0) & (RANK <= CHUNK):  # weights do not depend on the kernel before
        weight = load_markov(w2, v, tl.arange(0, CHUNK), COLUMNS, RANK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b = r // frontier
    temperature = tl.load(temperatures + b, mask=live, other=1.0)
    at = (b * LEVELS + level).to(tl.int64) * COLUMNS
    x = tl.load(noisy + at[None, :] + v[:, None], mask=(v < COLUMNS)[:, None] & live[None, :], other=0.0)
    token = r.to(tl.int64)
    if RANK > 0:
        token = tl.load(before + b.to(tl.int64) * before_stride + r % frontier, mask=live, other=0)
    x = score_columns(x, w1, w2, weight, token, temperature, v, live, COLUMNS, RANK, CHUNK, BLOCK, ROWS)
    out = r.to(tl.int64) * parts + part
    peak = tl.max(x, 0)
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    tl.store(peaks + out, peak, mask=live)
    tl.store(sums + out, tl.sum(tl.exp(x - safe[None, :]), 0), mask=live)
    for j in tl.static_range(TOP):
        best = tl.max(x, 0)
        column = tl.min(tl.where((x == best[None, :]) & (x > float("-inf")), v[:, None], _NONE), 0)
        tl.store(values + out * TOP + j, best, mask=live)
        tl.store(found + out * TOP + j, column, mask=live)
        x = tl.where(v[:, None] == column[None, :], float("-inf"), x)


@triton.jit(
    do_not_specialize=["frontier", "chosen", "first", "slots", "parts"],
    do_not_specialize_on_alignment=["values", "peaks", "sums", "ids", "tokens", "parents"],
)
def _best_nodes(
    values, found, peaks, sums, ids, tokens, parents, totals, frontier, chosen, first, slots, parts,
    TOP: tl.constexpr, NAMED: tl.constexpr, FRONTIER: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
    MIN_LOG_PROB: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The best `chosen` nodes of one sequence's level: tokens, parents and totals [slots] from `first` on.

    The nodes they follow are the `frontier` ones before `first`, or the text's last token where `first` is 0.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, FRONTIER)
    c = tl.arange(0, PARTS * TOP)
    real = (f < frontier)[:, None] & (c < parts * TOP)[None, :]
    at = (b * frontier + f[:, None]) * parts * TOP + c[None, :]
    x = tl.load(values + at, mask=real, other=float("-inf"))  # [FRONTIER, PARTS * TOP]
    p = tl.arange(0, PARTS)
    there = (f < frontier)[:, None] & (p < parts)[None, :]
    of_part = (b * frontier + f[:, None]) * parts + p[None, :]
    peak = tl.load(peaks + of_part, mask=there, other=float("-inf"))
    top = tl.max(peak, 1)
    top = tl.where(top == float("-inf"), 0.0, top)
    total = tl.load(sums + of_part, mask=there, other=0.0)
    norm = top + tl.log(tl.sum(total * tl.exp(peak - top[:, None]), 1))
    above = tl.load(totals + b * slots + first - frontier + f, mask=(f < frontier) & (first + f >= frontier), other=0.0)
    x = tl.where(x > float("-inf"), tl.maximum(x - norm[:, None], MIN_LOG_PROB) - STEP + above[:, None], x)
    number = f[:, None] * (PARTS * TOP) + c[None, :]
    for j in range(chosen):
        best = tl.max(tl.max(x, 1), 0)
        place = tl.min(tl.min(tl.where((x == best) & real, number, _NONE), 1), 0)
        x = tl.where(number == place, float("-inf"), x)
        node = place // (PARTS * TOP)
        column = tl.load(found + (b * frontier + node) * parts * TOP + place % (PARTS * TOP))
        token = tl.load(ids + column) if NAMED else column.to(tl.int64)
        tl.store(tokens + b * slots + first + j, token)
        tl.store(parents + b * slots + first + j, tl.where(first > 0, first - frontier + node, -1))
        tl.store(totals + b * slots + first + j, best)


@triton.jit(
    do_not_specialize=["slots", "nodes"],
    do_not_specialize_on_alignment=["tokens", "parents", "out_tokens", "out_parents"],
)
def _rank_nodes(tokens, parents, totals, out_tokens, out_parents, slots, nodes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The best `nodes` nodes of one sequence, the best first, and the places of their parents among them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0).to(tl.int64)
    s = tl.arange(0, BLOCK)
    x = tl.load(totals + b * slots + s, mask=s < slots, other=float("-inf"))
    token = tl.load(tokens + b * slots + s, mask=s < slots, other=0)
    above = tl.load(parents + b * slots + s, mask=s < slots, other=-1)
    rank = tl.full((BLOCK,), -1, dtype=tl.int32)
    for n in range(nodes):
        best = tl.max(x, 0)
        place = tl.min(tl.where((x == best) & (s < slots), s, _NONE), 0)
        here = s == place
        x = tl.where(here, float("-inf"), x)
        rank = tl.where(here, n, rank)
        parent = tl.max(tl.where(here, above, -1), 0)
        tl.store(out_tokens + b * nodes + n, tl.sum(tl.where(here, token, 0), 0))
        tl.store(out_parents + b * nodes + n, tl.max(tl.where(s == parent, rank, -1), 0).to(tl.int64))


def add_noise(
    rows: Tensor,
    lengths: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    tokens: Tensor | None,
    keys: Tensor | None = None,
    *,
    pdl: bool = True,
) -> None:
    """Rows float32 [B, K, V] times 1 / T plus the target's noise, in place. keys int64 [B, K] become LOWEST_KEY."""
    batch, levels, columns = rows.shape
    _add_noise[(batch * levels, triton.cdiv(columns, SAMPLE_BLOCK))](
        rows, temperatures, seeds, lengths, lengths if tokens is None else tokens, lengths if keys is None else keys,
        columns, levels, tokens is not None, keys is not None, SAMPLE_BLOCK, pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip


def chunk_size(rank: int, block: int) -> int:
    """Inputs of the Markov head multiplied at a time: all, or half of what fits, while the next are being loaded."""
    padded, most = triton.next_power_of_2(max(1, rank)), MAX_TILE // block
    return max(16, padded if padded <= most else most // 2)


def level_sizes(levels: int, columns: int, nodes: int, width: int) -> list[int]:
    """The number of nodes of each level of a tree, before the best of all levels are kept."""
    sizes = [min(width, columns, nodes)]
    for _ in range(levels - 1):
        sizes.append(min(width, sizes[-1] * min(width, columns), nodes))
    return sizes


def draft_trees(
    rows: Tensor,
    last: Tensor,
    lengths: Tensor,
    seeds: Tensor,
    temperatures: Tensor,
    tokens: Tensor | None,
    markov: tuple[Tensor, Tensor] | None,
    *,
    nodes: int,
    width: int,
    pdl: bool = True,
) -> tuple[Tensor, Tensor]:
    """The tokens of trees and their parents, int64 [B, nodes] both. rows float32 [B, K, V] may be overwritten.

    The arguments before `nodes` are the fields of a `BlockLogits`. A level has at most `width` nodes, and a node at
    most `width` children: a power of two above 1.
    """
    rows, (batch, levels, columns), device = rows.contiguous(), rows.shape, rows.device
    sizes, block = level_sizes(levels, columns, nodes, width), tree_block(columns)
    parts, slots, rank = triton.cdiv(columns, block), sum(sizes), 0 if markov is None else markov[1].shape[1]
    w1, w2 = (rows, rows) if markov is None else markov
    most = batch * max(1, *sizes[:-1]) * parts if levels > 1 else batch * parts
    values, peaks, sums = torch.empty(most * (width + 2), device=device).split([most * width, most, most])
    found = torch.empty(most * width, dtype=torch.int32, device=device)
    drafted = torch.empty(2, batch, slots, dtype=torch.int64, device=device)
    totals = torch.empty(batch, slots, device=device)
    add_noise(rows, lengths, seeds, temperatures, tokens, pdl=pdl)
    first, frontier, padded = 0, 1, triton.next_power_of_2(parts)
    for level, size in enumerate(sizes):
        before, stride = (last, 1) if level == 0 else (drafted[0, :, first - frontier :], slots)
        _best_columns[(parts, triton.cdiv(batch * frontier, ROWS))](
            rows, w1, w2, before, temperatures, values, found, peaks, sums, batch * frontier, frontier, stride, level,
            parts, columns, levels, rank, chunk_size(rank, block), width, block, ROWS, pdl,
            num_warps=4 if block < 512 else 8, num_stages=2, launch_pdl=pdl,
        )  # fmt: skip
        _best_nodes[(batch,)](
            values, found, peaks, sums, last if tokens is None else tokens, drafted[0], drafted[1], totals, frontier,
            size, first, slots, parts, width, tokens is not None, width, padded, pdl, MIN_LOG_PROB, STEP,
            num_warps=min(8, max(1, width * padded * width // 256)), launch_pdl=pdl,
        )  # fmt: skip
        first, frontier = first + size, size
    made = torch.empty(2, batch, min(nodes, slots), dtype=torch.int64, device=device)
    _rank_nodes[(batch,)](
        drafted[0], drafted[1], totals, made[0], made[1], slots, made.shape[2], triton.next_power_of_2(slots), pdl,
        num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return made[0], made[1]


def tree_block(columns: int) -> int:
    """Columns of one part: enough that only few parts are compared."""
    return min(max(triton.next_power_of_2(triton.cdiv(columns, 32)), 64), 1024)
