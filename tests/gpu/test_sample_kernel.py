"""The choosing kernel against the noise and the choice of the plain verifier."""

from __future__ import annotations

import os

import pytest
import torch

from outrider.verify.noise import gumbel_rows

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("vocab", [97, 4096, 49152, 128256])
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
