"""What a head notes of a repeated draft is what it would have noted of one that it was asked for."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.kvcache.pages import PagePool
from outrider.runners.device_state import DeviceState
from outrider.runners.head_reads import HeadReads

WIDTH = 5


class Texts:
    """Sequences whose pages are all reserved."""

    def __init__(self, lengths: list[int]) -> None:
        self.pool = PagePool(100)
        self.seqs = [Sequence(i, [1] * n, n, SamplingParams(), 0) for i, n in enumerate(lengths)]
        for seq in self.seqs:
            self.pool.open(seq.id, ())
            assert self.pool.reserve(seq.id, 400)

    def state(self, drafted: int | None) -> DeviceState:
        count = len(self.seqs)
        told = None if drafted is None else (drafted,) * count
        return DeviceState(torch.zeros(count).long(), torch.zeros(count, 2).long(), drafted=told)

    def complete(self, rng: random.Random, drafted: int) -> None:
        """The round in flight is known."""
        for seq in self.seqs:
            seq.tokens += [1] * (1 + rng.randint(0, drafted))
            seq.round += 1


def told_by(reads: HeadReads, texts: Texts) -> list[object]:
    """All that is asked of it, were the host up to date, or a round behind, now or a round later."""
    told: list[object] = [reads.gains(texts.seqs, texts.state(n)) for n in (None, 0, 3, WIDTH + 2)]
    for seq in texts.seqs:
        for later in (0, 1, 2):
            seq.round += later
            told += [reads.is_drafted(seq), *(reads.unread(seq, gained) for gained in (0, 1, 3, WIDTH))]
            seq.round -= later
    return told


@pytest.mark.parametrize("last", [False, True])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    repeats=st.integers(1, 20),
    drafted=st.integers(0, WIDTH - 1),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80, deadline=None)
def test_a_repeated_draft_is_noted_as_one_that_was_asked_for(
    last: bool, lengths: list[int], repeats: int, drafted: int, seed: int
):
    rng, texts = random.Random(seed), Texts(lengths)
    asked, repeated = (HeadReads(texts.pool, WIDTH, last=last) for _ in range(2))
    for reads in (asked, repeated):
        for gained in (0, 1 + drafted):  # a round by itself, and one behind it
            for seq in texts.seqs:
                reads.note(seq, gained)
    for _ in range(repeats):
        texts.complete(rng, drafted)
        for seq in texts.seqs:
            asked.note(seq, 1 + drafted)
        repeated.note_again(texts.seqs)
        assert told_by(repeated, texts) == told_by(asked, texts)
    texts.complete(rng, drafted)
    for reads in (asked, repeated):
        for seq in texts.seqs:
            reads.note(seq, 0)
    assert told_by(repeated, texts) == told_by(asked, texts)
    assert marks(repeated, texts) == marks(asked, texts)


def marks(reads: HeadReads, texts: Texts) -> list[int]:
    """From where a text would be read that shares the pages of another."""
    found: list[int] = []
    for seq in texts.seqs:
        twin = Sequence(seq.id + 50, list(seq.tokens), len(seq.tokens), SamplingParams(), 0)
        texts.pool.open(twin.id, ())
        texts.pool.table(twin.id)[:] = texts.pool.table(seq.id)
        found.append(reads.unread(twin, 0).start)
        texts.pool.table(twin.id).clear()
        texts.pool.close(twin.id)
    return found


def test_pages_that_only_repeated_drafts_have_read_are_marked_by_the_next_note():
    texts = Texts([10])
    reads = HeadReads(texts.pool, WIDTH, last=True)
    reads.note(texts.seqs[0], 0)
    reads.note(texts.seqs[0], 1)
    for _ in range(30):
        texts.complete(random.Random(0), 0)
        reads.note_again(texts.seqs)
    assert marks(reads, texts) == [0]
    reads.note(texts.seqs[0], 0)
    assert marks(reads, texts) == [32]
