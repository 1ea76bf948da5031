"""Lookups on a device in rounds that are repeated: every text is plain decoding's, every draft what a search finds."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from async_toy import ASYNC_TOY
from drafter_cast import Loud
from lookup_checks import CheckedLookup
from plain_decoding import assert_same, run
from repeating_toy import RepeatingToy
from test_lookups_in_flight import RULES, assert_judged, repetitive
from test_rounds_behind_rounds import Schedule, at_random
from testbed import TOKENIZER, VOCAB

from outrider.core.draft import Draft, Verdict
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence, Span
from outrider.drafters import device_lookup
from outrider.drafters.base import Drafter, RoundView
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.mix import Mix
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.runners.device_state import DeviceState
from outrider.verify.base import make_verifier


class SharingToy(RepeatingToy):
    """Has passes whose rows drafts share, of 8 rows more than are asked for. Reading leaves states as they are."""

    def shared_tokens(self, lengths: Seq[int], longest: int) -> int:
        return sum(lengths) + 8

    def read(self, spans: Seq[Span], after: DeviceState | None = None) -> DeviceState | None:
        self.score(spans)
        return after


targets = pytest.mark.parametrize("toy", [RepeatingToy, SharingToy])
rules = pytest.mark.parametrize("name", [*RULES, "mix"])


def engine(name: str, target: RepeatingToy, max_batch: int = 4) -> Engine:
    lookups = [DeviceLookup(RULES[each], target, max_batch) for each in ("suffix", "prediction")]
    tried: Drafter = Mix(lookups, VOCAB) if name == "mix" else DeviceLookup(RULES[name], target, max_batch)
    return made(tried, target, EngineLimits(max_batch=max_batch))


def made(tried: Drafter, target: RepeatingToy, limits: EngineLimits) -> Engine:
    eos = TOKENIZER.eos_ids
    return Engine(target, Loud(tried), make_verifier("seeded"), TOKENIZER, eos_ids=eos, limits=limits)


def without_predictions(count: int) -> list[Request]:
    return [Request(prompt=each.prompt, params=each.params) for each in repetitive(count)]


@targets
@rules
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_texts_that_repeat_are_plain_decodings(toy: type[RepeatingToy], name: str, batch: int):
    target = toy()
    tried = engine(name, target, batch)
    asked = repetitive(6) if name == "prediction" else without_predictions(6)
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    assert tried.stats.all.accepted > 0.4 * tried.stats.tokens
    if batch < 4 or toy is SharingToy:  # else a text without a match has no row, and rounds differ
        assert target.repeated > 0.2 * target.followed


@targets
@pytest.mark.parametrize("name", ["suffix", "eager", "prompt-lookup", "mix"])
def test_at_random(toy: type[RepeatingToy], name: str):
    """Cancelled, preempted, batches that change: every text is the judge's, whole or up to where it was cancelled."""
    repeated = 0
    for seed in range(6):
        rng = random.Random(f"{name} {seed}")
        target = toy(rng.choice((176, 256, 4096)))
        tried = engine(name, target, rng.choice((1, 2, 5)))
        schedule = Schedule(tried, rng)
        schedule.run([at_random(rng) for _ in range(10)])
        repeated += target.repeated
        assert_judged(schedule)
    assert repeated > 0


