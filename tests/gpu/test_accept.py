"""Where texts stand after a round: the kernel against the plain one, and the plain one against the verifier."""

from __future__ import annotations

import os
import random

import pytest
import torch

from outrider.core.draft import Draft
from outrider.core.sampling import NO_TOKEN
from outrider.kernels.accept import accept_chains
from outrider.verify.coupled import match

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_says_where_texts_stand(seed):
    from outrider.kernels.triton_accept import accept_chains as accept_on_device

    rng = random.Random(seed)
    sequences, max_width = rng.choice([1, 3, 40]), rng.choice([1, 2, 6, 32])
    widths = [rng.randint(1, max_width) for _ in range(sequences)]
    ids = torch.tensor([[rng.randrange(3) for _ in range(max_width)] for _ in range(sequences)])
    starts = torch.tensor([rng.randrange(1000) for _ in range(sequences)])
    choices = [[rng.choice([0, 0, 0, 1, 2, NO_TOKEN]) for _ in range(width)] for width in widths]
    for row, own in zip(ids, choices, strict=True):  # most guesses are right
        for i in range(1, len(own)):
            row[i] = own[i - 1] if rng.random() < 0.8 and own[i - 1] >= 0 else row[i]
    flat = torch.tensor([token for own in choices for token in own])
    given = (ids, starts, torch.tensor(widths), flat)
    lengths, last = accept_chains(*given)
    there = accept_on_device(*(t.to(DEVICE) for t in given))
    assert torch.equal(there[0].cpu(), lengths)
    assert torch.equal(there[1].cpu(), last)
    for i, own in enumerate(choices):
        row = ids[i].tolist()
        verdict = match(Draft(tuple(row[1 : widths[i]])), own)
        broken = verdict.tokens[-1] == NO_TOKEN and verdict.path
        text = [row[0], *(verdict.tokens[:-1] if broken else verdict.tokens)]
        assert lengths[i] == starts[i] + len(text)
        assert last[i].tolist() == [max(token, 0) for token in text[-2:]]
