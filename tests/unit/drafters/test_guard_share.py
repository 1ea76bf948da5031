"""Drafts that share a round's budgets: taken where the round has room, and only within it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.drafters.guard import GuardedDrafter

TOKENS = torch.tensor([[5, 6, 7, -1], [8, -1, -1, -1], [9, 10, 11, 12]])


class Sharing(Drafter):
    traits = Traits(name="sharing", max_tokens=4, shares=True)

    def __init__(self, drafts: list[Draft]) -> None:
        self.drafts, self.views = drafts, list[RoundView]()

    def propose(self, view: RoundView) -> list[Draft]:
        self.views.append(view)
        return self.drafts


def drafts(share: int | None = 2, *, count: int = 4, padded: bool = True) -> list[Draft]:
    block = HostCopy(TOKENS)
    rows = [DeviceRow(block, i, count, padded=padded) for i in range(3)]
    return [Draft(row, None, None, "sharing", 1.0, True, None, share) for row in rows]


def guarded(made: list[Draft], room: list[int] | None, budgets: tuple[int, ...] = (2, 2, 2)) -> tuple[list[Draft], int]:
    """What is passed on, and how many failures there are."""
    seqs = [Sequence(i, [1, 2], 1, SamplingParams(), 0) for i in range(3)]
    guard = GuardedDrafter(Sharing(made), 1000)
    passed = guard.propose(RoundView(seqs, budgets, room=room))
    assert passed is not None
    assert guard.drafter.views[0].room == (None if room is None else tuple(room))
    return passed, sum(guard.take_failures(i) for i in range(3))


def test_drafts_longer_than_their_budgets_are_passed_on_where_they_share_them():
    made = drafts()
    assert guarded(made, [4, 4, 4]) == (made, 0)
    made[1] = EMPTY
    assert guarded(made, [4, 4, 4]) == (made, 0)


BAD: list[Any] = [
    (drafts(), None),
    (drafts(), [4, 3, 4]),
    (drafts(share=3), [4, 4, 4]),
    (drafts(share=-1), [4, 4, 4]),
    (drafts(padded=False), [4, 4, 4]),
]


@pytest.mark.parametrize(
    ("made", "room"), BAD, ids=["nothing is shared", "no room", "too much", "negative", "unpadded"]
)
def test_others_are_no_drafts(made: list[Draft], room: list[int] | None):
    passed, failures = guarded(made, room)
    assert passed == [EMPTY] * 3
    assert failures == 3


def test_ordinary_drafts_are_checked_as_ever_where_there_is_room():
    short = drafts(None, count=2, padded=False)
    assert guarded(short, [4, 4, 4]) == (short, 0)
    passed, failures = guarded(drafts(None, padded=False), [4, 4, 4])
    assert [len(each) for each in passed] == [2, 2, 2]
    assert failures == 3


def test_a_share_is_what_counts_as_scored_until_the_draft_is_known():
    draft = drafts()[0]
    assert (len(draft), draft.scored) == (4, 2)
    known = draft.without_padding()
    assert (tuple(known.tokens), known.share, known.scored) == ((5, 6, 7), None, 3)
    assert replace(draft, share=None).scored == 4
    assert draft.first_nodes(1).scored == 1


def test_a_view_of_some_sequences_has_their_room():
    view = RoundView([], [1, 2, 3], room=[4, 5, 6])
    assert replace(view, seqs=[Sequence(i, [1], 1, SamplingParams(), 0) for i in range(3)]).take([2, 0]).room == [6, 4]
