"""Rounds launched behind one in flight: what ends there, breaks there or is interrupted there changes no text."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from async_toy import ASYNC_TOY, AsyncToyRunner
from plain_decoding import Told, World, assert_same, request, run, told_by
from test_cancellation import assert_begins
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed
from torch import Tensor

from outrider.core.errors import RequestError
from outrider.core.sampling import Token
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import EngineLimits, Request
from outrider.engine.scoring import Scoring
from outrider.kernels.accept import accept_chains
from outrider.runners.device_state import DeviceState
from outrider.verify.base import make_verifier

DRAFTERS = ("none", "draft-model:model=draft,k=4", "draft-model:model=other,k=3", "smaller")
drafters = pytest.mark.parametrize("drafter", DRAFTERS)


class Breaking(AsyncToyRunner):
    """Its logits are NaN after some pairs of tokens."""

    def _make_row(self, tail: tuple[Token, ...]) -> Tensor:
        row = super()._make_row(tail)
        return row * float("nan") if len(tail) > 1 and (7 * tail[-2] + tail[-1]) % 41 == 3 else row


def breaking(cache_tokens: int = 4096) -> Breaking:
    return Breaking(VOCAB, context=CONTEXT, cache_tokens=cache_tokens)


def draft(name: str) -> AsyncToyRunner:
    """`draft` says what the target says, where that says anything."""
    return AsyncToyRunner(VOCAB, context=CONTEXT, order=1 if name == "other" else 2)


BREAKING = Testbed(World(breaking().logits_after, TOKENIZER, TOKENIZER.eos_ids, CONTEXT), breaking, draft)
WHOLE = Testbed(ASYNC_TOY.world, ASYNC_TOY.target, draft)


def engine(world: Testbed, drafter: str, limits: EngineLimits | None = None, cache_tokens: int = 4096) -> Engine:
    """With one drafter more, `smaller`: a draft model of fewer rows, a shorter context and a cramped cache."""
    if drafter != "smaller":
        return world.engine(drafter, limits=limits, cache_tokens=cache_tokens)
    model = AsyncToyRunner(VOCAB - 5, context=CONTEXT - 40, cache_tokens=208)
    setting = DrafterContext(vocab_size=VOCAB, context=CONTEXT)
    smaller = DraftModel(model, setting, DraftModelConfig(model=drafter, k=6))
    return Engine(
        world.target(cache_tokens),
        smaller,
        make_verifier("seeded"),
        TOKENIZER,
        eos_ids=TOKENIZER.eos_ids,
        limits=limits,
    )


def followed(tried: Engine) -> int:
    if not isinstance(tried.target, AsyncToyRunner):
        raise TypeError(type(tried.target))
    return tried.target.followed


@drafters
def test_a_text_that_breaks_ends_where_plain_decoding_ends(drafter: str):
    """NaN after a token that is accepted: the round behind must not continue from a token that was not chosen."""
    for seed in range(25):
        asked = request([1 + seed % 5, 2, 3], max_tokens=60, temperature=1.0, seed=seed, ignore_eos=True)
        (told,) = run(engine(BREAKING, drafter), [asked])
        assert_same(told, BREAKING.judged(asked))


def test_the_state_of_a_broken_text_is_where_the_host_leaves_it():
    """5 and 6 are accepted and nothing follows 6: it steps back to its last good token, 6, and reads it again."""
    ids, widths = torch.tensor([[4, 5, 6, 7], [4, 5, 6, 7]]), torch.tensor([4, 4])
    choices = torch.tensor([5, 6, -1, 9, 5, 6, 7, 8])
    lengths, last, accepted = accept_chains(ids, torch.tensor([10, 10]), widths, choices)
    assert lengths.tolist() == [13, 15]
    assert last.tolist() == [[5, 6], [7, 8]]
    assert accepted.tolist() == [1, 3]


def alone_or_beside(options: dict[str, Any]) -> list[Request]:
    plain = request([4, 5, 6], max_tokens=60, seed=1, ignore_eos=True)
    return [request([1, 2, 3], **({"max_tokens": 60, "seed": 1, "ignore_eos": True} | options)), plain]


@pytest.mark.parametrize(
    ("drafter", "options"),
    [
        ("draft-model:model=draft,k=4", {"temperature": 1.0, "top_p": 0.9}),
        ("draft-model:model=draft,k=4", {"temperature": 1.0, "top_k": 4}),
        ("draft-model:model=draft,k=4,min_prob=0.001", {}),
        ("draft-model:model=draft,k=4,beams=2", {}),
    ],
)
def test_drafting_continues_where_chains_are_not_drafted_on_the_device(drafter: str, options: dict[str, Any]):
    """A drafter that can follow must not answer with nothing for ever: three in four tokens come from drafts."""
    for requests in (alone_or_beside(options)[:1], alone_or_beside(options)):
        stats = WHOLE.check(drafter, requests)
        assert stats.all.accepted > 0.6 * stats.tokens


@pytest.mark.parametrize("prompt", [[3], [1 + i % 9 for i in range(17)]])
def test_drafting_begins_after_a_first_round_that_read_one_token(prompt: list[Token]):
    """A prompt of one token, and one of which all but one were found in the cache."""
    asked = request(prompt, max_tokens=60, ignore_eos=True)
    tried = WHOLE.engine("draft-model:model=draft,k=4")
    run(tried, [asked])
    before = tried.stats.all.accepted
    (told,) = run(tried, [asked])
    assert_same(told, WHOLE.judged(asked))
    assert tried.stats.all.accepted - before > 0.6 * 60


@pytest.mark.parametrize("length", range(3, 19))
def test_chains_begin_from_what_the_draft_has_read(length: int):
    """A round without drafts in between, for want of pages: the draft lacks more than two tokens then.

    Tokens drafted from a cache with a hole would be rejected, or the toy would refuse to read it.
    """
    asked = request(range(1, 1 + length), max_tokens=100, ignore_eos=True)
    tried = WHOLE.engine("draft-model:model=draft,k=4", cache_tokens=160)
    tried.submit(asked)
    events: list[Event] = []
    pool = tried.target.pool
    for turn in range(200):
        if not tried.busy:
            break
        pool.open(-1 - turn, ())
        if turn % 3 == 2:  # somebody else takes all that is free, for a round
            pool.reserve(-1 - turn, pool.free * pool.size)
        events += tried.step()
        pool.close(-1 - turn)
    assert_same([told_by(events)], WHOLE.judged(asked))
    assert tried.stats.all.accepted == tried.stats.all.drafted > 0


class Place(NamedTuple):
    """A method to interrupt."""

    thing: Callable[[Engine], Any]
    method: str
    behind: bool = False
    """Count only calls for a round behind one in flight."""


PLACES = {
    "judge": Place(lambda tried: tried.verifier, "judge"),
    "decide": Place(lambda tried: tried.verifier, "decide"),
    "propose behind": Place(lambda tried: tried.drafter, "propose", behind=True),
    "score behind": Place(lambda tried: tried.target, "score", behind=True),
    "advance": Place(lambda tried: tried.target, "advance"),
    "process": Place(lambda tried: tried.drafter, "process"),
    "keep": Place(lambda tried: tried.target, "keep"),
}
NOT_CALLED = {("none", "propose behind"), ("none", "process")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("drafter", DRAFTERS[:3])
def test_an_interrupt_leaves_the_other_texts_right(drafter: str, place: str):
    """Ctrl-C in one stream's step while another is half read: that one continues as if nothing had been."""
    asked = [request([1 + i, 2, 3], max_tokens=40, seed=i, temperature=1.0, ignore_eos=True) for i in range(2)]
    interrupts = 0
    for at in (3, 4, 7):
        tried = engine(WHOLE, drafter, EngineLimits(max_batch=4))
        first, second = (tried.submit(each)[0] for each in asked)
        text = tried.live(second).seq
        interrupt(tried, PLACES[place], at)
        while tried.busy:
            try:
                tried.step()
            except KeyboardInterrupt:
                interrupts += 1
                tried.cancel(first)
            tried.check()
        assert tuple(text.tokens[text.prompt_len :]) == WHOLE.judged(asked[1])[0].tokens
    assert interrupts > 0 or (drafter, place) in NOT_CALLED


