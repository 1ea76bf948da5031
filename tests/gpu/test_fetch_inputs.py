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


@pytest.mark.skipif(DEVICE == "cuda", reason="watches what is written on the host")
def test_what_the_device_has_is_not_sent_again_and_the_new_state_is_fetched():
    from outrider.core.device_row import DeviceRow
    from outrider.core.draft import EMPTY, Draft
    from outrider.core.draws import Draws
    from outrider.core.host_copy import HostCopy
    from outrider.core.sequence import Span
    from outrider.kvcache.block_tables import BlockTables
    from outrider.kvcache.pages import PagePool
    from outrider.runners.cuda_graphs import BatchShape
    from outrider.runners.device_state import DeviceState
    from outrider.runners.pass_inputs import PassInputs

    pool = PagePool(8)
    for seq_id in (1, 2, 3):
        pool.open(seq_id, ())
        assert pool.reserve(seq_id, 16)
    inputs = PassInputs(BatchShape(2, 4), BlockTables(pool, 4, 64, torch.device("cpu")), MAX_ID)
    state = DeviceState(torch.tensor([10, 20]), torch.tensor([[1, 2], [3, 4]]))
    block, sent = torch.tensor([[5, 6, 7], [8, 9, 10]]), []
    inputs._inputs.send = lambda: sent.append(inputs._inputs.current)

    def load(ids: tuple[int, int], widths: tuple[int, int], temperature: float = 0.0) -> list[list[int]]:
        copy = HostCopy(block)
        drafts = [Draft(DeviceRow(copy, i, n - 1), known=True) if n > 1 else EMPTY for i, n in enumerate(widths)]
        spans = [Span(seq_id, 0, (0,), draft) for seq_id, draft in zip(ids, drafts, strict=True)]
        wanted, trees = inputs.load(spans, state, Draws([7, 8], [0.0, temperature]))
        assert trees is None
        inputs.fetch()
        given = inputs.given
        rows = wanted.tolist() if isinstance(wanted, torch.Tensor) else [*range(8)[wanted]]
        ends = [[*given.starts.tolist(), *given.widths.tolist()], given.temperatures.view(torch.float64).tolist()]
        return [*given.ids.tolist(), *ends, rows]

    first = load((1, 2), (4, 2))
    assert first == [[2, 5, 6, 7], [4, 8, 0, 0], [9, 19, 4, 2], [0.0, 0.0], [0, 1, 2, 3, 4, 5]]
    state.lengths.copy_(torch.tensor([13, 21]))
    state.last.copy_(torch.tensor([[7, 11], [4, 12]]))
    block.copy_(torch.tensor([[50, 60, 70], [80, 90, 100]]))
    again = load((1, 2), (4, 2))
    assert again == [[11, 50, 60, 70], [12, 80, 0, 0], [12, 20, 4, 2], [0.0, 0.0], [0, 1, 2, 3, 4, 5]]
    assert len(sent) == 1
    assert load((1, 2), (2, 2)) == [[11, 50, 0, 0], [12, 80, 0, 0], [12, 20, 2, 2], [0.0, 0.0], [0, 1, 4, 5]]
    assert load((1, 2), (2, 2), 0.5)[-2] == [0.0, 0.5]
    assert load((1, 3), (2, 2), 0.5)[0] == [11, 50, 0, 0]
    assert load((1, 3), (2, 1), 0.5)[1] == [12, 0, 0, 0]
    assert len(sent) == 5
    text = [Span(1, 5, (3,), Draft((9,))), Span(2, 6, (4,), Draft((8,)))]
    for _ in range(2):  # texts of the host are sent each time
        inputs.load(text, None, None)
    assert len(sent) == 7
