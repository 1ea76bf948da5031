"""Which rounds tell what one of their kind takes."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.draft import EMPTY
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.proposal import Proposal
from outrider.engine.round import InFlightRound
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.stats import Times


def launched(
    *, repeats: int = 0, repeated: bool = False, joined: bool = False, disturbed: bool = False
) -> InFlightRound:
    scheduled = [ScheduledSequence(Sequence(i, [1, 2], 1, SamplingParams(), 0), 1, 0, True) for i in range(2)]
    scheduled[-1].joined = joined
    scores: Any = None
    made = InFlightRound(scheduled, Proposal([EMPTY] * 2), [], scores, 0.0, Times())
    made.repeats, made.repeated, made.disturbed = repeats, repeated, disturbed
    return made


@pytest.mark.parametrize(
    ("done", "behind", "steady"),
    [
        (launched(repeats=3, repeated=True), launched(repeats=2, repeated=True), True),
        (launched(repeats=3, repeated=True, disturbed=True), launched(repeats=2, repeated=True), False),
        (launched(repeats=3), launched(repeats=2, repeated=True), False),  # launched anew
        (launched(repeats=3, repeated=True), launched(repeats=2), False),  # the next one is, meanwhile
        (launched(repeats=3, repeated=True), launched(joined=True), False),
        (launched(repeated=True), launched(joined=True), False),
        (launched(), launched(repeats=5), True),  # a drafter that repeats nothing: all its rounds are launched anew
        (launched(), launched(), True),
        (launched(repeats=3, repeated=True), None, True),
    ],
)
def test_steady_rounds(done: InFlightRound, behind: InFlightRound | None, steady: bool):
    assert done.is_steady(behind) == steady
