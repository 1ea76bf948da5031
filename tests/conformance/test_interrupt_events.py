"""Where passes are launched: a completed round is emitted, though the launch of the next one was interrupted."""

from __future__ import annotations

from typing import Any

import pytest
from plain_decoding import assert_same, request, told_by
from test_rounds_behind_rounds import PLACES, WHOLE, Place, interrupt

from outrider.engine.events import Event
from outrider.engine.request import EngineLimits

PLACES_TOO = {
    "score": Place(lambda tried: tried.target, "score"),
    "propose": Place(lambda tried: tried.drafter, "propose"),
    **{name: PLACES[name] for name in ("decide", "score behind", "propose behind")},
}


@pytest.mark.parametrize("place", PLACES_TOO)
@pytest.mark.parametrize("options", [{}, {"logprobs": 0}], ids=["followed", "completed first"])
def test_the_other_texts_are_complete_after_an_interrupt(place: str, options: dict[str, Any]):
    """Ctrl-C in one stream's step: what the same step had committed of another text must still be told."""
    asked = [request([1 + i, 2, 3], max_tokens=30 - 25 * i, seed=i, ignore_eos=True, **options) for i in range(2)]
    for at in range(2, 9):
        tried = WHOLE.engine("draft-model:model=other,k=3", limits=EngineLimits(max_batch=4))
        first, second = (tried.submit(each)[0] for each in asked)
        heard: list[Event] = []
        interrupt(tried, PLACES_TOO[place], at)
        while tried.busy:
            try:
                heard += [event for event in tried.step() if event.seq_id == second]
            except KeyboardInterrupt:
                tried.cancel(first)
            tried.check()
        assert_same([told_by(heard)], WHOLE.judged(asked[1]))
