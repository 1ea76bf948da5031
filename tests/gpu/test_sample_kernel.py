"""The choosing and the truncating kernel against the noise, the choice and the distribution of the plain verifier."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.sampling import NO_TOKEN, SamplingParams
from outrider.core.sequence import Sequence
from outrider.verify.noise import gumbel_rows
from outrider.verify.probs import process_logits

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("vocab", [97, 9000] if DEVICE == "cpu" else [97, 4096, 49152, 128256])
def test_the_kernel_takes_what_the_plain_rule_takes(vocab: int):
    from outrider.kernels.triton_sample import sample_tokens

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
    got = sample_tokens(
        logits.to(DEVICE),
        torch.tensor(temperatures, dtype=torch.float64).to(DEVICE),
        torch.tensor([s - (1 << 64) if s >> 63 else s for s in seeds]).to(DEVICE),
        torch.tensor(positions).to(DEVICE),
    )
    assert got.tolist() == expected
    assert sample_tokens(logits.to(DEVICE)).tolist() == [int(x.argmax()) for x in logits]


def test_among_equals_the_lowest_id_is_taken():
    from outrider.kernels.triton_sample import sample_tokens

    logits = torch.zeros(1, 10_000).to(DEVICE)
    logits[0, [5, 4100, 9999]] = 1.0
    zeros = torch.zeros(1, dtype=torch.int64).to(DEVICE)
    assert sample_tokens(logits, torch.zeros(1, dtype=torch.float64).to(DEVICE), zeros, zeros).tolist() == [5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_offers_nothing_yields_no_token(temperature: float):
    from outrider.kernels.triton_sample import sample_tokens

    logits = torch.randn(5, 9000)
    logits[1, 4321] = torch.nan
    logits[2] = -torch.inf
    logits[3, 8999] = torch.inf
    zeros = torch.zeros(5, dtype=torch.int64)
    got = sample_tokens(
        logits.to(DEVICE), torch.full((5,), temperature, dtype=torch.float64).to(DEVICE), zeros.to(DEVICE),
        zeros.to(DEVICE),
    ).tolist()  # fmt: skip
    assert got[1:4] == [NO_TOKEN] * 3
    assert got[0] >= 0
    assert got[4] >= 0


ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
CUTS = [
    {}, {"top_k": 5}, {"top_p": 0.9}, {"top_k": 40, "top_p": 0.8}, {"min_p": 0.1}, {"top_k": 1},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.02}, {"typical_p": 0.9}, {"typical_p": 0.2}, {"typical_p": 5e-324},
    {"top_k": 50, "top_p": 0.95, "min_p": 0.001, "typical_p": 0.7}, {"min_p": 0.01, "typical_p": 0.95},
]  # fmt: skip


def kept_there(
    logits: Tensor, temperatures: float | list[float], cuts: list[dict[str, Any]], num_top: int = 1024
) -> Tensor:
    """bool [R, vocab]: what the kernel keeps of each row."""
    from outrider.kernels.triton_truncate import Truncation, cutoffs

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([(ALL | cut)[name] for cut in cuts], dtype=dtype).to(DEVICE)

    each = torch.tensor(temperatures).expand(len(cuts)).contiguous().to(DEVICE)
    asked = Truncation(
        each, column("top_k", torch.int64), column("top_p", torch.float64), column("min_p", torch.float32),
        column("typical_p", torch.float64),
    )  # fmt: skip
    low, high = (end.cpu()[:, None] for end in cutoffs(logits.to(DEVICE), asked, num_top=num_top))
    return (logits >= low) & (logits <= high)


def kept_plainly(row: Tensor, temperature: float, cut: dict[str, Any]) -> Tensor:
    """bool [vocab]: what the plain rule keeps, in float64."""
    seq = Sequence(0, [1], 1, SamplingParams(temperature=temperature, seed=0, **cut), 0)
    return process_logits(row[None].double(), seq, [()])[0] > -torch.inf


@pytest.mark.parametrize("vocab", [97, 5000] if DEVICE == "cpu" else [97, 5000, 49152, 128256])
@pytest.mark.parametrize("temperature", [0.7] if DEVICE == "cpu" else [0.3, 1.0])
@pytest.mark.parametrize("num_top", [8, 1024], ids=["walked", "told by the best"])
def test_truncation_keeps_what_the_plain_rule_keeps(vocab: int, temperature: float, num_top: int):
    """Top-k to the token; the others up to a token whose place is a matter of rounding."""
    logits = torch.randn(len(CUTS), vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    for row, cut, kept in zip(logits, CUTS, kept_there(logits, temperature, CUTS, num_top), strict=True):
        judge = kept_plainly(row, temperature, cut)
        different = int((kept != judge).sum())
        assert different <= (0 if cut.keys() <= {"top_k"} else 1), (cut, int(kept.sum()), int(judge.sum()))
        assert "typical_p" in cut or bool(kept[row.argmax()])


def rows_of_trouble(vocab: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    made = {
        "noise": torch.randn(vocab, generator=g) * 3,
        "flat": torch.randn(vocab, generator=g) * 0.01,
        "whole numbers": torch.randn(vocab, generator=g).mul(2).round(),
        "all equal": torch.full((vocab,), -7.0),
        "one certain": torch.zeros(vocab).index_fill(0, torch.tensor([17]), 90.0),
        "one nearly certain": torch.zeros(vocab).index_fill(0, torch.tensor([17]), 12.0),
        "three ties, then all others": torch.zeros(vocab).index_fill(0, torch.tensor([4, 50, 90]), 6.0),
        "two left": torch.full((vocab,), -torch.inf).index_copy(0, torch.tensor([5, 95]), torch.tensor([1.0, 2.5])),
        "half ruled out": torch.randn(vocab, generator=g).mul(3).index_fill(0, torch.arange(0, vocab, 2), -torch.inf),
        "as wide as floats go": torch.linspace(-1.6e38, 1.6e38, vocab),
    }
    return {name: row[torch.randperm(vocab, generator=g)] for name, row in made.items()}


FEW = [(0.7, 0, 0.9), (0.7, 30, 0.05), (50.0, 2000, 0.9), (1e-30, 0, 0.9), (0.7, 0, 5e-324), (50.0, 0, 1 - 2**-53)]
MANY = list(product([1e-30, 0.7, 50.0], [0, 30, 2000], [5e-324, 0.05, 0.9, 1 - 2**-53]))


@pytest.mark.parametrize(("temperature", "top_k", "p"), FEW if DEVICE == "cpu" else MANY)
def test_typical_p_on_rows_made_to_trouble_it(temperature: float, top_k: int, p: float):
    """Between what the plain rule keeps of a millionth less and of a millionth more, ends rounded outwards."""
    rows, cut = rows_of_trouble(3000), {"top_k": top_k}
    kept = kept_there(torch.stack(list(rows.values())), temperature, [cut | {"typical_p": p}] * len(rows))
    for (name, row), got in zip(rows.items(), kept, strict=True):
        before = kept_plainly(row, temperature, cut)
        probs = (row.double().where(before, -torch.inf) / temperature).softmax(-1)
        far = (-probs.log() - torch.special.entr(probs).sum()).abs()
        less, more = (
            far[kept_plainly(row, temperature, cut | {"typical_p": each})].max() if each < 1 else torch.inf
            for each in (p - 1e-6 if p > 1e-6 else p, p + 1e-6)
        )
        assert bool(got[before & (far < less - 1e-5 * (1 + less))].all()), name
        assert not bool(got[~before | (far > more + 1e-5 * (1 + more))].any()), name
        assert bool(got.any()), name


def test_tokens_that_tie_beyond_the_best_count_too():
    """5000 share the fifth place: top-k 5 keeps them all, and top-p and typical-p see all of their mass."""
    logits = torch.zeros(3, 5003)
    logits[:, [7, 8, 4000]] = 7.0
    cuts = [{"top_k": 5, "top_p": 0.6}, {"top_k": 5, "typical_p": 0.6}, {"top_k": 5}]
    for row, cut, kept in zip(logits, cuts, kept_there(logits, 1.0, cuts), strict=True):
        assert torch.equal(kept, kept_plainly(row, 1.0, cut)), cut
        assert int(kept.sum()) == 5003 or "typical_p" in cut


@pytest.mark.parametrize("vocab", [1500] if DEVICE == "cpu" else [1500, 128256])
def test_what_a_row_keeps_does_not_depend_on_the_other_rows(vocab: int):
    from outrider.kernels.triton_truncate import Truncation, cutoffs

    g = torch.Generator().manual_seed(9)
    count = 5 if DEVICE == "cpu" else 200
    logits = (torch.randn(count, vocab, generator=g) * torch.tensor([0.1, 3.0]).repeat(count)[:count, None]).to(DEVICE)
    ones = torch.ones(count).to(DEVICE)
    asked = (ones, ones.long() * 900, ones.double() * 0.99, ones * 1e-9, ones.double() * 0.8)
    together = cutoffs(logits, Truncation(*asked))
    for rows in (slice(0, 1), slice(1, 2), slice(1, 4), slice(count // 2, count)):
        alone = cutoffs(logits[rows], Truncation(*(each[rows] for each in asked)))
        assert torch.equal(alone, together[:, rows])


def test_rows_without_a_distribution_are_left_alone():
    logits = torch.randn(4, 500)
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, 3] = torch.nan
    cut = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}
    kept = kept_there(logits, [0.0, 1.0, 1.0, 1.0], [cut] * 4)
    assert torch.equal(kept, ~logits.isnan())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_lies_between_the_ends_is_taken(temperature: float):
    from outrider.kernels.triton_sample import sample_tokens

    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(2))
    logits[4, 8000] = torch.nan
    low, high = (
        torch.tensor([-1.0, -torch.inf, 0.5, 9.0, -1.0, 0.25]),
        torch.tensor([0.5, 0.1, torch.inf, 9.5, 0.5, 0.3]),
    )
    seeds = list(range(6))
    noise = gumbel_rows(seeds, [3] * 6, 9000) * (temperature > 0)
    between = (logits >= low[:, None]) & (logits <= high[:, None])
    expected = (logits.double() + noise).masked_fill(~between, -torch.inf).argmax(-1).tolist()
    expected[3] = expected[4] = NO_TOKEN
    got = sample_tokens(
        logits.to(DEVICE), torch.full((6,), temperature, dtype=torch.float64).to(DEVICE),
        torch.tensor(seeds).to(DEVICE), torch.full((6,), 3).to(DEVICE), torch.stack([low, high]).to(DEVICE),
    )  # fmt: skip
    assert got.tolist() == expected
