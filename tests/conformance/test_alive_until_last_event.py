"""A text that ended in a step that was broken off is alive until its last event is told: streams wait on `alive`."""

from __future__ import annotations

import pytest
from plain_decoding import assert_same, request, told_by
from test_rounds_behind_rounds import WHOLE, Place, interrupt

from outrider.engine.events import Event


@pytest.mark.parametrize("at", range(2, 9))
def test_a_stream_hears_the_end_after_an_interrupt(at: int):
    """As `Calls.events` listens: as long as the text is alive."""
    asked = [request([1 + i, 2, 3], max_tokens=30 - 25 * i, ignore_eos=True, logprobs=0) for i in range(2)]
    tried = WHOLE.engine("none")
    _, second = (tried.submit(each)[0] for each in asked)
    interrupt(tried, Place(lambda tried: tried.target, "score"), at)
    heard: list[Event] = []
    while tried.alive(second):
        try:
            heard += [event for event in tried.step() if event.seq_id == second]
        except KeyboardInterrupt:
            continue
    assert_same([told_by(heard)], WHOLE.judged(asked[1]))
