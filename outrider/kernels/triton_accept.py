"""Which draft tokens a round accepts, in Triton: the functions of accept.py, one kernel each.

Every kernel has one variant for all sizes of a round, so that it is compiled before the first round. One program takes
one sequence; `compact_kept` also splits by layer and by words of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.batch import MAX_SEQUENCES, MAX_WIDTH

COPY_BLOCK = 256  # words of 8 bytes one program moves


@triton.jit
def _chosen_tokens(widths, offsets, choices, b, w, SEQUENCES: tl.constexpr, OFFSET: tl.constexpr):
    """The number of rows of sequence b, and the choices after its rows w; -1 beyond.

    OFFSET: its first choice is at its offset; otherwise its choices follow those of the sequences before it.
    """
    if OFFSET:
        first = tl.load(offsets + b)
    else:
        before = tl.arange(0, SEQUENCES)
        first = tl.sum(tl.load(widths + before, mask=before < b, other=0), 0)
    own = tl.load(widths + b)
    return own, tl.load(choices + first + w, mask=w < own, other=-1)


@triton.jit
def _parent_rows(parents, w, nodes):
    """The row of each row's parent: row 0 for itself, the row before where the parent given is out of range."""
    node = w - 1
    parent = tl.load(parents + node, mask=(w > 0) & (node < nodes), other=-2).to(tl.int32)
    return tl.where((parent >= -1) & (parent < node), parent + 1, tl.maximum(node, 0))


