"""A block head and lookups as one drafter, inside captured rounds: plain decoding's texts, drafts of both kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_block_on_gpu import engine, shared_passes
from test_device_lookup import requests
from test_repeated_on_gpu import anew, assert_waits_once, count_repeats
from test_toy_eagle_on_gpu import BATCH, answers, assert_near_ties

from outrider.drafters.hybrid import Hybrid
from outrider.drafters.suffix import SuffixConfig
from outrider.engine.engine import Engine
from outrider.runners.draft_batch import HeadDraft, Share
from outrider.runners.overlays import PlainOverlays

pytestmark = pytest.mark.gpu
LOOKUPS = SuffixConfig()
temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])


def hybrid_of(tried: Engine) -> Hybrid:
    drafter: Any = tried.drafter
    return drafter.members[-1].drafter.drafter


class Watched:
    """Overlays that note how many chains they replaced, and that the plain ones do the same; waits for the device."""

    def __init__(self, hybrid: Hybrid) -> None:
        self.own, self.plain = hybrid.overlays, PlainOverlays(hybrid.lookups.k)
        self.replaced = self.kept = 0
        self.longest = 0
        """Tokens of the longest draft beyond those that the head drafts."""
        hybrid.overlays = self

    def run(self, made: HeadDraft, found: torch.Tensor, share: Share | None) -> HeadDraft:
        judge = self.plain.run(made, found, share)
        return self._compared(made, found, self.own.run(made, found, share), judge)

    def again(self, made: HeadDraft, found: torch.Tensor) -> HeadDraft:
        judge = self.plain.again(made, found)
        return self._compared(made, found, self.own.again(made, found), judge)

    def _compared(self, made: HeadDraft, found: torch.Tensor, drafts: HeadDraft, judge: HeadDraft) -> HeadDraft:
        assert drafts.tokens.tolist() == judge.tokens.tolist()
        tokens, k = drafts.tokens, self.plain.k
        same = ((tokens[:, :k] == found[:, :k]) | (tokens[:, :k] < 0)).all(1) & (found[:, 0] >= 0)
        self.replaced += int(same.sum())
        self.kept += int((~same).sum())
        self.longest = max(self.longest, int((tokens >= 0).sum(1).max()) - made.tokens.shape[1])
        return drafts


@temperatures
@pytest.mark.parametrize("cache", [8192, 768], ids=["roomy", "preempted"])
def test_pinned_texts_are_plain_decodings(temperature: float, cache: int):
    asked = requests(12, temperature)
    tried = engine(0, cache=cache, lookups=LOOKUPS)
    repeats = count_repeats(tried)
    assert answers(tried, asked) == answers(engine(None), asked)
    assert tried.stats.all.drafted > 500
    assert tried.stats.draft_failures == 0
    assert len(repeats) > 5


@temperatures
@pytest.mark.parametrize("share", [0, 2])
def test_captured_overlays_are_the_plain_ones(share: int, temperature: float):
    """In rounds launched anew and repeated ones; of both kinds of drafts there are some."""
    tried = engine(0, pinned=False, share=share, lookups=LOOKUPS)
    repeats, seen = count_repeats(tried), Watched(hybrid_of(tried))
    answers(tried, requests(BATCH, temperature, tokens=120))
    assert tried.stats.draft_failures == 0
    assert len(repeats) > 5
    assert seen.kept > 20
    assert temperature or (seen.replaced > 20 and seen.longest > 0)  # sampled, a random model hardly repeats itself


@temperatures
def test_texts_whose_drafts_share_rows_differ_from_plain_decoding_only_at_near_ties(temperature: float):
    asked = requests(20, temperature)
    tried, plain = engine(0, pinned=False, share=2, lookups=LOOKUPS), engine(None, pinned=False)
    passes = shared_passes(tried)
    texts, expected = answers(tried, asked), answers(plain, asked)
    assert len(passes) > 5
    assert tried.stats.draft_failures == 0
    assert_near_ties(plain, asked, texts, expected)


@temperatures
def test_repeated_rounds_draft_as_rounds_launched_anew(temperature: float):
    """Texts, not drafts: what lookups learn goes to the device when a round is launched anew."""
    asked = requests(3, temperature, tokens=150)
    tried = engine(0, lookups=LOOKUPS)
    repeats = count_repeats(tried)
    assert answers(tried, asked) == answers(anew(engine(0, lookups=LOOKUPS)), asked)
    assert len(repeats) > 10


def test_a_round_waits_once():
    assert_waits_once(engine(0, pinned=False, share=2, lookups=LOOKUPS), requests(BATCH, 0.0, tokens=300), 5)
