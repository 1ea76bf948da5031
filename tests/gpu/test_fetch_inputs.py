"""What a pass fetches by address: where a state has texts, drafts from the blocks they were made in, and no more."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.gpu
DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
MAX_ID = 500


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_inputs_are_completed_by_what_the_device_knows(seed: int, reads: int):
    from outrider.kernels.triton_inputs import HEADER, SOURCES, fetch_inputs, write_draft, write_state

    rng = random.Random(seed)
    batch, width = rng.choice([1, 2, 8]), rng.choice([4, 8, 32])
    behind = rng.randrange(batch + 1)  # so many sequences begin where the state has them
    ids = [[rng.randrange(100) for _ in range(width)] for _ in range(batch)]
    starts = [rng.randrange(100) for _ in range(batch)]
    lengths = [rng.randrange(100, 200) for _ in range(behind)]
    last = [[rng.randrange(1000), rng.randrange(1000)] for _ in range(behind)]
    blocks = [torch.randint(-1, 300, (batch, width), device=DEVICE) for _ in range(2)]
    header, sources = np.zeros(HEADER, dtype=np.int64), np.zeros((batch, SOURCES), dtype=np.int64)
    state = torch.tensor(lengths, dtype=torch.int64, device=DEVICE), torch.tensor(last, device=DEVICE).view(behind, 2)
    write_state(header, sources, *state, reads)
    sent = [torch.tensor(each, device=DEVICE) for each in (ids, starts)]
    for b in range(batch):
        if b < behind:
            ids[b][:reads] = [min(token, MAX_ID) for token in last[b][2 - reads :]]
            starts[b] = lengths[b] - reads
        if rng.random() < 0.7:
            block, row, count = rng.choice(blocks), rng.randrange(batch), rng.randrange(width - reads)
            write_draft(sources[b], block[row].data_ptr(), reads, count)
            ids[b][reads : reads + count] = block[row, :count].tolist()
    fetch_inputs(*sent, *(torch.from_numpy(each).to(DEVICE) for each in (header, sources)), MAX_ID)
    assert [each.tolist() for each in sent] == [ids, starts]
