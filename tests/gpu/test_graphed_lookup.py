"""Captured lookups against the plain functions, over rounds in which texts grow, move, end and are replaced."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outrider.runners.device_state import DeviceState
from outrider.runners.text_store import AnswerRing, LookupRow, TextStore, pack_limits

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, CPU = torch.device("cpu" if INTERPRETED else "cuda"), torch.device("cpu")
SLOTS, K, MATCH, VOCAB, WIDTH = 6, 5, 4, 5, 4


class Again:
    """Takes the place of a captured graph in Triton's interpreter: its launches run again."""

    def __init__(self, work: Callable[[], None], pool: Any, name: str = "") -> None:
        self.replay = work


def captured(ring: AnswerRing) -> TextStore:
    """A store whose lookups are captured."""
    from outrider.runners.graphed_lookup import GraphedLookups

    store = TextStore(SLOTS, ring, max_batch=SLOTS, k=K, max_match=MATCH, device=DEVICE)
    store._graphs = store._graphs or GraphedLookups(SLOTS, ring.history, k=K, max_match=MATCH)
    return store


class Rounds:
    """The same texts, answers and lookups in two stores; of some texts the host is a round behind."""

    def __init__(self, seed: int, ring_tokens: int) -> None:
        self.rng = random.Random(seed)
        self.rings = [AnswerRing(ring_tokens, 3, device) for device in (CPU, DEVICE)]
        self.stores = [
            TextStore(SLOTS, self.rings[0], max_batch=SLOTS, k=K, max_match=MATCH, device=CPU),
            captured(self.rings[1]),
        ]
        self.texts: dict[int, list[int]] = {}

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def begin(self, slot: int, length: int) -> None:
        if slot in self.texts and self.rng.random() < 0.7:
            for ring in self.rings:
                ring.add("", self.texts[slot][-20:])
        self.texts[slot] = self.tokens(length)
        for store in self.stores:
            store.write([(slot, 0, self.texts[slot])])

    def look_up(self, slots: list[int], *, ahead: bool) -> None:
        """Look up these texts' ends in both stores; ahead: only the device knows what a round has given them."""
        rng, count = self.rng, len(slots)
        gained = [self.tokens(rng.randrange(1, WIDTH + 1)) for _ in slots] if ahead else [[]] * count
        order = rng.sample(range(count + 1), count)  # of the texts in the state, which holds another
        state = self.state(slots, gained, order) if ahead else [None, None]
        rows = [
            LookupRow(slot, 0, -1, 0, 0, rng.randrange(K + 1), len(self.texts[slot]), 1 + order[i] if ahead else 0)
            for i, slot in enumerate(slots)
        ]
        limits = np.array([[[rng.randrange(K + 1) for _ in range(MATCH + 1)] for _ in range(2)] for _ in slots])
        limits = pack_limits(limits, np.array([rng.random() for _ in slots])[:, None, None])
        plain, found = (
            store.look_up(rows, limits, where).array() for store, where in zip(self.stores, state, strict=True)
        )
        np.testing.assert_array_equal(found, plain)
        for slot, more in zip(slots, gained, strict=True):
            self.texts[slot] += more
        if ahead:
            self.look_up_again(slots)
            states = self.look_up_again(slots)
            for _ in range(2):
                self.look_up_again(slots, states)
            for ring in self.rings:
                ring.add("", self.texts[slots[0]][-9:])
            self.look_up_again(slots, states)

    def look_up_again(self, slots: list[int], within: list[DeviceState] | None = None) -> list[DeviceState]:
        """The last lookup once more in both stores, behind a round of just these texts, in their order.

        within: the states to write where that leaves them, as a repeated pass does.
        """
        gained = [self.tokens(self.rng.randrange(1, WIDTH + 1)) for _ in slots]
        longest = max(len(self.texts[slot]) for slot in slots)
        states = self.state(slots, gained, list(range(len(slots))))
        if within is not None:
            for state, new in zip(within, states, strict=True):
                for part, more in zip(state.held, new.held, strict=True):
                    part.copy_(more)
            states = within
        found = [store.look_up_again(len(slots), longest, s) for store, s in zip(self.stores, states, strict=True)]
        for slot, more in zip(slots, gained, strict=True):
            self.texts[slot] += more
        assert found[0] is not None
        assert found[1] is not None
        np.testing.assert_array_equal(found[1].array(), found[0].array())
        return states

    def state(self, slots: list[int], gained: list[list[int]], order: list[int]) -> list[DeviceState]:
        count = len(slots) + 1
        lengths, last, tokens = torch.zeros(count), torch.full((count, 2), 7), torch.full((count, WIDTH), 8)
        accepted = torch.full((count,), 2)
        for slot, more, at in zip(slots, gained, order, strict=True):
            lengths[at], accepted[at], last[at, 1] = len(self.texts[slot]) + len(more), len(more) - 1, more[-1]
            tokens[at, 1 : len(more)] = torch.tensor(more[:-1])
        return [
            DeviceState(*(part.long().to(device) for part in (lengths, last, tokens, accepted)))
            for device in (CPU, DEVICE)
        ]


@pytest.mark.parametrize("ring_tokens", [0, 64, 3000])
def test_captured_lookups_find_what_the_plain_functions_find(ring_tokens: int, monkeypatch: pytest.MonkeyPatch):
    from outrider.kernels import triton_lookup
    from outrider.runners import graphed_lookup

    if INTERPRETED:
        monkeypatch.setattr(graphed_lookup, "capture", Again)
        monkeypatch.setattr(triton_lookup, "MAX_PROGRAMS", 2)
        monkeypatch.setattr(triton_lookup, "MIN_PROGRAMS", 2)
    rounds = Rounds(ring_tokens, ring_tokens)
    moved = {store._texts.data_ptr() for store in rounds.stores[1:]}
    for slot in range(SLOTS):
        rounds.begin(slot, 5 + 9 * slot)
    for number in range(18):
        if number % 7 == 3:
            rounds.begin(number % SLOTS, 1100 if number == 10 else 12)  # beyond the room there is at first
        rounds.look_up(rounds.rng.sample(range(SLOTS), 1 + number % SLOTS), ahead=number % 4 > 0)
        moved.add(rounds.stores[1]._texts.data_ptr())
    assert len(moved) > 1
    expected = [row[: len(rounds.texts[slot])] for slot, row in enumerate(rounds.stores[1]._texts.tolist())]
    assert expected == [rounds.texts[slot] for slot in range(SLOTS)]


@pytest.mark.skipif(INTERPRETED, reason="nothing is captured there")
def test_what_was_found_is_copied_before_the_next_lookup_overwrites_it():
    rounds = Rounds(5, 64)
    rounds.begin(0, 40)
    rounds.begin(1, 41)
    limits = np.full((1, 2, MATCH + 1), K)
    for store in rounds.stores:
        found = [
            store.look_up([LookupRow(slot, 0, -1, 0, 0, K, len(rounds.texts[slot]), 0)], limits) for slot in (0, 1, 0)
        ]
        copies = [each.array().tolist() for each in found]
        assert copies[0] == copies[2] != copies[1]
