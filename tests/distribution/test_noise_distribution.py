"""The noise against its distribution.

Each test is seeded and so gives one answer for ever. FALSE_ALARM is the chance that ideal noise
would have failed it when it was written; there are about 30 such tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from distribution_harness import fits
from torch import Tensor

from outrider.core.sampling import SamplingParams, derive_seeds
from outrider.verify.noise import ACCEPT, DRAFT, RESIDUAL, TARGET, gumbel, gumbel_rows, round_seed, uniform

FALSE_ALARM = 1e-6
MANY = 1 << 18


def v_of(noise: Tensor) -> Tensor:
    """The uniform number behind each Gumbel: 1 - exp(-exp(-g))."""
    return -torch.expm1(-torch.exp(-noise))


def many_positions(seed: int, count: int, vocab: int, stream: int = TARGET) -> Tensor:
    return gumbel_rows([seed] * count, range(count), vocab, stream=stream)  # [count, vocab]


SAMPLES = {
    "tokens of one position": lambda: gumbel(1, 2, MANY),
    "positions of one token": lambda: many_positions(3, 1 << 16, 1)[:, 0],
    "seeds of one token": lambda: gumbel_rows(range(1 << 16), [7] * (1 << 16), 1)[:, 0],
    "seeds of the n texts": lambda: gumbel_rows(
        [s for i in range(512) for s in derive_seeds(SamplingParams(seed=i, n=128))], [0] * (1 << 16), 1
    )[:, 0],
    "streams of one token": lambda: torch.cat([gumbel(5, 6, 1, stream=s) for s in range(1 << 12)]),
    "rounds of one text": lambda: gumbel_rows([round_seed(9, n) for n in range(1 << 16)], range(1 << 16), 1)[:, 0],
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_v_is_uniform(sample: Callable[[], Tensor]):
    v = v_of(sample())
    counts = torch.histc(v, bins=256, min=0, max=1)
    assert counts.sum() == len(v)
    assert fits(counts, torch.ones(256)) > FALSE_ALARM


def test_the_smallest_v_are_uniform_too():
    """Large Gumbels decide who wins among rare tokens."""
    v = torch.cat([v_of(gumbel(seed, 0, MANY)) for seed in range(16)])
    small = v[v < 2.0**-12] * 2.0**12
    assert fits(torch.histc(small, bins=16, min=0, max=1), torch.ones(16)) > FALSE_ALARM
    share = torch.tensor([len(small), len(v) - len(small)])
    assert fits(share, torch.tensor([2.0**-12, 1 - 2.0**-12])) > FALSE_ALARM


@pytest.mark.parametrize("vocab", [2, 64])
def test_a_position_of_any_vocabulary_has_its_share_of_large_noise(vocab: int):
    """The maximum of n standard Gumbels is a Gumbel moved by log n."""
    best = many_positions(11, 1 << 14, vocab).amax(-1) - math.log(vocab)
    assert fits(torch.histc(v_of(best), bins=64, min=0, max=1), torch.ones(64)) > FALSE_ALARM


def _pairs(noise: Tensor, lag: int) -> tuple[Tensor, Tensor]:
    return noise[:-lag].flatten(), noise[lag:].flatten()


SQUARE = 1 << 9
PAIRS = {
    "neighbouring positions": lambda: _pairs(many_positions(1, SQUARE, SQUARE), 1),
    "positions 64 apart": lambda: _pairs(many_positions(2, SQUARE, SQUARE), 64),
    "neighbouring tokens": lambda: _pairs(many_positions(3, SQUARE, SQUARE).T, 1),
    "tokens 256 apart": lambda: _pairs(many_positions(4, SQUARE, SQUARE).T, 256),
    "neighbouring seeds": lambda: _pairs(gumbel_rows(range(SQUARE), [5] * SQUARE, SQUARE), 1),
    "seeds of two texts of one request": lambda: (
        gumbel(derive_seeds(SamplingParams(seed=6, n=2))[0], 0, MANY),
        gumbel(derive_seeds(SamplingParams(seed=6, n=2))[1], 0, MANY),
    ),
    "seeds one high bit apart": lambda: (gumbel(7, 0, MANY), gumbel(7 | 1 << 63, 0, MANY)),
    "seed and position swapped": lambda: (gumbel(8, 9, MANY), gumbel(9, 8, MANY)),
    "target and draft streams": lambda: (gumbel(10, 0, MANY, stream=TARGET), gumbel(10, 0, MANY, stream=DRAFT)),
    "accept and residual streams": lambda: (gumbel(1, 0, MANY, stream=ACCEPT), gumbel(1, 0, MANY, stream=RESIDUAL)),
    "a text and its round": lambda: (gumbel(12, 30, MANY), gumbel(round_seed(12, 30), 30, MANY)),
    "two rounds": lambda: (gumbel(round_seed(12, 30), 33, MANY), gumbel(round_seed(12, 31), 33, MANY)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_two_places_are_independent(pair: Callable[[], tuple[Tensor, Tensor]]):
    a, b = (v_of(x) for x in pair())
    cells = (a * 16).long() * 16 + (b * 16).long()
    assert fits(torch.bincount(cells, minlength=256), torch.ones(256)) > FALSE_ALARM


def test_every_bit_of_v_is_fair_and_independent_of_the_bit_of_the_next_token():
    n = (v_of_exact(gumbel_rows([1], [2], MANY)[0]) * 2.0**32).long()  # the top 32 bits
    bits = (n[:, None] >> torch.arange(32)) & 1  # [MANY, 32]
    ones = bits.sum(0)
    same = (bits[1:] == bits[:-1]).sum(0)
    for count, total in ((ones, MANY), (same, MANY - 1)):
        for each in count.tolist():
            assert fits(torch.tensor([each, total - each]), torch.ones(2)) > FALSE_ALARM / 64


def v_of_exact(noise: Tensor) -> Tensor:
    """v as above, clear of the rounding that could put it on the far side of a bit's edge."""
    return (v_of(noise) * 2.0**40).round() * 2.0**-40


