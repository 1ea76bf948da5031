"""EAGLE heads inside captured rounds: the same texts, drafts on the device, one wait a round."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_graph_runner import VOCAB, decoder
from test_toy_eagle_on_gpu import BATCH, Plain, answers, assert_near_ties, drafts_of, engine, requests

from outrider.bench.syncs import SyncCounter
from outrider.drafters.eagle import EagleConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from tiny_eagle import eagle_config, random_eagle, save_eagle

pytestmark = pytest.mark.gpu
WAYS = {
    "eagle1": ({"kind": "eagle", "bias": True}, {"k": 5}),
    "eagle3 reduced": ({"draft_vocab_size": VOCAB - 300, "norm_output": True, "fc_norm": True}, {"k": 5}),
    "eagle1 tree": ({"kind": "eagle"}, {"tree": 15, "depth": 4, "top_k": 4}),
    "eagle3 tree": ({"draft_vocab_size": VOCAB - 300, "own_head": True}, {"tree": 24, "depth": 6, "top_k": 8}),
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    target, folder = decoder(4), tmp_path_factory.mktemp("heads")
    return {
        name: save_eagle(folder / name, random_eagle(eagle_config(target.config, **head), target))
        for name, (head, _) in WAYS.items()
    }


@pytest.fixture(params=WAYS)
def config(request: pytest.FixtureRequest, heads: dict[str, Path]) -> EagleConfig:
    return EagleConfig(model=str(heads[request.param]), **WAYS[request.param][1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", [8192, 768], ids=["roomy", "preempted"])
def test_pinned_texts_are_plain_decodings(config, temperature, cache):
    """A pinned runner scores chains only, so a tree's depth is drafted as a chain."""
    asked = requests(12, temperature)
    tried = engine(config, cache=cache)
    assert answers(tried, asked) == answers(engine(None), asked)
    assert tried.stats.all.drafted > 500
    assert tried.stats.draft_failures == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", [8192, 768], ids=["roomy", "preempted"])
def test_texts_differ_from_plain_decoding_only_at_near_ties(config, temperature, cache):
    asked = requests(12, temperature)
    tried, plain = engine(config, cache=cache, pinned=False), engine(None, pinned=False)
    texts, expected = answers(tried, asked), answers(plain, asked)
    assert tried.stats.all.drafted > 500
    assert tried.stats.draft_failures == 0
    assert sum(one == other for one, other in zip(texts, expected, strict=True)) >= 4
    assert_near_ties(plain, asked, texts, expected)


def test_a_round_waits_once_and_rounds_follow_each_other(config):
    tried = engine(config, pinned=False)
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


def test_a_round_is_two_replays_and_one_without_drafts(config, monkeypatch):
    """One of the head, which reads, drafts and chooses, and one of the target."""
    replay, seen = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: seen.append(graph) or replay(graph))
    for max_draft, replays in ((None, 2), (0, 1)):
        tried = engine(config, pinned=False)
        for each in requests(BATCH, 1.0, tokens=300):
            tried.submit(replace(each, max_draft=max_draft))
        for _ in range(20):
            tried.step()
        seen.clear()
        for _ in range(20):
            tried.step()
        assert len(seen) == 20 * replays
        assert tried.stats.draft_failures == 0


def test_mode_distribution_runs_and_accepts(config):
    tried = engine(config, mode="distribution", pinned=False)
    texts = answers(tried, requests(6, 1.0, tokens=30))
    assert all(len(text) >= 28 for text in texts)
    assert tried.stats.draft_failures == 0
    assert tried.stats.all.drafted > 100


def test_captured_drafts_are_those_of_plain_calls(config, monkeypatch):
    asked = requests(3, 1.0)
    captured = drafts_of(engine(config), asked)
    monkeypatch.setattr("outrider.runners.draft_batch.capture", lambda work, pool, name: Plain(work))
    plain = drafts_of(engine(config), asked)
    assert len(captured) > 50
    assert captured == plain
