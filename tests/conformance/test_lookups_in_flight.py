"""Lookups as on a device, launched behind the round in flight: every text is plain decoding's, drafts are accepted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from async_toy import ASYNC_TOY, AsyncToyRunner, target
from drafter_cast import Loud
from lookup_checks import CheckedLookup
from plain_decoding import assert_same, request, run
from test_cancellation import assert_begins
from test_rounds_behind_rounds import Schedule, at_random
from testbed import CONTEXT, TOKENIZER, VOCAB

from outrider.drafters.base import Drafter, DrafterContext, RoundView
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.drafters.mix import Mix
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.suffix import SuffixConfig
from outrider.engine import drafting
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.verify.base import make_verifier

RULES = {
    "suffix": SuffixConfig(device_tokens=256).rules(0.1),
    "eager": SuffixConfig(k=6).rules(0.0),
    "prompt-lookup": PromptLookupConfig(k=5).rules(0.05),
    "prediction": PredictionConfig().rules(0.1),
}
rules = pytest.mark.parametrize("name", [*RULES, "mix", "with-model"])


def drafter_of(name: str, runner: AsyncToyRunner, max_batch: int = 8) -> Drafter:
    """`mix`: all of them; `with-model`: one of them beside a draft model."""
    if name in RULES:
        return DeviceLookup(RULES[name], runner, max_batch)
    lookups = [DeviceLookup(RULES[each], runner, max_batch) for each in ("suffix", "prediction")]
    if name == "mix":
        return Mix(lookups, VOCAB)
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT)
    return Mix([lookups[0], DraftModel(target(order=1), context, DraftModelConfig(model="-", k=4))], VOCAB)


def engine(name: str, limits: EngineLimits | None = None, cache_tokens: int = 4096) -> tuple[Engine, AsyncToyRunner]:
    limits, runner = limits or EngineLimits(max_batch=4), target(cache_tokens)
    tried = Loud(drafter_of(name, runner, limits.max_batch))
    made = Engine(runner, tried, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)
    return made, runner


def repetitive(count: int) -> list[Request]:
    """Greedy texts of the toy fall into a loop; each is asked for twice, with what it says as a prediction."""
    asked = [request([1 + i % 5, 2, 3], max_tokens=100, ignore_eos=True) for i in range(count)]
    return [replace(each, prediction=ASYNC_TOY.judged(each)[0].tokens) for each in asked]


@rules
def test_texts_that_repeat_are_plain_decodings_in_few_rounds(name: str):
    asked = repetitive(6)
    tried, runner = engine(name)
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    tally = tried.stats.all
    assert tally.accepted > 0.4 * tried.stats.tokens
    assert tally.accepted > 0.4 * tally.drafted
    assert runner.followed > 10


@rules
def test_every_option_gives_the_same_text(name: str):
    asked = ASYNC_TOY.pairwise_requests()[:40]
    tried, _ = engine(name, EngineLimits(max_batch=8, max_round_tokens=40))
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))


def assert_judged(schedule: Schedule) -> None:
    """Every text is the judge's, whole or up to where it was cancelled."""
    for made, n, told in schedule.told():
        judged = ASYNC_TOY.judged(made)[n]
        if told.finish == "cancelled":
            assert_begins(told, judged, made.prompt)
        else:
            assert_same([told], [judged])


@rules
def test_at_random(name: str):
    """Cancelled, preempted, batches that change: every text is the judge's, whole or up to where it was cancelled."""
    followed = 0
    for seed in range(6):
        rng = random.Random(f"{name} {seed}")
        limits = EngineLimits(max_batch=rng.choice((1, 2, 4)), max_round_tokens=rng.choice((9, 64, 512)))
        tried, runner = engine(name, limits, rng.choice((176, 256, 4096)))
        schedule = Schedule(tried, rng)
        schedule.run([at_random(rng) for _ in range(10)])
        followed += runner.followed
        assert_judged(schedule)
    assert followed > 50


@pytest.mark.parametrize("cache_tokens", [4096, 256], ids=["roomy", "preempted"])
def test_drafts_are_what_a_search_of_the_text_finds(cache_tokens: int):
    rng, runner = random.Random(3), target(cache_tokens)
    tried = CheckedLookup(PromptLookupConfig(k=5).rules(0.0), runner, max_batch=3)  # texts take each other's slots
    limits: Any = EngineLimits(max_batch=3, max_round_tokens=40)
    made = Engine(runner, Loud(tried), make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids, limits=limits)
    asked = [at_random(rng) for _ in range(20)] + repetitive(4)
    cut = 0
    for told, each in zip(run(made, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
        cut += sum(text.finish == "length" for text in told)
    beyond = tried.drafted - made.stats.all.drafted  # the ends of texts: figures count their last drafts up to there
    assert cut > 0
    assert 0 <= beyond <= 5 * cut
    assert made.stats.all.drafted > 100
    assert runner.followed > 20
    assert (made.stats.preemptions > 0) == (cache_tokens == 256)


def test_answers_are_drafted_from_by_their_own_salt_alone():
    """The same request again: what the first answer said is drafted, unless it was another salt's."""
    asked = request([3, 1, 4], max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)
    accepted = []
    for salt in ("", "other"):
        tried, _ = engine("eager")
        run(tried, [asked])
        before = tried.stats.all.accepted
        run(tried, [replace(asked, salt=salt)])
        accepted.append(tried.stats.all.accepted - before)
    assert accepted[0] > 25
    assert accepted[1] < 10


def test_rounds_without_drafts_are_judged_by_the_text(monkeypatch: pytest.MonkeyPatch):
    """Watched and never asked, it says how far its guesses would have stood: all the way once a text repeats."""
    asked = request([1, 2, 3], max_tokens=100, ignore_eos=True)
    tried, _ = engine("eager")
    monkeypatch.setattr(drafting, "_WATCHING_SHARE", 1.0)  # it sees every round: no clock decides that
    lookup: Any = tried.drafter
    guessed = []
    tried.submit(replace(asked, max_draft=0))
    while tried.busy:
        launch = tried._in_flight[0] if tried._in_flight else None
        state = None if launch is None else launch.state
        seqs = [live.seq for live in tried._live.values()]
        if seqs and seqs[0].generated and state is not None:
            lookup.drafter.watch(RoundView(seqs, [0], state))
        tried.step()
        guessed += lookup.drafter.take_evidence()
    assert len(guessed) > 5
    assert {each.seq_id for each in guessed} == {0}
    assert all(each.accepted == each.length for each in guessed[-3:])
    assert any(each.accepted < each.length for each in guessed)
