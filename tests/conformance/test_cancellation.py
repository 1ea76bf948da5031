"""Cancelling in the middle of everything: pages come back at once, and nobody else notices."""

from __future__ import annotations

import random

import pytest
from drafter_cast import EVERYBODY, SCRIPTED, Loud
from plain_decoding import Told, assert_same, request, run, told_by
from testbed import TOKENIZER, VOCAB, Testbed
from toy_world import TOY

from outrider.core.sampling import Token
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.mix import Mix
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request
from outrider.runners.base import Runner

everybody = pytest.mark.parametrize("drafter", EVERYBODY)
SMALL = EngineLimits(max_batch=4, max_round_tokens=9)


def long_request(prompt: list[Token], **options: object) -> Request:
    return request(prompt, **({"max_tokens": 40, "ignore_eos": True} | options))


def assert_begins(told: Told, whole: Told, prompt: tuple[Token, ...]) -> None:
    """A cancelled text is a beginning of the whole one, and shows all its tokens say."""
    assert told.finish == "cancelled"
    assert told.tokens == whole.tokens[: len(told.tokens)]
    assert told.text == TOKENIZER.decode([*prompt, *told.tokens])[len(TOKENIZER.decode(prompt)) :]


def run_with_cancels(
    tried: Engine, requests: list[Request], rng: random.Random
) -> dict[int, tuple[Request, Told, int]]:
    """Submit at random times, cancel at random times; returns what was told, by sequence id."""
    heard: dict[int, list[Event]] = {}
    asked: dict[int, tuple[Request, int]] = {}
    todo = list(requests)
    while todo or tried.busy:
        if todo and rng.random() < 0.5:
            made = todo.pop()
            for i, seq_id in enumerate(tried.submit(made)):
                heard[seq_id], asked[seq_id] = [], (made, i)
        for event in tried.step():
            heard[event.seq_id].append(event)
        tried.check()
        open_ids = [i for i, events in heard.items() if not events or events[-1].finish is None]
        if open_ids and rng.random() < 0.25:
            victim = rng.choice(open_ids)
            event = tried.cancel(victim)
            assert event is not None
            heard[victim].append(event)
            assert victim not in tried.target.pool
            tried.check()
    return {i: (made, told_by(heard[i]), n) for i, (made, n) in asked.items()}


def check_at_random(world: Testbed, drafter: str) -> None:
    """Small pool, small rounds, random cancels: every text is the judge's, whole or up to where it was cancelled."""
    requests = list(world.pairwise_requests()[:14])
    tried = world.engine(drafter, requests, limits=SMALL, cache_tokens=96)
    ends: set[str] = set()
    for made, told, n in run_with_cancels(tried, requests, random.Random(drafter)).values():
        ends.add(told.finish)
        if told.finish == "cancelled":
            assert_begins(told, world.judged(made)[n], made.prompt)
        else:
            assert_same([told], [world.judged(made)[n]])
    assert "cancelled" in ends
    assert len(ends) > 1


@everybody
def test_at_random_with_everything_tight(drafter: str):
    check_at_random(TOY, drafter)


def test_while_waiting_reading_decoding_and_preempted():
    """One of each state, found in the scheduler's queues, then cancelled; the last one finishes as if alone."""
    asked = [long_request([i + 1, *range(1, 20)]) for i in range(5)]
    tried = TOY.engine("oracle", asked, limits=EngineLimits(max_batch=3, max_round_tokens=12), cache_tokens=80)
    ids = [tried.submit(each)[0] for each in asked]
    seen: set[str] = set()
    for _ in range(200):
        tried.step()
        tried.check()
        for seq_id in ids[1:]:
            state = _state(tried, seq_id)
            if state not in (seen | {"gone"}):
                seen.add(state)
                pages = tried.target.pool.used
                held = len(tried.target.pool.table(seq_id)) if seq_id in tried.target.pool else 0
                event = tried.cancel(seq_id)
                assert event is not None
                assert event.finish == "cancelled"
                assert pages - held <= tried.target.pool.used <= pages - (held > 0)
                tried.check()
                break
        if len(seen) == 4:
            break
    assert seen == {"waiting", "reading", "decoding", "preempted"}


def _state(tried: Engine, seq_id: int) -> str:
    scheduler = tried.scheduler
    for seq in scheduler.running:
        if seq.id == seq_id:
            return "reading" if seq.pending > 1 else "decoding"
    for seq in scheduler.waiting:
        if seq.id == seq_id:
            return "preempted" if seq.generated else "waiting"
    return "gone"


