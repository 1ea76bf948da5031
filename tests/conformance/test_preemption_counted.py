"""A text that yields its pages while another text is being scored: counted, though the round is empty."""

from __future__ import annotations

from plain_decoding import assert_same, request, told_by
from toy_world import TOY

from outrider.engine.events import Event
from outrider.engine.scoring import Scoring


def test_a_preemption_that_leaves_the_round_empty_is_counted():
    tried = TOY.engine("none", cache_tokens=64)
    asked = request([1, 2, 3], max_tokens=40, ignore_eos=True)
    tried.submit(asked)
    scoring = Scoring(tried.target, range(1, 24), 0)  # two of the four pages, until it is closed
    scoring.step()
    heard: list[Event] = []
    preempted = 0
    for _ in range(200):
        if not tried.busy:
            break
        heard += tried.step()
        preempted += len(tried.scheduler.preempted)
        if preempted and scoring.done:
            scoring.close()
    assert_same([told_by(heard)], TOY.judged(asked))
    assert tried.stats.preemptions == preempted > 0
