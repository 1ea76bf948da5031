"""Rounds launched again as the one in flight: texts never differ from plain decoding, whatever comes in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from async_toy import ASYNC_TOY
from plain_decoding import Told, World, assert_same, request, run, told_by
from repeating_toy import Guesser, RepeatingToy
from test_cancellation import assert_begins
from test_controlled_rounds import Restless
from test_rounds_behind_rounds import Schedule, at_random
from testbed import CONTEXT, EOS, TOKENIZER, Testbed
from torch import Tensor

from outrider.control.plan import Plan
from outrider.core.sampling import Token
from outrider.drafters.base import Drafter
from outrider.drafters.none import NoDraft
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request
from outrider.verify.base import make_verifier

Make = Callable[[RepeatingToy], Drafter]
DRAFTERS: dict[str, Make] = {"none": lambda target: NoDraft(), "guesser": Guesser}
drafters = pytest.mark.parametrize("drafter", DRAFTERS)
temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])


class Tried:
    """An engine on a toy that repeats."""

    def __init__(
        self,
        drafter: str | Make = "guesser",
        *,
        limits: EngineLimits | None = None,
        target: RepeatingToy | None = None,
        world: Testbed = ASYNC_TOY,
        plans: str = "",
    ) -> None:
        """plans: the seed of a controller that decides at random; empty: without one."""
        self.target, self.world = target or RepeatingToy(), world
        self.drafter: Any = (DRAFTERS[drafter] if isinstance(drafter, str) else drafter)(self.target)
        self.engine = Engine(
            self.target,
            self.drafter,
            make_verifier("seeded"),
            TOKENIZER,
            eos_ids=TOKENIZER.eos_ids,
            limits=limits or EngineLimits(max_batch=8),
            controller=Planned(self.drafter, (), plans) if plans else None,
        )

    def check(self, asked: Seq[Request]) -> int:
        """Run them together, each as plain decoding; returns how many passes were launched again."""
        before = self.target.repeated
        for told, each in zip(run(self.engine, asked), asked, strict=True):
            assert_same(told, self.world.judged(each))
        assert self.target.pool.used == 0
        return self.target.repeated - before


def asks(count: int, temperature: float, **options: Any) -> list[Request]:
    """Requests of different prompts and seeds."""
    rng = random.Random(count)
    return [
        request(
            rng.choices(range(1, 9), k=rng.choice((1, 2, 5, 15, 16, 17))),
            **({"temperature": temperature, "seed": i, "max_tokens": 60, "ignore_eos": True} | options),
        )
        for i in range(count)
    ]


@drafters
@temperatures
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_long_texts_are_plain_decodings_and_most_rounds_are_repeated(drafter: str, temperature: float, count: int):
    tried = Tried(drafter)
    repeated = tried.check(asks(count, temperature, max_tokens=100))
    rounds = repeated + tried.target.followed
    assert repeated > 0.6 * rounds
    if drafter == "guesser":
        assert tried.engine.stats.all.accepted > 0.3 * tried.engine.stats.all.drafted
        assert tried.engine.stats.draft_failures == 0


@drafters
@temperatures
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_texts_end_by_length_at_different_places(drafter: str, temperature: float, batch: int):
    """Every place around the drafts' length, while others run on or come."""
    tried = Tried(drafter, limits=EngineLimits(max_batch=batch))
    lengths = (1, 2, 7, 8, 9, 60, 3, 60, 4, 5, 6, 31, 32, 33)
    asked = [
        replace(each, params=replace(each.params, max_tokens=length))
        for each, length in zip(asks(len(lengths), temperature), lengths, strict=True)
    ]
    assert tried.check(asked) > 0


@drafters
@pytest.mark.parametrize("tokens", [*range(1, 12), *range(28, 38)])
def test_a_text_alone_ends_where_it_must(drafter: str, tokens: int):
    tried = Tried(drafter)
    repeated = tried.check(asks(1, 0.0, max_tokens=tokens))
    assert repeated > 0 or tokens < 30


