"""The choosing kernel against the noise and the choice of the plain verifier."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.core import SamplingParams, Sequence
from outrider.verify.noise import gumbel_rows

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("vocab", [97, 9000] if DEVICE == "cpu" else [97, 4096, 49152, 128256])
def test_the_kernel_takes_what_the_plain_rule_takes(vocab: int):
    from outrider.kernels.triton_sample import choose

    g = torch.Generator().manual_seed(vocab)
    rows, seeds = 24, [0, 7, 2**63 + 11, 2**64 - 1] * 6
    logits = torch.randn(rows, vocab, generator=g) * 3
    positions = [int(p) for p in torch.randint(0, 40_000, (rows,), generator=g)]
    temperatures = [0.0, 0.6, 1.0, 2.5, 1.0, 0.1] * 4
    noise = gumbel_rows(seeds, positions, vocab)
    expected = [
        int((x.double() if t == 0 else x.double() / t + n).argmax())
        for x, t, n in zip(logits, temperatures, noise, strict=True)
    ]
    got = choose(
        logits.to(DEVICE),
        torch.tensor(temperatures, dtype=torch.float64).to(DEVICE),
        torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds]).to(DEVICE),
        torch.tensor(positions).to(DEVICE),
    )
    assert got.tolist() == expected
    assert choose(logits.to(DEVICE)).tolist() == [int(x.argmax()) for x in logits]


def test_among_equals_the_lowest_id_is_taken():
    from outrider.kernels.triton_sample import choose

    logits = torch.zeros(1, 10_000).to(DEVICE)
    logits[0, [5, 4100, 9999]] = 1.0
    zeros = torch.zeros(1, dtype=torch.int64).to(DEVICE)
    assert choose(logits, torch.zeros(1, dtype=torch.float64).to(DEVICE), zeros, zeros).tolist() == [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_offers_nothing_yields_no_token(temperature):
    from outrider.kernels.triton_sample import NOTHING, choose

    logits = torch.randn(5, 9000)
    logits[1, 4321] = torch.nan
    logits[2] = -torch.inf
    logits[3, 8999] = torch.inf
    zeros = torch.zeros(5, dtype=torch.int64)
    got = choose(
        logits.to(DEVICE), torch.full((5,), temperature, dtype=torch.float64).to(DEVICE), zeros.to(DEVICE),
        zeros.to(DEVICE),
    ).tolist()  # fmt: skip
    assert got[1:4] == [NOTHING] * 3
    assert got[0] >= 0
    assert got[4] >= 0


CUTS = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.8, 0.0), (0, 1.0, 0.1), (50, 0.95, 0.02), (1, 1.0, 0.0)]


@pytest.mark.parametrize("vocab", [97, 5000] if DEVICE == "cpu" else [97, 5000, 49152, 128256])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("head", [8, 1024], ids=["walked", "told by the best"])
def test_truncation_keeps_what_the_plain_rule_keeps(vocab, temperature, head):
    """Top-k to the token; top-p and min-p up to tokens whose place is a matter of rounding."""
    from outrider.kernels.triton_sample import cutoffs
    from outrider.verify.law import shape_logits

    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(CUTS), vocab, generator=g) * 4
    k, p, m = (list(each) for each in zip(*CUTS, strict=True))
    got = cutoffs(
        logits.to(DEVICE), torch.full((len(CUTS),), temperature).to(DEVICE), torch.tensor(k).to(DEVICE),
        torch.tensor(p, dtype=torch.float64).to(DEVICE), torch.tensor(m).to(DEVICE), head=head,
    ).cpu()  # fmt: skip
    for row, (top_k, top_p, min_p) in enumerate(CUTS):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=0)
        shaped = shape_logits(logits[row : row + 1], Sequence(0, [1], 1, params, 0), [()])[0]
        kept, judge = logits[row] >= got[row], shaped > -torch.inf
        different = (kept != judge).sum()
        assert different <= (0 if top_p == 1 and min_p == 0 else 1), (row, int(kept.sum()), int(judge.sum()))
        assert bool(kept[logits[row].argmax()])


def test_rows_without_a_law_are_left_alone():
    from outrider.kernels.triton_sample import cutoffs

    logits = torch.randn(3, 500)
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    ones = torch.ones(3)
    got = cutoffs(
        logits.to(DEVICE), torch.tensor([0.0, 1.0, 1.0]).to(DEVICE), torch.full((3,), 5).to(DEVICE),
        (ones * 0.5).double().to(DEVICE), (ones * 0.1).to(DEVICE),
    )  # fmt: skip
    assert got.tolist() == [-torch.inf] * 3
