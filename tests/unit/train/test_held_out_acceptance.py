"""Expected tokens per pass from chances by position; chains cut by the end of an answer do not bias them."""

import itertools

import pytest
import torch

from outrider.train.acceptance import GREEDY, SAMPLED, Tally, distinct_bigrams, expected_tau


def test_tau_is_the_mean_over_all_outcomes():
    chances = (0.8, 0.5, 0.25)
    expected = 0.0
    for outcome in itertools.product((True, False), repeat=3):
        probability = 1.0
        for chance, accepted in zip(chances, outcome, strict=True):
            probability *= chance if accepted else 1 - chance
        accepted = len(list(itertools.takewhile(bool, outcome)))
        expected += probability * (1 + accepted)
    assert expected_tau(chances) == pytest.approx(expected)


def test_counts_by_kind_and_position():
    tally = Tally(3, 2, torch.device("cpu"))
    accepted = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).float()
    valid = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    tally.add(torch.full((4,), GREEDY), torch.tensor([0, 0, 1, 1]), accepted, valid)
    tally.add(torch.full((1,), SAMPLED), torch.tensor([1]), torch.tensor([[0.5, 0.8, 1.0]]), valid[:1])
    first, second = tally.by_kind()
    assert first is not None
    assert second is not None
    assert first.greedy == (1.0, 0.5, 0.0)
    assert second.greedy == (0.5, 0.0, 0.0), "the last chain ends after one position, so that it says nothing of others"
    assert second.sampled == pytest.approx((0.5, 0.8, 1.0))
    assert tally.overall().greedy == pytest.approx((3 / 4, 1 / 2, 0.0))


def test_a_kind_without_answers_has_no_figures():
    tally = Tally(2, 3, torch.device("cpu"))
    tally.add(torch.zeros(1, dtype=torch.int64), torch.tensor([1]), torch.ones(1, 2), torch.ones(1, 2).bool())
    first, second, third = tally.by_kind()
    assert first is third is None
    assert second is not None
    assert second.greedy == (1.0, 1.0)
    assert second.sampled == (), "none was sampled"


def test_chains_cut_short_do_not_bias():
    """Chains of known chances, most of them cut: the estimate is that of whole chains."""
    generator = torch.Generator().manual_seed(1)
    chances = torch.tensor([0.9, 0.7, 0.5, 0.6])
    accepted = (torch.rand(40_000, 4, generator=generator) < chances).float()
    lengths = torch.randint(1, 5, (40_000,), generator=generator)
    tally = Tally(4, 1, torch.device("cpu"))
    zeros = torch.zeros(40_000, dtype=torch.int64)
    tally.add(zeros, zeros, accepted, torch.arange(4) < lengths[:, None])
    assert tally.overall().greedy == pytest.approx(chances.tolist(), abs=0.03)


def test_repetition_shows_in_bigrams():
    assert distinct_bigrams([1, 2, 3, 4]) == 1.0
    assert distinct_bigrams([1, 2] * 50) == pytest.approx(2 / 99)
    assert distinct_bigrams([1]) == 1.0
