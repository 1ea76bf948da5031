"""Newcomers that join the round behind one in flight: their texts, and the others', are those of plain decoding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import test_block_on_gpu
from test_toy_eagle_on_gpu import BATCH, answers, requests

from outrider.bench.syncs import SyncCounter
from outrider.core.sequence import Span
from outrider.engine.engine import Engine
from outrider.engine.request import Request

pytestmark = pytest.mark.gpu
LENGTHS = (90, 7, 60, 8, 33, 90, 2, 61, 9, 40, 1, 75)
temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])
trees = pytest.mark.parametrize("tree", [None, 0], ids=["plain", "block"])


def asks(count: int, temperature: float) -> list[Request]:
    asked = requests(count, temperature)
    return [replace(each, params=replace(each.params, max_tokens=LENGTHS[i % 12])) for i, each in enumerate(asked)]


def count_reads(tried: Engine) -> list[list[Span]]:
    """What is read behind rounds in flight from now on."""
    target: Any = tried.target
    read, seen = target.read, list[list[Span]]()
    target.read = lambda spans, after=None: (seen.append(spans), read(spans, after))[1]
    return seen


def arriving(tried: Engine, asked: list[Request], every: int) -> list[tuple[int, ...]]:
    """Their answers, one more being asked for in every so many steps."""
    waiting, seqs, steps = list(asked), list[Any](), 0
    while waiting or tried.busy:
        if waiting and steps % every == 0:
            seqs.append(tried.live(tried.submit(waiting.pop(0))[0]).seq)
        tried.step()
        steps += 1
    tried.check()
    return [tuple(seq.tokens[seq.prompt_len :]) for seq in seqs]


@trees
@temperatures
@pytest.mark.parametrize("every", [1, 3])
def test_pinned_texts_are_those_of_each_alone(tree: int | None, temperature: float, every: int):
    asked = asks(24, temperature)
    tried, alone = test_block_on_gpu.engine(tree), test_block_on_gpu.engine(None)
    reads = count_reads(tried)
    told = arriving(tried, asked, every)
    assert told == [answers(alone, [each])[0] for each in asked]
    assert sum(map(len, reads)) > 7
    assert tried.stats.draft_failures == 0


@trees
def test_pinned_texts_in_a_small_cache(tree: int | None):
    asked = asks(24, 1.0)
    tried, alone = test_block_on_gpu.engine(tree, cache=768), test_block_on_gpu.engine(None)
    assert arriving(tried, asked, 1) == [answers(alone, [each])[0] for each in asked]


@trees
def test_texts_that_are_not_pinned_begin_as_those_of_each_alone(tree: int | None):
    """Bits depend on the other rows there, and texts part at near ties; few do so at once."""
    asked = asks(24, 1.0)
    tried = test_block_on_gpu.engine(tree, pinned=False)
    reads = count_reads(tried)
    told = arriving(tried, asked, 2)
    alone = test_block_on_gpu.engine(None, pinned=False)
    expected = [answers(alone, [each])[0] for each in asked]
    assert sum(own[:4] == text[:4] for own, text in zip(told, expected, strict=True)) >= 20
    assert sum(map(len, reads)) > 7


def test_nothing_is_waited_for_while_they_join():
    asked = asks(BATCH, 0.0)
    tried = test_block_on_gpu.engine(0)
    for each in asked[:3]:
        tried.submit(replace(each, params=replace(each.params, max_tokens=200)))
    for _ in range(8):
        tried.step()
    with SyncCounter() as waits:
        for each in asked[3:]:
            tried.submit(replace(each, params=replace(each.params, max_tokens=200)))
            for _ in range(3):
                tried.step()
                assert len(tried._in_flight) == 1
    assert waits.count <= 3 * len(asked[3:]), waits.where
