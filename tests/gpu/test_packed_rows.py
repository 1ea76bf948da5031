"""Passes whose rows are packed: sequences of different widths one after another, padding behind them.

The kernels against their references, which tests/unit/kernels judges, and against themselves on rows that are not
packed. On a CUDA device, or anywhere in Triton's interpreter (TRITON_INTERPRET=1), which runs the small cases.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from outrider.kernels import accept, attention
from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, PackedRows, RowPlaces, uniform_rows

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PDL = not INTERPRETED
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter reads bfloat16 wrongly
HEADS, KV, DIM, PAGE = 8, 2, 64, 16
WIDTHS, TEXTS = [[1, 8, 1, 1, 0, 3], [16, 1, 1, 2], [32, 1, 20, 0], [1] * 40], [1, 70, 900]
SPLITS = [(1, 0, 0), (4, 64, 2), (4, 64, 0), (4, 0, 8)]  # splits, chunk, rows per program
if INTERPRETED:
    WIDTHS, TEXTS, SPLITS = [[1, 5, 0, 2]], [70], SPLITS[:2]


def ragged(widths: list[int], text: int, *, tree: bool, splits: int) -> tuple[AttentionBatch, AttentionBatch, int]:
    """The same sequences packed, with three rows of padding, and `width` rows each. And the number of pages."""
    g = torch.Generator().manual_seed(text + sum(widths))
    sequences, width = len(widths), max(widths)
    pages = -(-(text + width) // PAGE)
    count = sequences * pages + 3
    block_tables = torch.randperm(count, generator=g)[: sequences * pages].view(sequences, pages).int()
    starts = torch.randint(max(1, text // 2), text + 1, (sequences,), generator=g)
    parents = (torch.rand(sequences, width - 1, generator=g) * torch.arange(1, width)).floor().long() - 1
    if not tree:
        parents = torch.arange(-1, width - 2).repeat(sequences, 1)
    ancestors, depths = accept.tree_rows(parents, torch.tensor(widths) - 1)
    table_ids = torch.randperm(sequences, generator=g)
    given = (block_tables, table_ids, starts, torch.tensor(widths), ancestors.flatten(), depths.flatten())
    padded = AttentionBatch(*(t.to(DEVICE) for t in given), uniform_rows(sequences, width, DEVICE), splits)
    places = [b * width + w for b, own in enumerate(widths) for w in range(own)]
    offsets = [sum(widths[:b]) for b in range(sequences)]
    rows = PackedRows(width, torch.tensor(offsets, device=DEVICE), torch.tensor([*places, -1, -1, -1], device=DEVICE))
    return replace(padded, packing=rows), padded, count


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(HALF)


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("tree", "softcap", "window"), [(False, 0.0, 0), (True, 5.0, 0), (True, 0.0, 40)])
@pytest.mark.parametrize(("splits", "chunk", "rows_per_program"), SPLITS)
def test_attention_of_packed_rows(widths, text, tree, softcap, window, splits, chunk, rows_per_program):
    """As in float64, and to the bit as unpacked where keys are split alike; padding that is NaN reaches nobody.

    The kernel for few rows splits keys more often where fewer programs have rows.
    """
    from outrider.kernels.triton_attention import attend_pages, direct_splits

    packed, padded, count = ragged(widths, text, tree=tree, splits=splits)
    packed, padded = (replace(b, chunk=chunk, rows_per_program=rows_per_program) for b in (packed, padded))
    index, real = packed.packing.row_index, sum(widths)
    keys, values = (random(count * PAGE, KV, DIM, seed=s) for s in (1, 2))
    q = random(len(index), HEADS, DIM, seed=3)
    q[real:] = torch.nan
    spread = torch.full((len(padded.packing.row_index), HEADS, DIM), torch.nan, device=DEVICE, dtype=HALF)
    spread[index[:real]] = q[:real]
    options = {"scale": DIM**-0.5, "softcap": softcap, "window": window}
    told = []
    for batch, rows in ((packed, q), (padded, spread)):
        out = torch.full_like(rows, torch.nan)
        work = AttentionWorkspace(len(rows) * splits, HEADS, DIM, DEVICE)
        attend_pages(rows, keys, values, batch, out, work, **options, pdl=PDL)
        told.append(out)
    judge = torch.empty_like(q, dtype=torch.float64)
    attention.attend_pages(*(t.double() for t in (q, keys, values)), packed, judge, **options)
    by_kernel = [direct_splits(rows, keys, batch, PAGE) for batch, rows in ((packed, q), (padded, spread))]
    if by_kernel[0] == by_kernel[1]:
        assert torch.equal(told[0][:real], told[1][index[:real]])
    for out in (told[0][:real], told[1][index[:real]]):
        assert float((out.double() - judge[:real]).norm() / judge[:real].norm()) < 1e-2
    assert told[0][real:].isnan().all()  # padding is not written


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_packed_rows_are_located_and_embedded(widths):
    from outrider.kernels.triton_rope import locate_rows
    from outrider.kernels.triton_rows import embed_rows

    packed, _, count = ragged(widths, 70, tree=True, splits=1)
    index, real = packed.packing.row_index, sum(widths)
    cos_sin = torch.rand(200, DIM // 2, 2, device=DEVICE)
    places, judge = (RowPlaces.empty(len(index), DIM, DEVICE) for _ in range(2))
    locate_rows(packed, cos_sin, places, scratch_slot=count * PAGE, pdl=PDL)
    attention.locate_rows(packed, cos_sin, judge, scratch_slot=count * PAGE)
    assert torch.equal(places.slots, judge.slots)
    assert torch.equal(places.cos_sin[:real], judge.cos_sin[:real])
    embedding = random(50, 96, seed=1)
    ids = torch.randint(0, 50, (len(widths), max(widths)), device=DEVICE)
    out = torch.full((len(index), 96), torch.nan, device=DEVICE, dtype=HALF)
    embed_rows(embedding, ids, index, out, pdl=PDL)
    assert torch.equal(out[:real], embedding[ids.flatten()[index[:real]]])
