"""Drafts that share the rows of a pass: who has how many, and where they lie. Kernels against the plain functions.

On a CUDA device, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from outrider.kernels import share

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PDL = not INTERPRETED
MAX_ID = 500


@pytest.mark.parametrize("batch", [1, 4, 8, 33] if INTERPRETED else [1, 4, 8, 33, 64, 200])
@pytest.mark.parametrize("levels", [1, 5, 7, 16])
def test_tokens_are_shared_as_by_the_plain_function(batch: int, levels: int):
    from outrider.kernels.triton_share import share_tokens

    g = torch.Generator().manual_seed(100 * batch + levels)
    for case in range(4):
        tokens = torch.randint(0, 1000, (batch, levels), generator=g)
        chances = torch.rand(batch, levels, generator=g)
        if case == 1:  # many that are equally likely
            chances = chances.mul(4).round().div(4)
        if case == 2:
            chances[torch.rand(batch, levels, generator=g) < 0.1] = torch.nan
            chances[0, 0], chances[-1, -1] = 2.0, -1.0
        room = torch.randint(0, levels + 2, (batch,), generator=g)
        totals = [0, 1, batch, batch * levels // 2, batch * levels]
        if INTERPRETED and batch * levels > 128:  # which takes a second each: two in each case, in turn
            totals = totals[case : case + 2]
        for total in totals:
            judge = share.share_tokens(tokens, chances, room, total)
            own = tokens.to(DEVICE)
            share_tokens(own, chances.to(DEVICE), room.to(DEVICE), torch.tensor([total], device=DEVICE), pdl=PDL)
            assert own.tolist() == judge.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_rows_lie_as_by_the_plain_function(seed: int):
    """A repeated pass has other lengths, and nothing of the ones before; no row lies beyond the pass."""
    from outrider.kernels.triton_inputs import HEADER, SOURCES, Packing, fetch_inputs, write_draft, write_shared

    rng = random.Random(seed)
    batch, width, levels = 32 if seed % 2 else 8, 16, 7
    count = rng.randrange(batch // 2, batch + 1)
    block = torch.zeros(count, levels, dtype=torch.int64, device=DEVICE)
    asked = [1 + levels if rng.random() < 0.8 else 1 for _ in range(count)]
    texts = [1] * count
    rows = count + (count * 3 if seed < 4 else 5)  # too few for what is drafted: the last ones have less
    shared = rows - count
    header, sources = np.zeros(HEADER, dtype=np.int64), np.zeros((batch, SOURCES), dtype=np.int64)
    given = [1 if n == 1 else 0 for n in asked]  # widths: those with a draft have theirs from the device
    for i, n in enumerate(asked):
        if n > 1:
            write_draft(sources[i], block[i].data_ptr(), 1, levels)
    write_shared(header, sources, shared, asked)
    ids = torch.zeros(batch, width, dtype=torch.int64, device=DEVICE)
    starts = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
    packing = Packing(
        torch.tensor([*given, *[0] * (batch - count)], device=DEVICE),
        torch.full((batch,), 77, device=DEVICE),
        torch.full((rows,), 77, device=DEVICE),
    )
    sent = [torch.from_numpy(each).to(DEVICE) for each in (header, sources)]
    for _ in range(3):
        drafts = [[rng.randrange(100) for _ in range(rng.randrange(levels + 1))] for _ in range(count)]
        drafts = [draft if n > 1 else [] for draft, n in zip(drafts, asked, strict=True)]
        padded = [[*draft, *[share.NO_ROW] * (levels - len(draft))] for draft in drafts]
        block.copy_(torch.tensor(padded))
        fetch_inputs(ids, starts, *sent, MAX_ID, packing)
        widths, offsets = share.pack_rows(texts, padded, shared)
        assert packing.widths.tolist() == [*widths, *[0] * (batch - count)]
        assert packing.offsets.tolist()[:count] == offsets
        places = [b * width + w for b, own in enumerate(widths) for w in range(own)]
        assert packing.row_index.tolist() == [*places, *[-1] * (rows - len(places))]
        assert sum(widths) <= rows


def test_choices_lie_where_they_are_asked_for():
    from outrider.kernels import accept
    from outrider.kernels.triton_accept import accept_chains
    from outrider.kernels.triton_inputs import HEADER, SOURCES, write_shared

    ids = torch.tensor([[5, 6, 7, -1], [1, -1, -1, -1], [2, 3, 4, 9], [8, 0, 0, 0]], device=DEVICE)
    widths, offsets = torch.tensor([3, 1, 4, 1], device=DEVICE), torch.tensor([0, 3, 4, 8], device=DEVICE)
    choices = torch.tensor([6, 7, 11, 12, 3, 4, 13, 14, 15, 99], device=DEVICE)
    sources = np.zeros((4, SOURCES), dtype=np.int64)
    write_shared(np.zeros(HEADER, dtype=np.int64), sources, 6, [4, 4, 4, 1])
    placed = torch.full((16,), 77, device=DEVICE)
    starts = torch.tensor([10, 20, 30, 40], device=DEVICE)
    made = accept_chains(ids, starts, widths, choices, offsets, placed=(torch.from_numpy(sources).to(DEVICE), placed))
    assert placed.tolist() == [6, 7, 11, -1, 12, -1, -1, -1, 3, 4, 13, 14, 15, 77, 77, 77]
    judge = accept.accept_chains(ids, starts, widths, choices[:9])
    assert [each.tolist() for each in made] == [each.tolist() for each in judge]