def test_the_argmax_of_logits_plus_noise_follows_their_softmax_over_a_million_draws():
    """64 distributions, from nearly flat to nearly certain, each drawn 2**14 times, at places of its own."""
    generator = torch.Generator().manual_seed(0)
    cases, draws, vocab = 64, 1 << 14, 12
    spread = torch.logspace(-1, 0.7, cases, dtype=torch.float64)[:, None]
    logits = torch.randn(cases, vocab, generator=generator, dtype=torch.float64) * spread
    for i, row in enumerate(logits):
        seeds, positions = ([i] * draws, range(draws)) if i % 2 else (range(draws), [i] * draws)
        taken = (gumbel_rows(seeds, positions, vocab) + row).argmax(-1)
        counts = torch.bincount(taken, minlength=vocab)
        assert fits(*lump(counts, row.softmax(-1))) > FALSE_ALARM / cases


def lump(counts: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Cells expected fewer than 20 times put together, where Pearson's test would not hold."""
    rare = probs * counts.sum() < 20
    return (
        torch.cat([counts[~rare], counts[rare].sum()[None]]),
        torch.cat([probs[~rare], probs[rare].sum()[None]]),
    )


def test_two_draws_in_a_row_are_independent():
    """The joint distribution of the tokens of two neighbouring positions is the product of their distributions."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5], dtype=torch.float64)
    taken = (many_positions(21, 1 << 17, 4) + logits).argmax(-1)
    counts = torch.bincount(taken[::2] * 4 + taken[1::2], minlength=16)
    p = logits.softmax(-1)
    assert fits(counts, torch.outer(p, p)) > FALSE_ALARM


def test_uniform_is_uniform_and_independent_of_the_next():
    v = torch.tensor([uniform(3, i, stream=ACCEPT) for i in range(1 << 16)], dtype=torch.float64)
    cells = (v[:-1] * 16).long() * 16 + (v[1:] * 16).long()
    assert fits(torch.bincount(cells, minlength=256), torch.ones(256)) > FALSE_ALARM


def test_the_tests_see_a_bad_noise():
    """A generator with a short period, and one that leans a little, both fail by a wide margin."""
    leaning = v_of(gumbel(0, 0, MANY)) ** 1.05
    assert fits(torch.histc(leaning, bins=256, min=0, max=1), torch.ones(256)) < FALSE_ALARM
    v = v_of(gumbel(0, 0, 64)).repeat(MANY // 64)
    cells = (v[:-1] * 16).long() * 16 + (v[1:] * 16).long()
    assert fits(torch.bincount(cells, minlength=256), torch.ones(256)) < FALSE_ALARM
