"""A head's chain or what a lookup found: against a loop over texts and tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from outrider.kernels.lookup import MAX_CHANCE, NO_TOKEN, Found
from outrider.kernels.overlay import overlay_chains
from outrider.kernels.share import NO_ROW

BATCH = 50


def found_at_random(g: torch.Generator, batch: int, k: int) -> Tensor:
    """As of `look_up`; nothing is found for some texts."""
    columns = Found.of(k)
    found = torch.randint(1000, 2000, (batch, columns.chance + 1), generator=g)
    counts = torch.randint(0, k + 1, (batch,), generator=g)
    found[:, columns.drafts][torch.arange(k) >= counts[:, None]] = NO_TOKEN
    found[:, columns.chance] = torch.randint(0, MAX_CHANCE + 1, (batch,), generator=g) * (counts > 0)
    return found


def found_for_one(drafts: list[int], chance: int) -> Tensor:
    return torch.tensor([[*drafts, *drafts, 3, 1, len(drafts), 9, chance]])


def worth(chances: list[float]) -> float:
    cleaned = [0.0 if math.isnan(chance) else min(max(chance, 0.0), 1.0) for chance in chances]
    return sum(math.prod(cleaned[: i + 1]) for i in range(len(cleaned)))


@pytest.mark.parametrize(("levels", "k"), [(7, 7), (7, 15), (7, 3), (1, 1), (1, 5), (5, 1), (16, 31)])
def test_what_was_found_takes_the_place_of_a_chain_that_is_worth_less(levels: int, k: int):
    g = torch.Generator().manual_seed(100 * levels + k)
    tokens, chances = torch.randint(0, 1000, (BATCH, levels), generator=g), torch.rand(BATCH, levels, generator=g)
    chances[torch.rand(BATCH, levels, generator=g) < 0.1] = torch.nan
    chances[torch.rand(BATCH, levels, generator=g) < 0.1] = 1.5
    found = found_at_random(g, BATCH, k)
    drafted, drafted_chances = overlay_chains(tokens, chances, found, k)
    replaced, width = 0, max(levels, k)
    for b in range(BATCH):
        drafts = [token for token in found[b, :k].tolist() if token >= 0]
        chance = int(found[b, -1]) / MAX_CHANCE
        of_found, of_head = worth([chance] * len(drafts)), worth(chances[b].tolist())
        if 0 < abs(of_found - of_head) < 1e-4:  # float32 may decide otherwise
            continue
        if of_found <= of_head:
            beyond = width - levels
            assert drafted[b].tolist() == [*tokens[b].tolist(), *[NO_ROW] * beyond]
            stated = [*chances[b].nan_to_num(7.0).tolist(), *[0.0] * beyond]
            assert drafted_chances[b].nan_to_num(7.0).tolist() == stated
            continue
        replaced += 1
        left = width - len(drafts)
        assert drafted[b].tolist() == [*drafts, *[NO_ROW] * left]
        assert drafted_chances[b].tolist() == pytest.approx([*[chance] * len(drafts), *[0.0] * left])
    assert 0 < replaced < BATCH


def test_what_is_worth_no_more_than_the_chain_leaves_it():
    tokens, chances = torch.tensor([[1, 2, 3]]), torch.tensor([[1.0, 1.0, 0.0]])
    tokens, chances = overlay_chains(tokens, chances, found_for_one([8, 9], MAX_CHANCE), 2)
    assert tokens.tolist() == [[1, 2, 3]]
    assert chances.tolist() == [[1.0, 1.0, 0.0]]


@pytest.mark.parametrize(("drafts", "chance"), [([NO_TOKEN] * 3, MAX_CHANCE), ([8, 9, 8], 0)])
def test_a_chain_worth_nothing_stays_where_no_chance_is_found(drafts: list[int], chance: int):
    tokens, chances = torch.tensor([[1, 2]]), torch.tensor([[torch.nan, 0.9]])
    drafted, drafted_chances = overlay_chains(tokens, chances, found_for_one(drafts, chance), 3)
    assert drafted.tolist() == [[1, 2, NO_ROW]]
    assert drafted_chances.isnan().tolist() == [[True, False, False]]
    drafted, drafted_chances = overlay_chains(tokens, chances, found_for_one([8, NO_TOKEN, NO_TOKEN], 1), 3)
    assert drafted.tolist() == [[8, NO_ROW, NO_ROW]]
    assert drafted_chances.tolist() == [[pytest.approx(1 / MAX_CHANCE), 0.0, 0.0]]


def test_a_lookup_may_be_longer_than_the_heads_chain():
    """Its tokens beyond the chain count in what it is worth, too."""
    tokens, chances = torch.tensor([[1, 2]]), torch.tensor([[0.9, 0.9]])  # worth 1.71
    half = MAX_CHANCE * 2 // 3
    assert overlay_chains(tokens, chances, found_for_one([5, 6, 7], half), 3)[0].tolist() == [[1, 2, NO_ROW]]
    assert overlay_chains(tokens, chances, found_for_one([5] * 8, half), 8)[0].tolist() == [[5] * 8]
