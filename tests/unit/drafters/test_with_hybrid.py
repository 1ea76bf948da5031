"""Which drafters of a mix become a hybrid."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.core.draft import EMPTY, Draft
from outrider.drafters.auto import AutoConfig, AutoMixConfig
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.hybrid import Hybrid, with_hybrid
from outrider.drafters.mix import MixConfig
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.suffix import SuffixConfig
from outrider.runners.overlays import PlainOverlays
from outrider.runners.pass_work import PassWork
from outrider.testing.toy import ToyRunner

HEAD = Traits(
    name="block", max_tokens=7, runs_model=True, drafts_ahead=True, drafts_newcomers=True, pays_budget=True, shares=True
)


class Head(Drafter):
    """Has what a hybrid reads of a head when it is made, and where the host knows all texts."""

    rows, lengths, runner = 8, (7,), SimpleNamespace(max_batch=8)

    def __init__(self, traits: Traits = HEAD) -> None:
        self.traits = traits

    def drafted_rows(self, view: RoundView) -> list[int]:
        return [*range(len(view.seqs))]

    def propose(self, view: RoundView) -> Seq[Draft]:
        return self.propose_for(view, self.drafted_rows(view))

    def propose_for(self, view: RoundView, rows: Seq[int]) -> Seq[Draft]:
        return [EMPTY] * len(view.seqs)


@dataclass(frozen=True)
class Given:
    """The configuration of a drafter that is there."""

    drafter: Drafter

    @property
    def traits(self) -> Traits:
        return self.drafter.traits

    def build(self, context: DrafterContext) -> Drafter:
        return self.drafter


def suffix() -> DeviceLookup:
    return DeviceLookup(SuffixConfig(device_tokens=64).rules(0.1), ToyRunner(), 2)


def prediction() -> DeviceLookup:
    return DeviceLookup(PredictionConfig().rules(0.1), ToyRunner(), 2)


def test_a_head_that_shares_and_lookups_are_a_hybrid_in_the_heads_place():
    drafters = [Head(replace(HEAD, name="other", shares=False)), Head(), prediction(), suffix()]
    made = with_hybrid(drafters, 2)
    assert [each is own for each, own in zip(made, drafters, strict=True)] == [True, False, True, True]
    hybrid = made[1]
    assert isinstance(hybrid, Hybrid)
    assert (hybrid.head, hybrid.lookups, hybrid.includes) == (drafters[1], drafters[3], (drafters[3],))
    assert hybrid.traits == replace(HEAD, name="block+suffix", max_tokens=15)  # of the lookups
    assert (hybrid.rows, hybrid.lengths) == (8, (7,))
    assert isinstance(hybrid.overlays, PlainOverlays)


@pytest.mark.parametrize(
    "drafters",
    [
        [],
        [Head()],
        [suffix(), prediction()],
        [Head(), prediction()],
        [Head(), Head(), suffix()],
        [Head(replace(HEAD, shares=False)), suffix()],
    ],
    ids=["nobody", "no lookup", "no head", "a lookup of predictions", "two heads", "a head that does not share"],
)
def test_others_stay_as_they_are(drafters: list[Drafter]):
    made = with_hybrid(drafters, 2)
    assert made is not drafters
    assert [*map(id, made)] == [*map(id, drafters)]


def test_of_two_lookups_the_first_takes_part():
    first, second = suffix(), suffix()
    (made, *rest) = with_hybrid([Head(), first, second], 2)
    assert isinstance(made, Hybrid)
    assert made.lookups is first
    assert rest == [first, second]


def test_a_mix_keeps_the_name_of_its_configuration(context: DrafterContext):
    head, lookups = Head(), suffix()
    config = MixConfig(of=(Given(lookups), Given(head)))
    mix: Any = config.build(context)
    assert mix.traits.name == config.traits.name == "suffix+block"
    assert [member.drafter.traits.name for member in mix.members] == ["suffix", "block+suffix"]
    assert [part.traits.name for part in mix.parts] == ["suffix", "block+suffix"]
    assert mix.parts[0] is lookups


def test_a_mix_does_not_ask_the_lookups_of_its_hybrid(context: DrafterContext, make: Any):
    head, lookups = Head(), suffix()
    asked: list[str] = []
    for each, name in ((head, "propose_for"), (lookups, "propose")):
        own = getattr(each, name)
        setattr(each, name, lambda *given, own=own, who=each.traits.name: (asked.append(who), own(*given))[1])
    hybrid = MixConfig(of=(Given(lookups), Given(head))).build(context)
    hybrid.propose(RoundView([make([1, 2, 1, 2])], [4]))
    assert asked == ["block"]


@pytest.mark.parametrize(("size", "joined"), [(270 << 20, False), (1 << 30, True), (None, False)])
def test_auto_joins_lookups_and_a_head_where_a_pass_of_the_target_reads_much(
    size: int | None, joined: bool, context: Any
):
    """None: it is not known what a pass reads."""
    target: Any = SimpleNamespace(work=None if size is None else PassWork(weights=size // 2, weight_bytes=size))
    members = Given(suffix()), Given(Head())
    made = AutoMixConfig(of=members).build(replace(context, target=target))
    assert any(each.drafter.drafter.includes for each in made.members) == joined
    assert any(each.drafter.drafter.includes for each in MixConfig(of=members).build(context).members)
    assert isinstance(AutoConfig().for_target(Path()), AutoMixConfig)
