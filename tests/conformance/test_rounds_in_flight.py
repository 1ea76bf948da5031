"""Rounds launched and not waited for, as on a GPU, with a toy in its place: the same texts, cancelled or not."""

from __future__ import annotations

from typing import Any

import pytest
from async_toy import ASYNC_TOY, AsyncToyRunner, target
from drafter_cast import EVERYBODY
from plain_decoding import assert_same, request, run, told_by
from test_cancellation import check_at_random
from testbed import TOKENIZER, avoid_last

from outrider.core.draft import Draft, Verdict
from outrider.core.sequence import Sequence
from outrider.drafters.none import NoDraft
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request
from outrider.engine.stats import Tally
from outrider.verify.base import make_verifier

everybody = pytest.mark.parametrize("drafter", EVERYBODY)


@everybody
def test_every_option_gives_the_same_text(drafter: str):
    ASYNC_TOY.check(drafter, ASYNC_TOY.pairwise_requests()[:40], limits=EngineLimits(max_batch=8, max_round_tokens=40))


@everybody
def test_at_random_with_everything_tight(drafter: str):
    """Small pool, small rounds, texts cancelled while their round is in flight."""
    check_at_random(ASYNC_TOY, drafter)


def test_a_round_is_emitted_when_the_next_one_is_on_its_way():
    tried = ASYNC_TOY.engine("none")
    tried.submit(request([1, 2, 3], max_tokens=3, ignore_eos=True))
    told: list[list[Event]] = []
    while tried.busy:
        told.append(tried.step())
    assert [len(events) for events in told] == [0, 1, 1, 1]
    assert told[-1][0].finish == "length"
    tried.check()


def tally_where_rounds_follow(drafter: str, asked: list[Request]) -> Tally:
    """How drafts fared: the texts are plain ones, and nearly every round was launched behind the one before."""
    ASYNC_TOY.check(drafter, asked, limits=EngineLimits(max_batch=4))
    tried = ASYNC_TOY.engine(drafter, limits=EngineLimits(max_batch=4))
    for each in asked:
        tried.submit(each)
    rounds = 0
    while tried.busy:
        rounds += 1
        tried.step()
    launched = tried.target
    assert isinstance(launched, AsyncToyRunner)
    assert launched.followed > 0.7 * rounds
    return tried.stats.all


@pytest.mark.parametrize("drafter", ["none", "draft-model:model=draft,k=4", "draft-model:model=other,k=3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_follow_each_other_while_texts_only_decode(drafter: str, temperature: float):
    """Texts of different lengths in one batch: nearly every round is launched behind the one before."""
    lengths = (60, 33, 47, 60)
    asked = [
        request([i + 1, 2, 3], max_tokens=most, temperature=temperature, seed=i, ignore_eos=True)
        for i, most in enumerate(lengths)
    ]
    tally = tally_where_rounds_follow(drafter, asked)
    if "model=draft" in drafter:  # the target itself: a token that is rejected was drafted from a wrong cache
        assert tally.accepted == tally.drafted > 0


@pytest.mark.parametrize("drafter", ["none", "draft-model:model=draft,k=6", "draft-model:model=other,k=6"])
def test_pages_that_a_round_in_flight_writes_to_are_nobody_elses(drafter: str):
    """A pool that holds the texts and hardly more: what one gives back another takes at once."""
    asked = [request([i + 1] * (1 + i), max_tokens=75 - i, seed=i, ignore_eos=True) for i in range(9)]
    for spare in (16, 32, 48, 80):
        ASYNC_TOY.check(drafter, asked, limits=EngineLimits(max_batch=9), cache_tokens=9 * 80 + spare)


def test_truncated_sampling_is_drafted_and_followed_too():
    """The draft is the target itself and leaves out top-k and top-p: nearly all is accepted, and no text changes."""
    options = ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05, "top_p": 0.95}, {"typical_p": 0.9})
    asked = [
        request([i + 1, 2, 3], max_tokens=60, temperature=0.8, seed=i, ignore_eos=True, **each)
        for i, each in enumerate(options)
    ]
    tally = tally_where_rounds_follow("draft-model:model=draft,k=4", asked)
    assert 0.6 * tally.drafted < tally.accepted < tally.drafted


FOLLOWED = (
    {"logprobs": 3},
    {"logprobs": 0, "temperature": 0.8, "top_p": 0.9},
    {"stop": ("cabca", "ééé")},
    {"logit_bias": {3: 2.0, 5: -4.0}, "temperature": 0.8},
    {"banned_token_ids": (2, 6, 13), "logprobs": 2},
    {"allowed_token_ids": (*range(1, 20, 2), 4)},
    {"min_tokens": 4, "stop_token_ids": (0,), "temperature": 1.0},
    {"min_tokens": 60},  # nothing stops this text anyway
)


@pytest.mark.parametrize("options", FOLLOWED, ids=str)
@pytest.mark.parametrize("drafter", ["none", "suffix:k=4"])
def test_options_that_do_not_read_the_text_are_followed(drafter: str, options: dict[str, Any]):
    """Beside a text without options. The texts, and their log-probabilities, are those of plain decoding."""
    asked = [
        request([1, 2, 3], max_tokens=60, seed=1, ignore_eos=True, **options),
        request([4, 2, 3], max_tokens=60, seed=2, ignore_eos=True),
    ]
    limits = EngineLimits(max_batch=4)
    ASYNC_TOY.check(drafter, asked, limits=limits)
    tried = ASYNC_TOY.engine("none", limits=limits)
    run(tried, asked)
    assert isinstance(tried.target, AsyncToyRunner)
    assert tried.target.followed > 30


READ = (
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"logits_processors": (avoid_last,)},
    {"min_tokens": 40, "stop_token_ids": (0,)},
)


@pytest.mark.parametrize("options", READ, ids=lambda options: ",".join(options))
def test_options_that_read_the_text_are_waited_for(options: dict[str, Any]):
    most = 40
    tried = ASYNC_TOY.engine("none")
    asked = request([1, 2, 3], max_tokens=most, ignore_eos=True, **options)
    assert_same(run(tried, [asked])[0], ASYNC_TOY.judged(asked))
    assert isinstance(tried.target, AsyncToyRunner)
    assert tried.target.followed == 0


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_who_waits_joins_the_round_that_follows_unless_its_options_read_the_text(penalty: float):
    launched = target()
    tried = Engine(launched, NoDraft(), make_verifier("seeded"), TOKENIZER, limits=EngineLimits(max_batch=2))
    (first,) = tried.submit(request([1, 2], max_tokens=50, ignore_eos=True))
    for _ in range(5):
        tried.step()
    followed = launched.followed
    assert followed > 0
    (late,) = tried.submit(request([3, 4], max_tokens=5, ignore_eos=True, frequency_penalty=penalty))
    # the round in flight completes, one that is launched before its text is read, then the one that it takes part in
    alone = 1 if penalty else 2
    told = [[event.seq_id for event in tried.step()] for _ in range(alone + 1)]
    assert told == [[first]] * alone + [[first, late]]
    assert launched.followed == followed + (0 if penalty else 3)


def test_what_is_cancelled_in_flight_has_no_more_events():
    tried = ASYNC_TOY.engine("none")
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


def test_a_drafter_sees_nothing_of_a_text_it_was_asked_to_forget():
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
