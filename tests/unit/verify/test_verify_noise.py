"""The noise's definition, held to the letter: a seed written down today gives the same text for ever."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.verify.noise import DRAFT, TARGET, gumbel, gumbel_rows, round_seed, uniform

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15
seeds = st.integers(0, WORD - 1)
places = st.integers(0, 1 << 40)


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 % WORD
    x ^= x >> 27
    x = x * 0x94D049BB133111EB % WORD
    return x ^ x >> 31


def by_the_book(seed: int, position: int, stream: int, token: int) -> float:
    """The definition of the module's docstring, in Python's own integers."""
    key = mix((mix((mix((seed + GOLDEN) % WORD) + position * GOLDEN) % WORD) + stream * GOLDEN) % WORD)
    return ((mix((key + token * GOLDEN) % WORD) >> 12) + 0.5) * 2.0**-52


@settings(deadline=None, derandomize=True, max_examples=60)
@given(seed=seeds, position=places, stream=st.integers(0, 9), vocab=st.integers(1, 300))
def test_the_noise_is_its_definition(seed: int, position: int, stream: int, vocab: int):
    wanted = [-math.log(-math.log1p(-by_the_book(seed, position, stream, t))) for t in range(vocab)]
    got = gumbel(seed, position, vocab, stream=stream)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, torch.tensor(wanted, dtype=torch.float64), rtol=1e-14, atol=1e-14)
    assert uniform(seed, position, stream=stream) == by_the_book(seed, position, stream, 0)


def test_known_values():
    """Written down from the definition; a change here breaks every seed anybody kept."""
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF  # splitmix64's first output for seed 0, as published
    assert by_the_book(0, 0, TARGET, 0) == 0.09899374104691583
    assert by_the_book(WORD - 1, 12345, DRAFT, 49151) == 0.8090292160357765
    assert round_seed(7, 100) == 0x1BBC67786EB66595


def test_a_tokens_noise_does_not_depend_on_the_vocabulary_or_on_the_other_rows():
    small, large = gumbel(5, 6, 1000), gumbel(5, 6, 150_001)
    assert torch.equal(small, large[:1000])
    rows = gumbel_rows([4, 5, 5, 9], [1, 6, 7, 2], 1000)
    assert torch.equal(rows[1], small)
    assert torch.equal(rows[2], gumbel(5, 7, 1000))
    assert rows.shape == (4, 1000)
    assert gumbel_rows([], [], 10).shape == (0, 10)


def test_the_extremes_of_v_give_finite_noise():
    smallest, largest = 0.5 * 2.0**-52, 1 - 0.5 * 2.0**-52
    assert 0 < smallest < largest < 1
    assert -math.log(-math.log1p(-smallest)) == pytest.approx(36.737, abs=1e-3)
    assert -math.log(-math.log1p(-largest)) == pytest.approx(-3.604, abs=1e-3)
    many = gumbel(0, 0, 1 << 20)
    assert bool(many.isfinite().all())


def test_what_is_computed_in_inference_mode_serves_outside_it():
    with torch.inference_mode():
        inside = gumbel(1, 2, 777)
    assert torch.equal(inside, gumbel(1, 2, 777))


def test_seeds_and_positions_go_in_pairs():
    with pytest.raises(ValueError, match="shorter"):
        gumbel_rows([1, 2], [3], 4)


@pytest.mark.gpu
def test_a_gpu_has_the_same_noise():
    ours = gumbel_rows([1, 2, WORD - 1], [0, 77, 1 << 40], 128_256)
    theirs = gumbel_rows([1, 2, WORD - 1], [0, 77, 1 << 40], 128_256, device="cuda")
    assert theirs.is_cuda
    torch.testing.assert_close(theirs.cpu(), ours, rtol=1e-14, atol=1e-14)