def test_twice_or_after_the_end_or_never_there_does_nothing():
    asked = request([1, 2, 3], max_tokens=3, ignore_eos=True)
    tried = TOY.engine("oracle", [asked])
    (first,) = tried.submit(asked)
    assert tried.cancel(first + 1) is None
    assert tried.cancel(first) is not None
    assert tried.cancel(first) is None
    (second,) = tried.submit(asked)
    while tried.busy:
        tried.step()
    assert tried.cancel(second) is None
    tried.check()


def test_one_of_n_leaves_the_others():
    asked = long_request([5, 6], n=3, temperature=0.8, seed=4)
    tried = TOY.engine("oracle", [asked])
    ids = tried.submit(asked)
    heard: dict[int, list[Event]] = {i: [] for i in ids}
    for event in tried.step():
        heard[event.seq_id].append(event)
    gone = tried.cancel(ids[1])
    assert gone is not None
    heard[ids[1]].append(gone)
    while tried.busy:
        for event in tried.step():
            heard[event.seq_id].append(event)
        tried.check()
    told = [told_by(heard[i]) for i in ids]
    assert [told[0], told[2]] == [TOY.judged(asked)[0], TOY.judged(asked)[2]]
    assert_begins(told[1], TOY.judged(asked)[1], asked.prompt)


def test_what_was_held_back_for_a_stop_string_is_shown():
    """Text that could have begun a stop string belongs to the text when it is cancelled."""
    plain_text = TOY.judged(long_request([1, 2]))[0]
    count = next(i for i in range(1, 20) if TOKENIZER.decode(plain_text.tokens[:i]))
    shown = TOKENIZER.decode(plain_text.tokens[:count])
    asked = long_request([1, 2], stop=(f"{shown}#",))
    tried = TOY.engine("none", [asked])
    (seq_id,) = tried.submit(asked)
    events = [event for _ in range(count) for event in tried.step()]
    assert "".join(event.text for event in events) == ""
    last = tried.cancel(seq_id)
    assert last is not None
    assert last.text == shown


@pytest.mark.parametrize("drafter", [name for name in EVERYBODY if name not in SCRIPTED])
def test_everybody_lets_go(drafter: str):
    """With all cancelled, target and draft model hold no page and nothing is left of the texts."""
    requests = list(TOY.pairwise_requests()[:6])
    tried = TOY.engine(drafter, requests)
    ids = [i for each in requests for i in tried.submit(each)]
    for _ in range(3):
        tried.step()
    for seq_id in ids:
        tried.cancel(seq_id)
        tried.check()
    assert not tried.busy
    assert tried.target.pool.used == 0
    models = _draft_models(tried)
    assert len(models) == drafter.count("draft-model")
    for model in models:
        assert model.pool.used == 0
        model.pool.check()


def _draft_models(tried: Engine) -> list[Runner]:
    drafter = tried.drafter.drafter if isinstance(tried.drafter, Loud) else tried.drafter
    members = [member.drafter.drafter for member in drafter.members] if isinstance(drafter, Mix) else []
    return [each.model for each in (drafter, *members) if isinstance(each, DraftModel)]


def test_forgotten_exactly_once_each():
    """The scripted drafter raises when told twice; here every sequence is told once, however it ended."""
    requests = list(TOY.pairwise_requests()[:8])
    tried = TOY.engine("noise", requests, limits=SMALL, cache_tokens=96)
    told = run_with_cancels(tried, requests, random.Random(3))
    assert sorted(tried.drafter.forgotten) == sorted(told)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("after", range(1, 8))
def test_pages_of_a_cancelled_text_serve_the_next_one_right(after: int):
    """lucebox #677: a cancelled request left a dirty prefix slot, which crashed the one that restored it."""
    prompt = random.Random(8).choices(range(1, VOCAB), k=37)
    asked = long_request(prompt, temperature=0.5, seed=1)
    longer = long_request([*prompt, *TOY.judged(asked)[0].tokens[:20]], temperature=0.5, seed=2)
    tried = TOY.engine("hidden-oracle", [asked, longer], limits=EngineLimits(max_round_tokens=11))
    (seq_id,) = tried.submit(asked)
    for _ in range(after):
        tried.step()
    tried.cancel(seq_id)
    for each in (asked, longer):
        (told,) = run(tried, [each])
        assert_same(told, TOY.judged(each))
