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
    behind = rng.randrange(batch + 1)  # so many sequences may begin where the state has one, in any order
    ids = [[rng.randrange(100) for _ in range(width)] for _ in range(batch)]
    starts = [rng.randrange(100) for _ in range(batch)]
    lengths = [rng.randrange(100, 200) for _ in range(behind)]
    last = [[rng.randrange(1000), rng.randrange(1000)] for _ in range(behind)]
    blocks = [torch.randint(-1, 300, (batch, width), device=DEVICE) for _ in range(2)]
    header, sources = np.zeros(HEADER, dtype=np.int64), np.zeros((batch, SOURCES), dtype=np.int64)
    state = torch.tensor(lengths, dtype=torch.int64, device=DEVICE), torch.tensor(last, device=DEVICE).view(behind, 2)
    rows = [rng.randrange(-1, behind) for _ in range(behind)]  # -1: as sent
    write_state(header, sources, *state, reads, rows)
    sent = [torch.tensor(each, device=DEVICE) for each in (ids, starts)]
    for b in range(batch):
        if b < behind and rows[b] >= 0:
            ids[b][:reads] = [min(token, MAX_ID) for token in last[rows[b]][2 - reads :]]
            starts[b] = lengths[rows[b]] - reads
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


@pytest.mark.skipif(DEVICE == "cuda", reason="watches what is written on the host")
def test_some_texts_of_a_state_and_newcomers_are_fetched_and_then_all_from_where_they_are_left():
    from outrider.core.draws import Draws
    from outrider.core.sequence import Span
    from outrider.kvcache.block_tables import BlockTables
    from outrider.kvcache.pages import PagePool
    from outrider.runners.cuda_graphs import BatchShape
    from outrider.runners.device_state import DeviceState
    from outrider.runners.pass_inputs import PassInputs

    pool = PagePool(8)
    for seq_id in range(1, 5):
        pool.open(seq_id, ())
        assert pool.reserve(seq_id, 16)
    inputs = PassInputs(BatchShape(4, 1), BlockTables(pool, 8, 64, torch.device("cpu")), MAX_ID)
    sent: list[int] = []
    inputs._inputs.send = lambda: sent.append(inputs._inputs.current)
    before = DeviceState(torch.tensor([10, 20, 30]), torch.tensor([[1, 2], [3, 4], [5, 6]]))
    texts = [[7, 8, 9], [11]]
    behind = before.take([2, 0]).joined(texts)
    spans, draws = [Span(seq_id, 0, (0,)) for seq_id in (3, 1, 4, 2)], Draws([7, 8, 9, 10], [0.0, 0.5, 0.0, 1.0])

    def given() -> list[list[int]]:
        inputs.fetch()
        parts = inputs.given
        return [each.view(-1).tolist() for each in (parts.ids, parts.starts, parts.seeds, parts.table_ids)]

    assert not inputs.are_fetched
    inputs.load(spans, behind, draws)
    first = given()
    assert first[:3] == [[6, 2, 9, 11], [29, 9, 2, 0], [7, 8, 9, 10]]
    assert inputs.are_fetched
    inputs.load(spans, before.take([2, 0]).joined(texts), draws)
    assert len(sent) == 1
    own = DeviceState(torch.tensor([31, 11, 4, 2]), torch.tensor([[6, 60], [2, 20], [9, 90], [11, 110]]))
    for lengths in ([31, 11, 4, 2], [32, 12, 5, 3]):
        own.lengths.copy_(torch.tensor(lengths))
        inputs.load_again(own)
        assert given() == [[60, 20, 90, 110], [n - 1 for n in lengths], *first[2:]]
    assert len(sent) == 2
    inputs.load(spans, own, draws)  # as they are there by now
    assert len(sent) == 2
    inputs.load(spans, behind, draws)
    assert given() == first
    assert len(sent) == 3
    # one ends and another begins in a batch of one size: the pass leaves its texts where it has fetched them
    inputs.load(spans, own.take([3, 1, 0]).joined(texts[:1]), draws)
    assert given()[:2] == [[110, 20, 60, 9], [2, 11, 31, 2]]
    inputs.load_again(own)
    assert given()[:2] == [[60, 20, 90, 110], [31, 11, 4, 2]]
    assert len(sent) == 5
    inputs.load_again(own)
    assert len(sent) == 5


