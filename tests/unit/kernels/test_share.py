"""How drafts share the rows of a pass: against every way to choose as many tokens."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from outrider.kernels.share import NO_ROW, pack_rows, share_tokens


@pytest.mark.parametrize("seed", range(5))
def test_no_other_choice_of_first_tokens_is_likelier_accepted(seed: int):
    """The expected number of accepted tokens is the sum of the survivals of those that have a row."""
    g = torch.Generator().manual_seed(seed)
    chances, tokens = torch.rand(3, 3, generator=g), torch.arange(9).view(3, 3)
    survival = chances.cumprod(1)
    room = torch.tensor([3, 3, 2])
    for total in range(10):
        kept = share_tokens(tokens, chances, room, total) >= 0
        places = [(b, j) for b in range(3) for j in range(int(room[b]))]
        best = max(
            sum(float(survival[place]) for place in chosen)
            for chosen in combinations(places, min(total, len(places)))
            if all((b, j - 1) in chosen for b, j in chosen if j)
        )
        assert float(survival[kept].sum()) == pytest.approx(best)


def test_the_first_tokens_of_each_draft_are_kept_and_no_more_than_the_total():
    g = torch.Generator().manual_seed(1)
    tokens, chances = torch.randint(0, 100, (9, 7), generator=g), torch.rand(9, 7, generator=g)
    room = torch.tensor([7, 7, 0, 3, 7, 7, 1, 7, 7])
    for total in range(70):
        shared = share_tokens(tokens, chances, room, total)
        kept = shared >= 0
        counts = kept.sum(1)
        assert (kept == (torch.arange(7) < counts[:, None])).all()
        assert (counts <= room).all()
        assert counts.sum() == min(total, int(room.sum()))
        assert (shared[kept] == tokens[kept]).all()
        assert (shared[~kept] == NO_ROW).all()


def test_equally_likely_tokens_nearer_to_their_text_come_first():
    tokens, sure = torch.arange(6).view(2, 3), torch.ones(2, 3)
    room = torch.tensor([3, 3])
    assert [(share_tokens(tokens, sure, room, n) >= 0).sum(1).tolist() for n in range(7)] == [
        [0, 0],
        [1, 0],
        [1, 1],
        [2, 1],
        [2, 2],
        [3, 2],
        [3, 3],
    ]


def test_what_is_no_chance_counts_as_none():
    tokens = torch.arange(4).view(2, 2)
    chances = torch.tensor([[torch.nan, 0.9], [0.1, 0.1]])
    assert share_tokens(tokens, chances, torch.tensor([2, 2]), 2).tolist() == [[NO_ROW, NO_ROW], [2, 3]]
    assert share_tokens(tokens, torch.tensor([[5.0, 0.1], [0.9, 0.9]]), torch.tensor([2, 2]), 2).tolist() == [
        [0, NO_ROW],
        [2, NO_ROW],
    ]


def test_rows_are_packed_and_those_before_have_theirs_first():
    drafts = [[5, 6, NO_ROW], [NO_ROW] * 3, [7, 8, 9]]
    assert pack_rows([1, 1, 2], drafts, 9) == ([3, 1, 5], [0, 3, 4])
    assert pack_rows([1, 1, 2], drafts, 3) == ([3, 1, 3], [0, 3, 4])
    assert pack_rows([1, 1, 2], drafts, 0) == ([1, 1, 2], [0, 1, 2])
