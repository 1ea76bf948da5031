"""The block drafter inside captured rounds: the same texts, drafts on the device, one wait a round."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from test_graph_runner import VOCAB, decoder
from test_toy_eagle_on_gpu import BATCH, Plain, answers, assert_near_ties, drafts_of, requests

from outrider.bench.syncs import SyncCounter
from outrider.drafters.base import Drafter, DrafterContext
from outrider.drafters.block import Block, BlockConfig
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.hybrid import make_hybrid
from outrider.drafters.mix import Mix
from outrider.drafters.none import NoDraft
from outrider.drafters.suffix import SuffixConfig
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits
from outrider.runners.graphed_reads import ROWS
from outrider.runners.native import NativeRunner
from outrider.testing.toy import ByteTokenizer
from outrider.verify.base import make_verifier

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from tiny_block import block_config, random_block

pytestmark = pytest.mark.gpu
TREES = pytest.mark.parametrize("tree", [0, 15], ids=["chain", "tree"])


def engine(
    tree: int | None,
    *,
    mode: Literal["seeded", "distribution"] = "seeded",
    pinned: bool = True,
    cache: int = 8192,
    qk_norm: bool = False,
    share: int = 0,
    lookups: SuffixConfig | None = None,
) -> Engine:
    """tree None: without a drafter. Pinned, so that a text has the same bits with and without drafts.

    lookups: beside the head, as one drafter with it.
    """
    target = NativeRunner(decoder(4), cache, context=1024, pinned=pinned)
    drafter: Drafter = NoDraft()
    if tree is not None:
        own = target.model.decoder
        sizes = {"heads": 9, "kv_heads": 3, "head_dim": 64, "intermediate_size": 768, "block_size": 6}
        config = block_config(own.config, draft_vocab_size=700, confidence=True, qk_norm=qk_norm, **sizes)
        head = random_block(config, own).to(own.device, own.dtype)
        context = DrafterContext(vocab_size=VOCAB, context=1024, mode=mode, target=target, max_batch=BATCH)
        drafter = Block(BlockConfig(model="random", tree=tree, share=share), head, target, context)
        assert drafter.runner.fused is not None
        assert len(list(drafter.runner.capture(BATCH))) == 4 + len(ROWS)
        if lookups is not None:
            found = DeviceLookup(lookups.rules(0.1), target, BATCH)
            drafter = Mix([found, make_hybrid(drafter, found, BATCH)], VOCAB)
    list(target.capture(BATCH, 1 + drafter.traits.max_tokens))
    limits = EngineLimits(max_batch=BATCH, max_round_tokens=512)
    return Engine(target, drafter, make_verifier(mode), ByteTokenizer(), limits=limits)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", [8192, 768], ids=["roomy", "preempted"])
def test_pinned_texts_are_plain_decodings(temperature: float, cache: int):
    asked = requests(12, temperature)
    tried = engine(0, cache=cache)
    assert answers(tried, asked) == answers(engine(None), asked)
    assert tried.stats.all.drafted > 500
    assert tried.stats.draft_failures == 0


@TREES
@pytest.mark.parametrize("qk_norm", [False, True])
def test_texts_differ_from_plain_decoding_only_at_near_ties(tree: int, qk_norm: bool):
    asked = requests(12, 1.0)
    tried, plain = engine(tree, pinned=False, qk_norm=qk_norm), engine(None, pinned=False)
    texts, expected = answers(tried, asked), answers(plain, asked)
    assert tried.stats.all.drafted > 500
    assert tried.stats.draft_failures == 0
    assert_near_ties(plain, asked, texts, expected)


def shared_passes(tried: Engine) -> list[int]:
    """Rows of passes from now on in which drafts share them, those that are repeated left out: most are."""
    graphs: Any = tried.target.graphs
    score, seen = graphs.score, list[int]()

    def noted(*given: Any) -> Any:
        scores = score(*given)
        if scores.handle is not None and scores.handle.inputs.shared:
            seen.append(scores.handle.shape.rows)
        return scores

    graphs.score = noted
    return seen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("share", [1, 3])
def test_texts_whose_drafts_share_rows_differ_from_plain_decoding_only_at_near_ties(share: int, temperature: float):
    asked = requests(20, temperature)
    tried, plain = engine(0, pinned=False, share=share), engine(None, pinned=False)
    passes = shared_passes(tried)
    texts, expected = answers(tried, asked), answers(plain, asked)
    assert passes
    assert {*passes} <= {16, 32}
    figures = tried.stats.all
    assert figures.drafted > 500
    assert max(figures.by_depth) > 0
    assert any(figures.by_depth[share + 1 :]), "no draft has more than its part"
    assert tried.stats.draft_failures == 0
    assert_near_ties(plain, asked, texts, expected)


def test_rows_of_a_pass_that_nobody_else_needs_have_draft_tokens():
    tried = engine(0, pinned=False, share=2)
    answers(tried, requests(24, 1.0))
    figures = tried.stats.all
    # 16 or 32 rows for 4 or 8 texts; the last three texts share no rows, and have drafts of six tokens
    assert 2 * figures.rounds < figures.drafted <= 3.2 * figures.rounds


@TREES
def test_a_round_waits_once_and_rounds_follow_each_other(tree: int):
    tried = engine(tree, pinned=False)
    for each in requests(BATCH, 1.0, tokens=300):
        tried.submit(each)
    for _ in range(20):
        tried.step()
    assert len(tried._in_flight) == 1
    torch.cuda.synchronize()
    with SyncCounter() as waits:
        for _ in range(20):
            tried.step()
    assert waits.count <= 20, waits


def test_mode_distribution_runs_and_accepts():
    tried = engine(0, mode="distribution", pinned=False)
    texts = answers(tried, requests(6, 1.0, tokens=30))
    assert all(len(text) >= 28 for text in texts)
    assert tried.stats.draft_failures == 0
    assert tried.stats.all.drafted > 100


@TREES
def test_captured_drafts_are_those_of_plain_calls(tree: int, monkeypatch: pytest.MonkeyPatch):
    asked = requests(3, 1.0)
    captured = drafts_of(engine(tree), asked)
    for module in ("draft_batch", "graphed_reads"):
        monkeypatch.setattr(f"outrider.runners.{module}.capture", lambda work, pool, name: Plain(work))
    plain = drafts_of(engine(tree), asked)
    assert len(captured) > 50
    assert captured == plain
