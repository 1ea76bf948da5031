"""What a completed round tells the controller, and counts in the figures of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.control.costs import PassTable, RoundCosts
from outrider.control.plan import plain_plan
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.accounting import count_round, tell_controller
from outrider.engine.events import Live, Outcome
from outrider.engine.proposal import NOBODY, Proposal
from outrider.engine.round import InFlightRound
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.stats import Stats, Times

TIMES = Times(draft=0.5, verify=2.0, host=0.25, rounds=1)


def scheduled(seq_id: int, *, chunk: int = 1, complete: bool = True, shared: int = 0, joined: bool = False) -> Any:
    seq = Sequence(seq_id, [1] * 9, 8, SamplingParams(), 0)
    return ScheduledSequence(seq, chunk, 0, complete, shared=shared, joined=joined)


def completed(taking: list[Any], drafts: list[Draft] | None = None, *, repeated: bool = False) -> InFlightRound:
    scores: Any = None
    plan = plain_plan(len(taking), RoundCosts(PassTable({(1, 1): 1.0})))
    proposal = Proposal(drafts or [EMPTY] * len(taking), plan, rest=3, by=NOBODY)
    made = InFlightRound(taking, proposal, [], scores, 0.0, TIMES)
    made.repeated = repeated
    return made


def live_of(done: InFlightRound, passes: int) -> dict[int, Live]:
    text: Any = None
    return {each.seq.id: Live(each.seq, text, Stats(passes=passes)) for each in done.scheduled}


@pytest.mark.parametrize("repeated", [False, True])
def test_a_round_that_decodes_is_counted(repeated: bool):
    done = completed([scheduled(0), scheduled(1), scheduled(2)], [EMPTY, Draft((4, 5)), EMPTY], repeated=repeated)
    live = live_of(done, passes=3)
    del live[2]
    count_round(done, live)
    for each in live.values():
        assert (each.stats.passes, each.stats.rows, each.stats.shared_tokens) == (4, 5, 0)
        assert each.stats.times == TIMES


def test_a_round_that_reads_is_counted_as_reading():
    done = completed(
        [scheduled(0), scheduled(1, chunk=3, complete=False, shared=4), scheduled(2, shared=2, joined=True)]
    )
    live = live_of(done, passes=0)
    live[0].stats.passes = 1
    count_round(done, live)
    first, reads, joins = (live[i].stats for i in range(3))
    assert (first.passes, first.rows, first.times) == (2, 3, TIMES)
    assert (reads.passes, reads.rows, reads.shared_tokens, reads.times) == (1, 0, 4, Times(read=2.75))
    assert (joins.passes, joins.rows, joins.shared_tokens, joins.times) == (2, 0, 2, Times(read=2.75))


def test_what_was_shared_counts_once():
    """A text found whole in the cache decodes at once; one that comes again after a preemption was counted before."""
    done = completed([scheduled(0, shared=7), scheduled(1, shared=7)])
    live = live_of(done, passes=0)
    live[1].stats.passes = 5
    count_round(done, live)
    assert [(each.stats.shared_tokens, each.stats.passes) for each in live.values()] == [(7, 1), (0, 6)]
    assert all(each.stats.rows == 2 for each in live.values())


@pytest.mark.parametrize(("joined", "seconds"), [(False, 2.75), (True, 0.0)])
def test_a_round_that_nobody_was_asked_for_tells_its_time_where_it_only_decodes(joined: bool, seconds: float):
    done, told = completed([scheduled(0), scheduled(1), scheduled(2, joined=joined)]), list[Any]()

    class Told:
        controller = object()

        def account_rest(self, proposal: Proposal, seq_ids: list[int], seconds: float, *, steady: bool) -> None:
            told.append((proposal, seq_ids, seconds, steady))

    outcomes = [Outcome(each, verdict=Verdict((3,))) for each in live_of(done, passes=1).values()]
    outcomes[1].verdict = None
    drafting: Any = Told()
    tell_controller(drafting, done, outcomes, None)
    assert told == [(done.proposal, [0, 2], seconds, True)]