@drafters
@temperatures
@pytest.mark.parametrize("stops", [(), (4, 11)], ids=["end of text", "of its own"])
def test_texts_end_by_stop_ids(drafter: str, temperature: float, stops: tuple[Token, ...]):
    tried = Tried(drafter, limits=EngineLimits(max_batch=4))
    asked = asks(16, temperature, max_tokens=90, ignore_eos=bool(stops), stop_token_ids=stops)
    assert {tried.world.judged(each)[0].stop_reason for each in asked} & {*(stops or (EOS,))}
    assert tried.check(asked) > 0


@drafters
@temperatures
def test_texts_end_with_the_context(drafter: str, temperature: float):
    """The toy refuses to read on behind it; drafts of any length would."""
    for length in range(CONTEXT - 51, CONTEXT - 40, 2):
        tried = Tried(drafter)
        prompts = [1, 2], [i % 7 + 1 for i in range(length)]
        options = {"temperature": temperature, "seed": length, "max_tokens": 1000, "ignore_eos": True}
        asked = [request(prompt, **options) for prompt in prompts]
        assert tried.check(asked) > 10
        assert {told.finish for each in asked for told in tried.world.judged(each)} == {"length"}


@drafters
@temperatures
def test_texts_end_by_stop_strings(drafter: str, temperature: float):
    """Each by a piece of its own text, wherever that first comes."""
    tried = Tried(drafter, limits=EngineLimits(max_batch=3))
    asked: list[Request] = []
    for i, each in enumerate(asks(12, temperature, max_tokens=90)):
        text = tried.world.judged(each)[0].text
        asked.append(replace(each, params=replace(each.params, stop=(text[20 + i : 24 + i],))))
    assert {tried.world.judged(each)[0].finish for each in asked} == {"stop"}
    assert tried.check(asked) > 0


def come_and_go(tried: Tried, todo: list[Request], rng: random.Random, cancels: float) -> set[str]:
    """Submit one every few rounds, cancel some; each is the judge's. Returns how texts ended."""
    heard, asked = dict[int, list[Event]](), dict[int, Request]()
    while todo or tried.engine.busy:
        if todo and rng.random() < 0.2:
            made = todo.pop()
            (seq_id,) = tried.engine.submit(made)
            heard[seq_id], asked[seq_id] = [], made
        alive = [i for i in heard if tried.engine.alive(i)]
        if alive and rng.random() < cancels:
            event = tried.engine.cancel(rng.choice(alive))
            if event is not None:
                heard[event.seq_id].append(event)
        for event in tried.engine.step():
            heard[event.seq_id].append(event)
        tried.engine.check()
    told = {i: told_by(events) for i, events in heard.items()}
    for seq_id, each in told.items():
        check_told(tried.world, asked[seq_id], 0, each)
    return {each.finish for each in told.values()}


@drafters
@temperatures
@pytest.mark.parametrize("batch", [2, 5])
def test_newcomers_while_others_run(drafter: str, temperature: float, batch: int):
    """To a batch that has room, or has none."""
    tried = Tried(drafter, limits=EngineLimits(max_batch=batch))
    assert come_and_go(tried, asks(10, temperature, max_tokens=50), random.Random(batch), 0.0) == {"length"}
    assert tried.target.repeated > 20


@drafters
@temperatures
@pytest.mark.parametrize("seed", range(3))
def test_cancellations_in_between(drafter: str, temperature: float, seed: int):
    tried = Tried(drafter, limits=EngineLimits(max_batch=4))
    ends = come_and_go(tried, asks(12, temperature, max_tokens=50), random.Random(seed), 0.05)
    assert ends == {"cancelled", "length"}
    assert tried.target.repeated > 10