def interrupt(tried: Engine, place: Place, at: int) -> None:
    """Let the at-th call be interrupted."""
    thing = place.thing(tried)
    real, calls = getattr(thing, place.method), iter(range(1, 1 << 30))

    def called(*args: Any, **named: Any) -> Any:
        behind = any(isinstance(each.state if isinstance(each, RoundView) else each, DeviceState) for each in args)
        if (behind or not place.behind) and next(calls) == at:
            raise KeyboardInterrupt
        return real(*args, **named)

    setattr(thing, place.method, called)


def at_random(rng: random.Random) -> Request:
    """Mostly options that a round can follow: no penalties, no masks."""
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.7, 1.3)),
        "top_k": rng.choice((0, 0, 5)),
        "top_p": rng.choice((1.0, 1.0, 0.8)),
        "presence_penalty": rng.choice((0.0,) * 7 + (0.7,)),
        "max_tokens": rng.choice((1, 2, 5, 17, 40, 200)),
        "ignore_eos": rng.random() < 0.7,
        "stop": rng.choice(((), (), ("ab", "gi"))),
        "stop_token_ids": rng.choice(((), (4,))),
        "logprobs": rng.choice((None, None, 2)),
        "seed": rng.randrange(1000),
        "n": rng.choice((1, 1, 1, 2)),
    }
    prompt = [rng.randrange(1, 6) for _ in range(rng.choice((1, 2, 5, 16, 17, 33, 130)))]
    made = request(prompt, **options)
    return Request(
        prompt=made.prompt, params=made.params, max_draft=rng.choice((None, None, 0, 2)), salt=rng.choice(("", "s"))
    )


