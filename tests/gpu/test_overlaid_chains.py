"""A head's chain or what a lookup found: the kernel against the plain function, to the last bit.

On a CUDA device, or anywhere in Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import os

import pytest
import torch

from outrider.kernels import overlay
from outrider.kernels.lookup import MAX_CHANCE, NO_TOKEN, Found

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PDL = not INTERPRETED
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""tokens [B, K] and chances [B, K] of a head, found [B, 2 * k + 5]."""


def made(g: torch.Generator, batch: int, levels: int, k: int) -> Case:
    columns = Found.of(k)
    tokens, chances = torch.randint(0, 1000, (batch, levels), generator=g), torch.rand(batch, levels, generator=g)
    found = torch.randint(1000, 2000, (batch, columns.chance + 1), generator=g)
    counts = torch.randint(0, k + 1, (batch,), generator=g)
    found[:, columns.drafts][torch.arange(k) >= counts[:, None]] = NO_TOKEN
    found[:, columns.chance] = torch.randint(0, MAX_CHANCE + 1, (batch,), generator=g) * (counts > 0)
    return tokens, chances, found


def assert_same(case: Case, k: int) -> int:
    """How many chains were replaced, by the kernel as by the plain function."""
    from outrider.kernels.triton_overlay import overlay_chains

    tokens, chances, found = (part.to(DEVICE, copy=True) for part in case)
    batch, width = len(tokens), max(tokens.shape[1], k)
    out = tokens.new_full((batch, width), 77), chances.new_full((batch, width), 77.0)
    overlay_chains(tokens, chances, found, k, out, pdl=PDL)
    judge, judged_chances = overlay.overlay_chains(*case, k)
    assert out[0].tolist() == judge.tolist()
    assert out[1].cpu().view(torch.int32).tolist() == judged_chances.view(torch.int32).tolist()
    assert [each.tolist() for each in (tokens, found)] == [case[0].tolist(), case[2].tolist()]
    return int((judge[:, : tokens.shape[1]] != case[0]).any(1).sum())


@pytest.mark.parametrize("batch", [1, 9, 33] if INTERPRETED else [1, 9, 33, 128])
@pytest.mark.parametrize(("levels", "k"), [(7, 15), (7, 3), (1, 5), (5, 8), (16, 16)])
def test_chains_are_overlaid_as_by_the_plain_function(batch: int, levels: int, k: int):
    g = torch.Generator().manual_seed(1000 * batch + 10 * levels + k)
    replaced = 0
    for case in range(4):
        tokens, chances, found = made(g, batch, levels, k)
        if case == 1:
            chances[torch.rand(batch, levels, generator=g) < 0.1] = torch.nan
            chances[0, 0], chances[-1, -1] = 2.0, -1.0
        if case == 2:
            found[:, Found.of(k).chance] = MAX_CHANCE
        if case == 3:
            found[:, Found.of(k).drafts] = NO_TOKEN
        replaced += assert_same((tokens, chances, found), k)
    assert batch == 1 or 0 < replaced < 4 * batch


def test_sums_that_are_as_good_as_equal_are_rounded_alike():
    """The chances of what was found, one unit in the last place more or less, are those of the head."""
    levels = k = 7
    g = torch.Generator().manual_seed(3)
    tokens, _, found = made(g, 64, levels, k)
    found[:, Found.of(k).drafts] = 5
    found[:, Found.of(k).chance] = torch.randint(1, MAX_CHANCE, (64,), generator=g)
    same = (found[:, Found.of(k).chance].float() / MAX_CHANCE)[:, None].expand(-1, levels).contiguous()
    assert assert_same((tokens, same, found), k) == 0
    bits = same.view(torch.int32) + torch.randint(-1, 2, same.shape, generator=g, dtype=torch.int32)
    assert 0 < assert_same((tokens, bits.view(torch.float32), found), k) < 64