def check_told(world: Testbed, made: Request, n: int, told: Told) -> None:
    """A text is the judge's, whole or up to where it was cancelled."""
    if told.finish == "cancelled":
        assert_begins(told, world.judged(made)[n], made.prompt)
    else:
        assert_same([told], [world.judged(made)[n]])


@drafters
@temperatures
@pytest.mark.parametrize("cache_tokens", [160, 208, 304])
def test_preemption_in_a_cramped_cache(drafter: str, temperature: float, cache_tokens: int):
    tried = Tried(drafter, target=RepeatingToy(cache_tokens), limits=EngineLimits(max_batch=4))
    repeated = tried.check(asks(9, temperature, max_tokens=120))
    assert tried.engine.stats.preemptions > 0
    assert repeated > 0


WATCHED: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "a penalty": {"presence_penalty": 0.7},
    "a processor": {"logits_processors": (lambda tokens, logits: logits * (1 + len(tokens) % 2),)},
    "not before its end": {"min_tokens": 60, "ignore_eos": False},
    "a bias": {"logit_bias": {3: 1.0}},
}


@drafters
@temperatures
@pytest.mark.parametrize("option", WATCHED)
def test_nothing_is_repeated_beside_one_that_the_host_must_see(drafter: str, temperature: float, option: str):
    """It is the longest of all; without it rounds are repeated."""
    tried = Tried(drafter)
    asked = [*asks(3, temperature, max_tokens=40), *asks(1, temperature, max_tokens=60, **WATCHED[option])]
    repeated = tried.check(asked)
    assert repeated == 0
    assert tried.check(asked[:3]) > 0


@drafters
def test_rounds_are_repeated_again_once_it_has_ended(drafter: str):
    tried = Tried(drafter)
    asked = [*asks(3, 1.0, max_tokens=100), *asks(1, 1.0, max_tokens=9, logprobs=1)]
    assert tried.check(asked) > 10


@temperatures
def test_requests_with_limits_of_their_own(temperature: float):
    """Drafts of different lengths in one round; none is drafted for the third, so that nobody can say who drafts."""
    asked = [replace(each, max_draft=(None, 2, 1)[i]) for i, each in enumerate(asks(3, temperature, max_tokens=80))]
    assert Tried().check(asked) > 10
    asked[2] = replace(asked[2], max_draft=0)
    assert Tried().check(asked) >= 0
    assert Tried().check([replace(each, max_draft=0) for each in asked]) >= 0


@drafters
def test_at_random(drafter: str):
    """Options, lengths, cancellations, texts that are scored in between, preemption, and all that together."""
    repeated = 0
    for seed in range(12):
        rng = random.Random(f"{drafter} {seed}")
        limits = EngineLimits(max_batch=rng.choice((1, 2, 4)), max_round_tokens=rng.choice((9, 20, 512)))
        tried = Tried(drafter, target=RepeatingToy(rng.choice((176, 256, 4096))), limits=limits)
        schedule = Schedule(tried.engine, rng)
        schedule.run([at_random(rng) for _ in range(10)])
        repeated += tried.target.repeated
        for made, n, told in schedule.told():
            check_told(tried.world, made, n, told)
        assert tried.target.pool.used == 0
    assert repeated > 30


class Planned(Restless):
    """Its plans, made at random, hold for some rounds."""

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        plan = super().plan(seq_ids, budgets)
        if self.rng.random() < 0.5 and plan.asks:  # one drafter for all
            plan = replace(plan, lengths=[min(3, n) for n in budgets], drafters=[0 if n else -1 for n in budgets])
        return replace(plan, rounds=self.rng.choice((0, 5, 20)))


class Pair(Guesser):
    """Two drafters, each with tokens of its own, for a controller to choose from."""

    def __init__(self, target: RepeatingToy) -> None:
        super().__init__(target)
        self.parts = (Guesser(target), Guesser(target, k=2, rows=12))


