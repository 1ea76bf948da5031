"""What a guard passes on of a repeated draft: the same places and lengths, or nothing, and whose fault that is."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.core.device_row import ConfidenceRow, DeviceRow
from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import LosslessError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, SequenceView
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.drafters.guard import GuardedDrafter
from outrider.runners.device_state import DeviceState

VOCAB, IDS = 64, (3, 5)
BLOCK, OTHER = torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)


class Unread(HostCopy):
    """Tokens that must not be waited for."""

    def list(self) -> Any:
        raise AssertionError("waited for")


def rows(block: torch.Tensor = BLOCK, lengths: Seq[int] = (4, 2)) -> list[Draft]:
    copy = Unread(block)
    return [Draft(DeviceRow(copy, i, n), source="again", known=True) for i, n in enumerate(lengths)]


class Again(Drafter):
    """Its `repeat` returns what it is told to, or calls it."""

    traits = Traits(name="again", max_tokens=4, drafts_ahead=True)

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.seen: list[tuple[RoundView, Seq[Draft]]] = []

    def propose(self, view: RoundView) -> Seq[Draft]:
        return [EMPTY] * len(view.seqs)

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> Any:
        self.seen.append((view, drafts))
        return self.answer(view) if callable(self.answer) else self.answer


def view() -> RoundView:
    seqs = [Sequence(i, [1, 2, 3], 2, SamplingParams(), 0) for i in IDS]
    return RoundView(seqs, [4, 2], DeviceState(torch.tensor([3, 3]), torch.tensor([[2, 3], [2, 3]])), False)


def failures(guard: GuardedDrafter) -> list[int]:
    return [guard.take_failures(i) for i in IDS]


def test_tokens_at_the_same_place_are_passed_on_and_not_read():
    made = Unread(BLOCK)
    drafter = Again(made)
    guard, shown, last = GuardedDrafter(drafter, VOCAB), view(), rows()
    assert guard.repeat(shown, last) is made
    assert failures(guard) == [0, 0]
    ((seen, drafts),) = drafter.seen
    assert drafts is last
    assert (list(seen.budgets), seen.state, seen.compared) == ([4, 2], shown.state, False)
    assert all(isinstance(seq, SequenceView) for seq in seen.seqs)
    assert [seq.id for seq in seen.seqs] == [*IDS]


@pytest.mark.parametrize("share", [None, 2])
def test_drafts_of_the_next_round_are_alike_but_for_their_block(share: int | None):
    made, last = Unread(BLOCK), rows()
    last = [replace(each, expected=1.5, share=share, tokens=row(at=i, count=4 - i, padded=share is not None))
            for i, each in enumerate(last)]  # fmt: skip
    for i, (old, new) in enumerate(zip(last, [each.again(made) for each in last], strict=True)):
        tokens = new.tokens
        assert isinstance(tokens, DeviceRow)
        assert (tokens.block, tokens.row, len(tokens), tokens.padded) == (made, i, 4 - i, share is not None)
        assert replace(new, tokens=old.tokens) == old


@pytest.mark.parametrize(
    ("parts", "fetched"),
    [
        ({}, True),
        ({"share": 1}, True),
        ({"tokens": (1, 2, 3, 4)}, False),
        ({"tokens": ()}, False),
        ({"parents": (-1, 0, 1, 2)}, False),
        ({"probs": torch.full((4, VOCAB), 1 / VOCAB)}, False),
        ({"known": False}, False),
        ({"confidence": ConfidenceRow(HostCopy(torch.ones(2, 4)), 0)}, True),  # it is read by the host alone
    ],
)
def test_which_drafts_a_pass_fetches(parts: dict[str, Any], fetched: bool):
    assert replace(rows()[0], **parts).is_fetched == fetched


def test_none_is_an_answer():
    guard = GuardedDrafter(Again(None), VOCAB)
    assert guard.repeat(view(), rows()) is None
    assert failures(guard) == [0, 0]


def test_a_drafter_does_not_repeat_unless_it_says_how():
    class Plain(Drafter):
        traits = Again.traits

        def propose(self, view: RoundView) -> Seq[Draft]:
            return [EMPTY] * len(view.seqs)

    guard = GuardedDrafter(Plain(), VOCAB)
    assert guard.repeat(view(), rows()) is None
    assert failures(guard) == [0, 0]


def raising(view: RoundView) -> Any:
    raise RuntimeError("repeat is broken")


def changing(view: RoundView) -> Any:
    view.seqs[0].tokens.append(5)


def row(block: HostCopy | None = None, at: int = 0, count: int = 4, *, padded: bool = False) -> DeviceRow:
    return DeviceRow(block or Unread(BLOCK), at, count, padded=padded)


BAD: dict[str, Any] = {
    "raises": raising,
    "changes a sequence": changing,
    "a number": 3,
    "a draft": rows()[0],
    "drafts": rows(),
    "nothing": [],
    "a tensor": BLOCK,
    "another tensor": HostCopy(OTHER),
    "a view of the same memory": HostCopy(BLOCK[:]),
}


@pytest.mark.parametrize("answer", BAD)
def test_anything_else_is_a_failure_and_no_draft(answer: str):
    guard = GuardedDrafter(Again(BAD[answer]), VOCAB)
    assert guard.repeat(view(), rows()) is None
    assert failures(guard) == [1, 1]


def test_the_last_drafts_must_lie_on_the_device_too():
    guard = GuardedDrafter(Again(HostCopy(BLOCK)), VOCAB)
    assert guard.repeat(view(), [Draft((1, 2, 3, 4)), Draft((1, 2))]) is None
    assert failures(guard) == [1, 1]


@pytest.mark.parametrize("part", ["lengths", "last"])
def test_a_drafter_that_writes_to_the_state_ends_it_all(part: str):
    def writes(view: RoundView) -> Any:
        getattr(view.state, part).add_(1)
        return HostCopy(BLOCK)

    with pytest.raises(LosslessError, match="repeat wrote to the target's tensors"):
        GuardedDrafter(Again(writes), VOCAB).repeat(view(), rows())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes(interrupt: type[BaseException]):
    def stops(view: RoundView) -> Any:
        raise interrupt

    with pytest.raises(interrupt):
        GuardedDrafter(Again(stops), VOCAB).repeat(view(), rows())