class Schedule:
    """Submits, steps, cancels and scores other texts, at random."""

    def __init__(self, tried: Engine, rng: random.Random) -> None:
        self.tried, self.rng = tried, rng
        self.heard: dict[int, list[Event]] = {}
        self.asked: dict[int, tuple[Request, int]] = {}
        self.refused = 0

    def run(self, todo: list[Request]) -> None:
        calm = 0
        for _ in range(5000):
            if not todo and not self.tried.busy:
                return
            calm -= 1
            if calm < 0:
                self._disturb(todo)
                calm = self.rng.choice((0, 1, 3, 12))
            for event in self.tried.step():
                self.heard[event.seq_id].append(event)
            self.tried.check()
        raise AssertionError("not finished after 5000 rounds")

    def _disturb(self, todo: list[Request]) -> None:
        kind = self.rng.random()
        if todo and kind < 0.6:
            made = todo.pop()
            for i, seq_id in enumerate(self.tried.submit(made)):
                self.heard[seq_id], self.asked[seq_id] = [], (made, i)
        elif kind < 0.75:
            self._cancel()
        else:
            self._score()

    def _cancel(self) -> None:
        alive = [i for i in self.heard if self.tried.alive(i)]
        event = self.tried.cancel(self.rng.choice(alive)) if alive else None
        if event is not None:
            self.heard[event.seq_id].append(event)

    def _score(self) -> None:
        """Another text through the same target, between two rounds."""
        scoring = Scoring(self.tried.target, [self.rng.randrange(1, VOCAB) for _ in range(9)], 0)
        try:
            scoring.step()
        except RequestError:
            self.refused += 1  # NaN: nobody else's matter
        scoring.close()

    def told(self) -> list[tuple[Request, int, Told]]:
        return [(*self.asked[i], told_by(events)) for i, events in self.heard.items()]


@drafters
@pytest.mark.parametrize("world", [WHOLE, BREAKING], ids=["whole", "breaking"])
def test_at_random(drafter: str, world: Testbed):
    """Every text is the judge's, whole or up to where it was cancelled, and rounds do follow each other."""
    follows = 0
    for seed in range(12):
        rng = random.Random(f"{drafter} {seed}")
        limits = EngineLimits(max_batch=rng.choice((1, 2, 4)), max_round_tokens=rng.choice((9, 20, 512)))
        tried = engine(world, drafter, limits, rng.choice((176, 256, 4096)))
        schedule = Schedule(tried, rng)
        schedule.run([at_random(rng) for _ in range(10)])
        follows += followed(tried)
        for made, n, told in schedule.told():
            judged = world.judged(made)[n]
            if told.finish == "cancelled":
                assert_begins(told, judged, made.prompt)
            else:
                assert_same([told], [judged])
    assert follows > 100