def test_rounds_planned_at_random():
    repeated = drafted = failures = 0
    for seed in range(8):
        rng = random.Random(f"planned {seed}")
        limits = EngineLimits(max_batch=rng.choice((1, 2, 4)), max_round_tokens=512)
        tried = Tried(Pair, target=RepeatingToy(rng.choice((256, 4096))), limits=limits, plans=str(seed))
        assert come_and_go(tried, asks(8, seed % 2, max_tokens=70), rng, 0.02) <= {"cancelled", "length"}
        repeated += tried.target.repeated
        drafted += sum(part.repeats for part in tried.drafter.parts)
        failures += tried.engine.stats.draft_failures
    assert repeated - drafted > 20 < drafted
    assert failures == 0


class Breaking(RepeatingToy):
    """Its logits are NaN after some pairs of tokens."""

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        row = super()._make_row(tail)
        return row * float("nan") if len(tail) > 1 and (7 * tail[-2] + tail[-1]) % 97 == 3 else row


BREAKING = Testbed(
    World(Breaking().logits_after, TOKENIZER, TOKENIZER.eos_ids, CONTEXT), ASYNC_TOY.target, ASYNC_TOY.draft
)


@drafters
def test_a_text_that_breaks_ends_where_plain_decoding_ends(drafter: str):
    """NaN after a token that is accepted: the device steps back to it, and so does the host."""
    repeated = 0
    ends: list[str] = []
    for seed in range(12):
        tried = Tried(drafter, target=Breaking(), world=BREAKING)
        asked = [
            request([1 + seed % 5, 2, i], max_tokens=60, temperature=1.0, seed=seed + i, ignore_eos=True)
            for i in (3, 4)
        ]
        repeated += tried.check(asked)
        ends += [BREAKING.judged(each)[0].finish for each in asked]
    assert {*ends} == {"error", "length"}
    assert repeated > 20


def finish(engine: Engine) -> list[Event]:
    events: list[Event] = []
    while engine.busy:
        events += engine.step()
    return events


@drafters
@temperatures
def test_events_are_those_of_rounds_that_are_not_repeated(drafter: str, temperature: float):
    """The same tokens in the same rounds, drafted as many, told of in the same way."""
    told: list[list[Event]] = []
    for refuses in (False, True):
        tried = Tried(drafter)
        tried.target.refuses = refuses
        for each in asks(1, temperature, max_tokens=90):
            tried.engine.submit(each)
        told.append([event._replace(stats=None) for event in finish(tried.engine)])
        assert (tried.target.repeated == 0) == refuses
    early = sum(len(event.tokens) for event in told[1]) - 12  # drafts are cut before the end of a text
    assert _until(told[0], early) == _until(told[1], early) != []


def _until(events: list[Event], tokens: int) -> list[Event]:
    """The events of a text's first so many tokens."""
    made = [sum(len(each.tokens) for each in events[: i + 1]) for i in range(len(events))]
    return [event for event, end in zip(events, made, strict=True) if end <= tokens]


@pytest.mark.parametrize("method", ["repeat", "score_and_choose"])
@pytest.mark.parametrize("at", [2, 3, 4])
def test_an_interrupt_after_a_round_was_launched_behind_another(method: str, at: int):
    """The device has gone on by then: nothing may be launched from where it is."""
    tried, asked, calls, interrupts = Tried(), asks(6, 1.0), iter(range(1, 1 << 30)), 0
    texts = [tried.engine.live(tried.engine.submit(each)[0]).seq for each in asked]
    real = getattr(tried.target, method)

    def called(*args: Any) -> Any:
        made = real(*args)
        if next(calls) == at:
            raise KeyboardInterrupt
        return made

    setattr(tried.target, method, called)
    while tried.engine.busy:
        try:
            tried.engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    for text, each in zip(texts, asked, strict=True):
        assert tuple(text.tokens[text.prompt_len :]) == tried.world.judged(each)[0].tokens