@targets
@pytest.mark.parametrize("cache_tokens", [4096, 256], ids=["roomy", "preempted"])
def test_drafts_are_what_a_search_of_the_text_finds(toy: type[RepeatingToy], cache_tokens: int):
    rng, target = random.Random(3), toy(cache_tokens)
    tried = CheckedLookup(PromptLookupConfig(k=5).rules(0.0), target, max_batch=3)  # texts take each other's slots
    all_of_them = made(tried, target, EngineLimits(max_batch=3, max_round_tokens=40))
    asked = [at_random(rng) for _ in range(20)] + without_predictions(4)
    for told, each in zip(run(all_of_them, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    assert all_of_them.stats.all.drafted > 100
    assert target.repeated > 20


class Noting(DeviceLookup):
    """Notes what it was asked for: rounds, and how many were repeated."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rounds: list[tuple[int, bool]] = []
        """Tokens of all drafts that a pass is chosen for, and whether the round is repeated."""

    def propose(self, view: RoundView) -> list[Draft] | None:
        drafts = super().propose(view)
        if view.state is not None and drafts:
            self.rounds.append((sum(draft.scored for draft in drafts), False))
        return drafts

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        block = super().repeat(view, drafts)
        if block is not None:
            self.rounds.append((sum(draft.scored for draft in drafts), True))
        return block


def test_more_rows_are_taken_once_matches_call_for_them(monkeypatch: pytest.MonkeyPatch):
    """A text that has found its loop drafts whole loops; until then there is a row or two for a match to begin in."""
    monkeypatch.setattr(device_lookup, "_MAX_REPEATS", 10_000)  # only what is called for ends repetitions
    target = SharingToy()
    tried = Noting(RULES["suffix"], target, 3)
    run(made(tried, target, EngineLimits(max_batch=3)), without_predictions(3))
    tokens = [n for n, _ in tried.rounds]
    assert min(tokens[:5]) <= 6
    assert max(tokens) > 20
    assert sum(repeated for _, repeated in tried.rounds) > 5


def test_a_lookup_is_launched_anew_after_some_repetitions():
    target = RepeatingToy()
    tried = Noting(RULES["eager"], target, 2)
    run(made(tried, target, EngineLimits(max_batch=2)), without_predictions(2))
    streaks = "".join("r" if repeated else "n" for _, repeated in tried.rounds).split("n")
    assert max(map(len, streaks)) == device_lookup._MAX_REPEATS


class JudgingBeforeDrafts(Noting):
    """Learns from rounds when that is used, also where texts join."""

    def _has_time(self, view: RoundView) -> bool:
        return True


class JudgingAtOnce(JudgingBeforeDrafts):
    """Learns from every round when it is observed, and not when that is used."""

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        super().observe(seqs, drafts, verdicts)
        self._judge()


@targets
@pytest.mark.parametrize("name", RULES)
def test_rounds_that_are_judged_later_change_no_draft(toy: type[RepeatingToy], name: str):
    """Texts that end at different times, and others that take their slots: the same rounds, the same figures."""
    asked = repetitive(9) if name == "prediction" else without_predictions(9)
    asked = [replace(each, params=replace(each.params, max_tokens=30 + 7 * i)) for i, each in enumerate(asked)]
    rounds, drafted, figures = [], [], []
    for kind in (JudgingBeforeDrafts, JudgingAtOnce):
        target = toy()
        tried = kind(RULES[name], target, 3)
        every = made(tried, target, EngineLimits(max_batch=3))
        for told, each in zip(run(every, asked), asked, strict=True):
            assert_same(told, ASYNC_TOY.judged(each))
        tried._judge()
        rounds.append(tried.rounds)
        drafted.append((every.stats.all.drafted, every.stats.all.accepted))
        figures.append((tried._figures.limits.tolist(), tried._figures.reach.tolist(), tried._rows.tolist()))
    assert rounds[0] == rounds[1]
    assert drafted[0] == drafted[1]
    assert figures[0] == figures[1]
    assert any(repeated for _, repeated in rounds[0])


@pytest.mark.parametrize("batch", [1, 4])
def test_the_more_texts_share_a_round_the_surer_a_token_must_be(batch: int):
    """In a batch of four here as likely as not to be accepted, alone at least one in eight."""
    drafted: list[int] = []
    for row_share in (0.0, 0.125):
        target = SharingToy()
        tried = DeviceLookup(replace(RULES["eager"], row_share=row_share), target, batch)
        every = made(tried, target, EngineLimits(max_batch=batch))
        asked = [replace(each, params=replace(each.params, temperature=1.0, seed=7)) for each in without_predictions(4)]
        for told, each in zip(run(every, asked), asked, strict=True):
            assert_same(told, ASYNC_TOY.judged(each))
        drafted.append(every.stats.all.drafted)
    assert drafted[1] < (0.9 if batch == 1 else 0.5) * drafted[0]


def test_newcomers_are_drafted_for_in_the_round_that_they_join():
    """Their texts are known to the host, which the device is told; the round behind that one is repeated."""
    target = SharingToy()
    tried = Noting(RULES["eager"], target, 3)
    joined: list[tuple[int, int]] = []
    propose = tried.propose

    def proposed(view: RoundView) -> list[Draft] | None:
        drafts = propose(view)
        if view.newcomers and drafts:
            joined.append((view.newcomers, sum(len(draft) > 0 for draft in drafts[-view.newcomers :])))
        return drafts

    tried.propose = proposed
    asked = [
        replace(each, params=replace(each.params, max_tokens=20 + 7 * i))
        for i, each in enumerate(without_predictions(9))
    ]
    for told, each in zip(run(made(tried, target, EngineLimits(max_batch=3)), asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    assert len(joined) > 3
    assert all(drafted == newcomers for newcomers, drafted in joined)


def test_a_member_that_is_asked_beside_another_is_not_repeated():
    """With predictions two members are asked and compared: what one would have drafted is not known."""
    target = SharingToy()
    tried = engine("mix", target)
    asked = repetitive(4)
    for told, each in zip(run(tried, asked), asked, strict=True):
        assert_same(told, ASYNC_TOY.judged(each))
    assert target.repeated == 0