@triton.jit(
    do_not_specialize=["width"],
    do_not_specialize_on_alignment=["ids", "starts", "widths", "offsets", "choices", "sources", "placed"],
)
def _accept_chain(
    ids, starts, widths, offsets, choices, lengths, last, kept, sources, placed, width,
    SEQUENCES: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    w = tl.arange(0, WIDTH)
    own, chosen = _chosen_tokens(widths, offsets, choices, b, w, SEQUENCES, OFFSET)
    if FIELDS > 0:  # the last two fields of a sequence's source, see `write_shared`
        place = tl.load(sources + (b + 1) * FIELDS - 2)
        tl.store(placed + place + w, chosen, mask=w < tl.load(sources + (b + 1) * FIELDS - 1))
    drafted = tl.load(ids + b * width + w + 1, mask=w + 1 < own, other=-2)
    accepted = tl.min(tl.where((drafted != chosen) | (chosen < 0), w, WIDTH), 0)  # no draft token follows the last row
    token = tl.sum(tl.where(w == accepted, chosen, 0), 0)
    step_back = (token < 0) & (accepted > 0)  # nothing can follow the last accepted token: it is read again
    token = tl.where(step_back, tl.load(ids + b * width + accepted), token)
    accepted = tl.where(step_back, accepted - 1, accepted)
    tl.store(kept + b, accepted.to(tl.int64))
    tl.store(lengths + b, tl.load(starts + b) + 2 + accepted)
    tl.store(last + 2 * b, tl.maximum(tl.load(ids + b * width + accepted), 0))
    tl.store(last + 2 * b + 1, tl.maximum(token, 0))


@triton.jit(do_not_specialize=["nodes"], do_not_specialize_on_alignment=["parents", "counts"])
def _tree_row(parents, counts, ancestors, depths, nodes, WIDTH: tl.constexpr):
    """In each step every row adds the ancestors of the row it points to, and then points twice as far up."""
    b = tl.program_id(0)
    w = tl.arange(0, WIDTH)
    up = _parent_rows(parents + b * nodes, w, nodes)
    bits = tl.full((WIDTH,), 1, dtype=tl.int64) << w
    depth = (w > 0).to(tl.int64)
    for _ in tl.static_range(5):  # 2 ** 5 rows at most
        bits |= tl.gather(bits, up, 0)
        depth += tl.gather(depth, up, 0)
        up = tl.gather(up, up, 0)
    real = w <= tl.load(counts + b)
    chain = (tl.full((WIDTH,), 2, dtype=tl.int64) << w) - 1
    at = b * (nodes + 1) + w
    tl.store(ancestors + at, tl.where(real, bits, chain), mask=w <= nodes)
    tl.store(depths + at, tl.where(real, depth, w.to(tl.int64)), mask=w <= nodes)


@triton.jit(
    do_not_specialize=["nodes"],
    do_not_specialize_on_alignment=["ids", "parents", "starts", "widths", "offsets", "choices"],
)
def _accept_tree(
    ids, parents, starts, widths, offsets, choices, lengths, last, path, accepted, nodes,
    SEQUENCES: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    w = tl.arange(0, WIDTH)
    own, chosen = _chosen_tokens(widths, offsets, choices, b, w, SEQUENCES, OFFSET)
    held = tl.load(ids + b * (nodes + 1) + w, mask=w <= nodes, other=-2)
    up = tl.where((w > 0) & (w < own), _parent_rows(parents + b * nodes, w, nodes), -1)  # other rows are no children
    kept = tl.full((WIDTH,), -1, dtype=tl.int64)
    row = tl.full((), 0, dtype=tl.int32)
    count = tl.full((), 0, dtype=tl.int32)
    token = tl.sum(tl.where(w == 0, chosen, 0), 0)
    child = tl.max(tl.where((up == 0) & (held == token) & (token >= 0), w, 0), 0)
    while child > 0:
        kept = tl.where(w == count, child - 1, kept)
        row = child
        count += 1
        token = tl.sum(tl.where(w == row, chosen, 0), 0)
        child = tl.max(tl.where((up == row) & (held == token) & (token >= 0), w, 0), 0)
    step_back = (token < 0) & (count > 0)  # nothing can follow the last accepted token: it is read again
    token = tl.where(step_back, tl.sum(tl.where(w == row, held, 0), 0), token)
    row = tl.where(step_back, tl.sum(tl.where(w == row, up, 0), 0), row)
    count = tl.where(step_back, count - 1, count)
    tl.store(path + b * nodes + w, tl.where(w < count, kept, -1), mask=w < nodes)
    tl.store(accepted + b, count.to(tl.int64))
    tl.store(lengths + b, tl.load(starts + b) + 2 + count)
    tl.store(last + 2 * b, tl.maximum(tl.sum(tl.where(w == row, held, 0), 0), 0))
    tl.store(last + 2 * b + 1, tl.maximum(token, 0))


@triton.jit(do_not_specialize=["nodes", "pages"], do_not_specialize_on_alignment=["table_ids", "starts"])
def _compact_kept(
    keys, values, block_tables, table_ids, starts, path, accepted, nodes, pages, layer_words,
    SLOT_WORDS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK words of every accepted node of one sequence in one layer, in ascending order.

    A node moves to a slot that was already read or is unused, and a slot that was written is not read afterwards.
    """
    b = tl.program_id(0)
    count = tl.load(accepted + b).to(tl.int32)
    if count > 0:
        word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = word < SLOT_WORDS
        layer = tl.program_id(1).to(tl.int64) * layer_words
        table = block_tables + tl.load(table_ids + b) * pages
        start = tl.load(starts + b) + 1
        for d in range(count):
            node = tl.load(path + b * nodes + d)
            if node != d:
                source, goal = start + node, start + d
                source = tl.load(table + source // PAGE).to(tl.int64) * PAGE + source % PAGE
                goal = tl.load(table + goal // PAGE).to(tl.int64) * PAGE + goal % PAGE
                source, goal = layer + source * SLOT_WORDS + word, layer + goal * SLOT_WORDS + word
                tl.store(keys + goal, tl.load(keys + source, mask=inside), mask=inside)
                tl.store(values + goal, tl.load(values + source, mask=inside), mask=inside)


def accept_chains(
    ids: Tensor,
    starts: Tensor,
    widths: Tensor,
    choices: Tensor,
    offsets: Tensor | None = None,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
    placed: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the plain `accept_chains`; at most MAX_SEQUENCES sequences of MAX_WIDTH rows, all contiguous.

    out: where the result goes; None: to new tensors. placed: the sources of a pass, int64 [B, SOURCES], and the tensor
    that takes the choices asked for by `write_shared`, sequence after sequence; a choice is negative where the pass has
    no such row.
    """
    count, width = _size(ids)
    lengths, last, accepted = out or (_ints(ids, count), _ints(ids, count, 2), _ints(ids, count))
    sources, into = placed or (ids, ids)
    _accept_chain[(count,)](
        ids, starts, widths, widths if offsets is None else offsets, choices, lengths, last, accepted, sources, into,
        width, MAX_SEQUENCES, MAX_WIDTH, offsets is not None, 0 if placed is None else sources.shape[1], num_warps=1,
    )  # fmt: skip
    return lengths, last, accepted


def tree_rows(parents: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """As the plain `tree_rows`; at most MAX_SEQUENCES sequences of MAX_WIDTH rows, all contiguous."""
    count, nodes = _size(parents, 1)
    ancestors, depths = _ints(parents, count, nodes + 1), _ints(parents, count, nodes + 1)
    _tree_row[(count,)](parents, counts, ancestors, depths, nodes, MAX_WIDTH, num_warps=1)
    return ancestors, depths


def accept_trees(
    ids: Tensor, parents: Tensor, starts: Tensor, widths: Tensor, choices: Tensor, offsets: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the plain `accept_trees`; at most MAX_SEQUENCES sequences of MAX_WIDTH rows, all contiguous."""
    count, nodes = _size(parents, 1)
    if ids.shape != (count, nodes + 1) or not ids.is_contiguous():
        raise ValueError(f"ids: contiguous [{count}, {nodes + 1}] for these parents, got {list(ids.shape)}")
    lengths, last, path, accepted = _ints(ids, count), _ints(ids, count, 2), _ints(ids, count, nodes), _ints(ids, count)
    _accept_tree[(count,)](
        ids, parents, starts, widths, widths if offsets is None else offsets, choices, lengths, last, path, accepted,
        nodes, MAX_SEQUENCES, MAX_WIDTH, offsets is not None, num_warps=1,
    )  # fmt: skip
    return lengths, last, path, accepted


def compact_kept(
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    table_ids: Tensor,
    starts: Tensor,
    path: Tensor,
    accepted: Tensor,
    *,
    page: int = 16,
) -> None:
    """As the plain `compact_kept`, all layers in one launch; all contiguous, a slot a multiple of 8 bytes."""
    if not (keys.is_contiguous() and values.is_contiguous()) or keys.shape != values.shape:
        raise ValueError(f"keys and values: contiguous and of one shape, got {keys.shape} and {values.shape}")
    k, v = (cache.view(-1, *cache.shape[-3:]).view(torch.int64) for cache in (keys, values))  # words: bits are kept
    layers, slots, kv, dim = k.shape
    _compact_kept[(len(path), layers, triton.cdiv(kv * dim, COPY_BLOCK))](
        k, v, block_tables, table_ids, starts, path, accepted, path.shape[1], block_tables.shape[1],
        slots * kv * dim, kv * dim, page, COPY_BLOCK, num_warps=4,
    )  # fmt: skip


def _size(rows: Tensor, extra: int = 0) -> tuple[int, int]:
    """The shape of ids, or of parents, which have one `extra` row; ValueError where a kernel cannot take it."""
    count, width = rows.shape
    if count > MAX_SEQUENCES or width + extra > MAX_WIDTH or not rows.is_contiguous():
        raise ValueError(
            f"contiguous, at most {MAX_SEQUENCES} sequences of {MAX_WIDTH} rows, got {count} of {width + extra}"
        )
    return count, width


def _ints(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=like.device)
