"""Some of a state's sequences, and newcomers: what is gathered when asked for is what indexing at once would give."""

from __future__ import annotations

import random

import torch

from outrider.runners.device_state import DeviceState


def state_of(batch: int, seed: int) -> DeviceState:
    made = torch.Generator().manual_seed(seed)
    parts = [torch.randint(100, shape, generator=made) for shape in ((batch,), (batch, 2), (batch, 4), (batch,))]
    return DeviceState(*parts, torch.rand(batch, 4, 6, generator=made), tuple(range(batch)))


def test_taken_and_joined_again_and_again():
    """Against lists of (length, last two tokens), over every order of leaving and joining."""
    for seed in range(40):
        rng = random.Random(seed)
        state = state_of(rng.randrange(1, 6), seed)
        ends = [(n, *last) for n, last in zip(state.lengths.tolist(), state.last.tolist(), strict=True)]
        features = state.features
        assert features is not None
        rows, known = [*range(len(state))], True
        for _ in range(rng.randrange(1, 5)):
            if rng.random() < 0.5 and len(ends) > 1:
                chosen = rng.sample(range(len(ends)), rng.randrange(1, len(ends) + 1))
                state, ends, rows = state.take(chosen), [ends[i] for i in chosen], [rows[i] for i in chosen if known]
            else:
                texts = [[rng.randrange(100) for _ in range(rng.randrange(1, 4))] for _ in range(rng.randrange(1, 3))]
                state, known = state.joined(texts), False
                ends += [(len(text), text[-2] if len(text) > 1 else 0, text[-1]) for text in texts]
        assert len(state) == len(ends)
        assert state.lengths.tolist() == [length for length, *_ in ends]
        assert state.last.tolist() == [[*last] for _, *last in ends]
        if known:
            assert state.features is not None
            assert torch.equal(state.features, features[rows])
            assert state.drafted == tuple(rows)
        elif any(not isinstance(row, int) for row in state.rows or ()):
            assert state.tokens is state.accepted is state.features is None


def test_all_of_them_are_the_state_itself():
    state = state_of(3, 0)
    assert state.take(range(3)) is state
    assert state.origin is state
    assert len(state.held) == 5


def test_what_is_copied_stays_where_the_state_is_overwritten():
    state = state_of(3, 1)
    lengths, last = state.lengths.tolist(), state.last.tolist()
    copies = [state.copied(), state.take([2, 0]).copied(), state.joined([[7, 8, 9]]).copied()]
    state.lengths.zero_()
    state.last.zero_()
    assert [each.lengths.tolist() for each in copies] == [lengths, [lengths[2], lengths[0]], [*lengths, 3]]
    assert [each.last.tolist() for each in copies] == [last, [last[2], last[0]], [*last, [8, 9]]]


def test_nothing_is_gathered_before_it_is_asked_for():
    """A pass fetches from the origin: what is written there in between counts."""
    state = state_of(3, 2)
    taken = state.take([1]).joined([[4, 5]])
    assert taken.origin is state
    assert taken.rows == [1, (2, 4, 5)]
    assert all(one is other for one, other in zip(taken.held, state.held, strict=True))
    state.lengths.fill_(50)
    assert taken.lengths.tolist() == [50, 2]
    state.lengths.fill_(60)
    assert taken.lengths.tolist() == [50, 2]  # once
