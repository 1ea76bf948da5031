"""Rounds launched and not waited for, as on a GPU, with a toy in its place: the same texts, cancelled or not."""

from __future__ import annotations

import pytest
from drafter_cast import EVERYBODY
from plain_decoding import request, told_by
from test_cancellation import check_at_random
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed
from toy_world import TOY, WORLD

from outrider.core import Draft, Sequence, Verdict
from outrider.drafters.none import NoDraft
from outrider.engine.engine import Engine, Limits
from outrider.engine.events import Event
from outrider.testing import ToyTarget
from outrider.verify.base import make_verifier


class Launching(ToyTarget):
    """Says that its passes are launched, so that the engine keeps one in flight."""

    launches = True


def target(cache_tokens: int = 4096) -> Launching:
    return Launching(VOCAB, context=CONTEXT, cache_tokens=cache_tokens, order=2)


FLYING = Testbed(WORLD, target, TOY.draft)
everybody = pytest.mark.parametrize("drafter", EVERYBODY)


@everybody
def test_every_option_tells_the_same_text(drafter: str):
    FLYING.check(drafter, FLYING.pairwise_requests()[:40], limits=Limits(max_batch=8, max_round_tokens=40))


@everybody
def test_at_random_with_everything_tight(drafter: str):
    """Small pool, small rounds, texts cancelled while their round is in flight."""
    check_at_random(FLYING, drafter)


def test_a_round_is_told_when_the_next_one_is_on_its_way():
    tried = FLYING.engine("none")
    tried.submit(request([1, 2, 3], max_tokens=3, ignore_eos=True))
    told: list[list[Event]] = []
    while tried.busy:
        told.append(tried.step())
    assert [len(events) for events in told] == [0, 1, 1, 1]
    assert told[-1][0].finish == "length"
    tried.check()


def test_what_is_cancelled_in_flight_is_never_told_again():
    tried = FLYING.engine("none")
    asked = request([1, 2, 3], max_tokens=20, ignore_eos=True)
    (first,) = tried.submit(asked)
    (second,) = tried.submit(asked)
    assert tried.step() == []
    heard = [event for event in tried.step() if event.seq_id == second]  # one round told, the next in flight
    gone = tried.cancel(first)
    assert gone is not None
    assert gone.stats is not None
    assert gone.stats.tokens == 1
    assert first not in tried.target.pool
    while tried.busy:
        heard += tried.step()
        tried.check()
    assert {event.seq_id for event in heard} == {second}
    assert told_by(heard).finish == "length"


class Watching(NoDraft):
    """Notes what it is told, and in which order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def observe(self, seqs: list[Sequence], drafts: list[Draft], verdicts: list[Verdict]) -> None:
        self.seen += [("observed", seq.id) for seq in seqs]

    def forget(self, seq: Sequence) -> None:
        self.seen.append(("forgotten", seq.id))


def test_a_drafter_is_told_nothing_of_a_text_it_was_asked_to_forget():
    drafter = Watching()
    tried = Engine(target(), drafter, make_verifier("seeded"), TOKENIZER)
    (first,) = tried.submit(request([1, 2], max_tokens=9, ignore_eos=True))
    (second,) = tried.submit(request([3, 4], max_tokens=4, ignore_eos=True))
    tried.step()
    tried.step()
    tried.cancel(first)
    while tried.busy:
        tried.step()
    assert drafter.seen.count(("forgotten", first)) == drafter.seen.count(("forgotten", second)) == 1
    after = drafter.seen[drafter.seen.index(("forgotten", first)) :]
    assert ("observed", first) not in after
    assert drafter.seen[-1] == ("forgotten", second)
