"""Drafters that read the target's layers, in captured rounds: the same texts, drafts on the device, one wait each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_graph_runner import VOCAB, decoder
from test_toy_eagle_on_gpu import BATCH, answers, assert_near_ties, requests

from outrider.bench.syncs import SyncCounter
from outrider.drafters.base import DrafterContext
from outrider.drafters.none import NoDraft
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits
from outrider.runners.native import NativeRunner
from outrider.testing.toy import ByteTokenizer
from outrider.verify.base import make_verifier

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from drafter_cast import with_heads

pytestmark = pytest.mark.gpu
SPECS = (
    "layer-skip:skip=1,k=4",
    "medusa:model=tiny-medusa,tree=0",
    "medusa:model=tiny-medusa,tree=9",
    "mtp:model=tiny-mtp,k=3",
    "mtp:model=tiny-mtp,tree=7,depth=3,top_k=3",
    "block:model=tiny-block",
    "block:model=tiny-block,tree=7",
)
specs = pytest.mark.parametrize("spec", SPECS)


def engine(spec: str, *, mode: str = "seeded", pinned: bool = True, cache: int = 8192) -> Engine:
    """Pinned, so that a text has the same bits with and without drafts."""
    target = NativeRunner(decoder(4), cache, context=1024, pinned=pinned)
    drafter = NoDraft()
    if spec:
        context = DrafterContext(vocab_size=VOCAB, context=1024, mode=mode, target=target, max_batch=BATCH)
        drafter = parse_drafter(with_heads(spec, target)).build(context)
    list(target.capture(BATCH, 1 + drafter.traits.max_tokens))
    limits = EngineLimits(max_batch=BATCH, max_round_tokens=512)
    return Engine(target, drafter, make_verifier(mode), ByteTokenizer(), limits=limits)


@specs
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", [8192, 768], ids=["roomy", "preempted"])
def test_pinned_texts_are_plain_decodings(spec: str, temperature: float, cache: int):
    """Of trees, a pinned runner scores the first chain."""
    asked = requests(12, temperature)
    tried = engine(spec, cache=cache)
    assert answers(tried, asked) == answers(engine(""), asked)
    assert tried.stats.all.drafted > 400
    assert tried.stats.draft_failures == 0


@specs
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_differ_from_plain_decoding_only_at_near_ties(spec: str, temperature: float):
    asked = requests(12, temperature)
    tried, plain = engine(spec, pinned=False), engine("", pinned=False)
    texts, expected = answers(tried, asked), answers(plain, asked)
    assert tried.stats.all.drafted > 400
    assert tried.stats.draft_failures == 0
    assert sum(one == other for one, other in zip(texts, expected, strict=True)) >= 4
    assert_near_ties(plain, asked, texts, expected)


@specs
def test_a_round_waits_once_and_rounds_follow_each_other(spec: str):
    tried = engine(spec, pinned=False)
    for each in requests(BATCH, 1.0, tokens=300):
        tried.submit(each)
    for _ in range(20):
        tried.step()
    assert len(tried._in_flight) == 1
    before = tried.stats.tokens
    torch.cuda.synchronize()
    with SyncCounter() as waits:
        for _ in range(20):
            tried.step()
    assert waits.count <= 20, waits
    assert before == tried.stats.tokens  # none has ended meanwhile


@specs
def test_mode_distribution_runs_and_accepts(spec: str):
    tried = engine(spec, mode="distribution", pinned=False)
    texts = answers(tried, requests(6, 1.0, tokens=30))
    assert all(len(text) >= 28 for text in texts)
    assert tried.stats.draft_failures == 0
    assert tried.stats.all.drafted > 100