@pytest.mark.skipif(DEVICE == "cuda", reason="watches what is written on the host")
@pytest.mark.parametrize("before", [False, True])
def test_a_head_fetches_texts_and_reads_as_far_back_as_there_is_room(before: bool):
    """Against what is read of texts that the host knows; the same sequences are sent once."""
    from outrider.core.sampling import SamplingParams
    from outrider.core.sequence import Sequence
    from outrider.runners.device_state import DeviceState
    from outrider.runners.draft_batch import DraftBatch, DraftTexts
    from outrider.runners.native import NativeRunner
    from outrider.testing.synthetic import synthetic_pair

    target = NativeRunner(synthetic_pair("tiny").draft, 256, context=128)
    target.keep_taps((0, 1))
    model, width = target.model, 4
    assert model.kept is not None
    model.kept.tokens.copy_(torch.arange(len(model.kept.tokens)))
    model.kept.features.copy_(torch.randn_like(model.kept.features))
    seqs = [Sequence(i, [1] * 5, 5, SamplingParams(temperature=0.5 * i), seed=i) for i in range(2)]
    for seq in seqs:
        target.pool.open(seq.id, ())
        assert target.pool.reserve(seq.id, 64)
    ids = model.tables.table_ids([0, 1])
    plain = DraftBatch(model, 2, None, sampled=False)
    model.fused = True
    fused = DraftBatch(model, 2, None, sampled=False)
    state, sent, send = DeviceState(torch.tensor([3, 20]), torch.tensor([[1, 2], [3, 4]])), [], fused._inputs.send
    fused._inputs.send = lambda: sent.append(send())
    for lengths, last in (((3, 20), (2, 4)), ((4, 23), (7, 8)), ((20, 40), (9, 9))):
        state.lengths.copy_(torch.tensor(lengths))
        state.last[:, 1] = torch.tensor(last)
        model.fused = True
        fused.fill_texts(DraftTexts(ids, seqs, [0, 0], state))
        fused.fetch()
        got = fused.unread(width, before=before)
        model.fused = False
        plain.fill(ids, lengths, last, [0, 0], [0, 1], [0, 0])
        for one, other in zip(got, plain.unread(width, before=before), strict=True):
            assert torch.equal(one, other)
        assert fused.temperatures.tolist() == [0.0, 0.5]
        assert fused.seeds.tolist() == [0, 1]
        assert got.counts.tolist() == [min(length - 1 + before, width) for length in lengths]
    assert len(sent) == 1
    model.fused = True
    fused.fill_texts(DraftTexts(ids[::-1], seqs[::-1], [0, 0], state))
    assert fused.seeds.tolist() == [1, 0]
    assert len(sent) == 2


@pytest.mark.skipif(DEVICE == "cuda", reason="watches what is written on the host")
def test_a_head_fetches_some_texts_of_a_state_and_knows_newcomers():
    """Behind a join; the draft after that fetches all of them from where the round has left them."""
    from outrider.core.sampling import SamplingParams
    from outrider.core.sequence import Sequence
    from outrider.runners.device_state import DeviceState
    from outrider.runners.draft_batch import DraftBatch, DraftTexts
    from outrider.runners.native import NativeRunner
    from outrider.testing.synthetic import synthetic_pair

    model = NativeRunner(synthetic_pair("tiny").draft, 256, context=128).model
    model.fused = True
    seqs = [Sequence(i, [*range(10, 16 + i)], 5, SamplingParams(), seed=i) for i in range(3)]
    batch, sent = DraftBatch(model, 4, None, sampled=False), list[None]()
    send, batch._inputs.send = batch._inputs.send, lambda: sent.append(send())

    def fetched() -> list[list[int]]:
        batch.fetch()
        return [each[:3].tolist() for each in (batch.lengths, batch.last, batch.starts)]

    before = DeviceState(torch.tensor([30, 40, 50, 60]), torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]]))
    joined = before.take([3, 1]).joined([seqs[2].tokens])
    assert joined.newcomers == 1
    texts = DraftTexts([0, 1, 2], seqs, [0, 0, 0], joined)
    batch.fill_texts(texts)
    assert fetched() == [[60, 40, 8], [8, 4, 17], [59, 39, 7]]
    before.lengths.add_(2)  # as the round leaves them, in the very same place
    batch.fill_texts(texts)
    assert len(sent) == 1
    assert fetched() == [[62, 42, 8], [8, 4, 17], [61, 41, 7]]
    assert not batch.fetch_again(joined, 3)
    own = DeviceState(torch.tensor([63, 43, 9]), torch.tensor([[1, 21], [1, 22], [1, 23]]))
    for _ in range(2):
        assert batch.fetch_again(own, 3)
        assert fetched() == [[63, 43, 9], [21, 22, 23], [62, 42, 8]]
    assert len(sent) == 2
    assert batch.seeds[:3].tolist() == [0, 1, 2]
