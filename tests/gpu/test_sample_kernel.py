"""The choosing kernel against the noise and the choice of the plain verifier."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.noise import gumbel_rows

pytestmark = pytest.mark.gpu


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
        logits.cuda(),
        torch.tensor(temperatures, dtype=torch.float64).cuda(),
        torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds]).cuda(),
        torch.tensor(positions).cuda(),
    )
    assert got.tolist() == expected


def test_among_equals_the_lowest_id_is_taken():
    from outrider.kernels.triton_sample import choose

    logits = torch.zeros(1, 10_000).cuda()
    logits[0, [5, 4100, 9999]] = 1.0
    zeros = torch.zeros(1, dtype=torch.int64).cuda()
    assert choose(logits, torch.zeros(1, dtype=torch.float64).cuda(), zeros, zeros).tolist() == [5]
