"""Rounds repeated by replays alone: texts and drafts are those of an engine that launches every round anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_block_on_gpu
import test_toy_eagle_on_gpu
import torch
from test_graph_runner import VOCAB, decoder
from test_toy_eagle_on_gpu import BATCH, answers, requests

from outrider.bench.syncs import SyncCounter
from outrider.drafters.base import RoundView
from outrider.drafters.eagle import EagleConfig
from outrider.drafters.suffix import SuffixConfig
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.runners.base import Scores

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from tiny_eagle import eagle_config, random_eagle, save_eagle

pytestmark = pytest.mark.gpu
Make = Callable[..., Engine]
LENGTHS = (90, 7, 60, 8, 33, 90, 2, 61, 9, 40, 1, 75)
temperatures = pytest.mark.parametrize("temperature", [0.0, 1.0])


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = decoder(4)
    config = eagle_config(target.config, draft_vocab_size=VOCAB - 300, norm_output=True, fc_norm=True)
    return save_eagle(tmp_path_factory.mktemp("heads") / "eagle3", random_eagle(config, target))


@pytest.fixture(params=["plain", "block", "block that shares rows", "block and lookups", "eagle of 4", "eagle of 5"])
def make(request: pytest.FixtureRequest, head: Path) -> Make:
    """Passes of 1 and 6 rows a text are captured as such; those of 5 and 7 rows are padded."""
    kind = request.param
    if kind.startswith("eagle"):
        config: Any = EagleConfig(model=str(head), k=int(kind[-1]))
        return lambda **options: test_toy_eagle_on_gpu.engine(config, **options)
    tree, share = None if kind == "plain" else 0, 2 if kind.endswith("rows") else 0
    lookups = SuffixConfig() if kind.endswith("lookups") else None
    return lambda **options: test_block_on_gpu.engine(tree, share=share, lookups=lookups, **options)


def asks(count: int, temperature: float, lengths: tuple[int, ...] = LENGTHS) -> list[Request]:
    asked = requests(max(count, 3), temperature)[:count]
    return [
        replace(each, params=replace(each.params, max_tokens=lengths[i % len(lengths)])) for i, each in enumerate(asked)
    ]


def count_repeats(tried: Engine) -> list[Scores]:
    """The passes that are repeated from now on."""
    target: Any = tried.target
    repeat, seen = target.repeat, list[Scores]()
    target.repeat = lambda scores: (seen.append(scores), repeat(scores))[1]
    return seen


def anew(tried: Engine) -> Engine:
    """The same engine, launching every round anew."""
    target: Any = tried.target
    target.can_repeat = lambda scores, after: False
    return tried


@temperatures
@pytest.mark.parametrize("count", [1, 3, BATCH])
def test_pinned_texts_are_those_of_rounds_launched_anew(make: Make, temperature: float, count: int):
    """Texts end at different places meanwhile."""
    asked = asks(count, temperature)
    tried = make()
    repeats = count_repeats(tried)
    told = answers(tried, asked)
    assert told == answers(anew(make()), asked)
    assert [len(text) for text in told] == [each.params.max_tokens for each in asked]
    assert len(repeats) > 5
    assert tried.stats.draft_failures == 0


@temperatures
def test_pinned_texts_in_a_small_cache(make: Make, temperature: float):
    """Some wait, and some lose their pages and come back."""
    asked = asks(12, temperature, lengths=(90, 85))
    tried = make(cache=768)
    repeats = count_repeats(tried)
    assert answers(tried, asked) == answers(anew(make(cache=768)), asked)
    assert len(repeats) > 0
    assert tried.stats.preemptions > 0


@temperatures
@pytest.mark.parametrize("count", [1, BATCH])
def test_texts_have_the_same_bits_until_one_ends(make: Make, temperature: float, count: int):
    """Not pinned: shapes differ only where drafts are cut before an end, and that is far beyond what is compared."""
    asked = asks(count, temperature, lengths=(100,))
    tried = make(pinned=False)
    repeats = count_repeats(tried)
    told, expected = answers(tried, asked), answers(anew(make(pinned=False)), asked)
    assert [text[:40] for text in told] == [text[:40] for text in expected]
    assert len(repeats) > 20


def drafts_by_place(tried: Engine, asked: list[Request]) -> dict[tuple[int, int], tuple[int, ...]]:
    """Each draft, by its text and the tokens that this has by then."""
    drafter: Any = tried.drafter
    propose, repeat, made = drafter.propose, drafter.repeat, dict[tuple[int, int], tuple[int, ...]]()

    def note(view: RoundView, drafts: Any) -> Any:
        lengths = [len(seq.tokens) for seq in view.seqs] if view.state is None else view.state.lengths.tolist()
        for seq, length, draft in zip(view.seqs, lengths, drafts or (), strict=drafts is not None):
            made[seq.id, length] = tuple(draft.tokens)
        return drafts

    def repeated(view: RoundView, drafts: Any) -> Any:
        block = repeat(view, drafts)
        note(view, None if block is None else [draft.again(block) for draft in drafts])
        return block

    drafter.propose = lambda view: note(view, propose(view))
    drafter.repeat = repeated
    answers(tried, asked)
    return made


@pytest.mark.parametrize("make", ["block", "eagle of 4", "eagle of 5"], indirect=True)
@pytest.mark.parametrize("count", [1, 3])
def test_drafts_are_those_of_rounds_launched_anew(make: Make, count: int):
    asked = asks(count, 1.0, lengths=(100,))
    tried = make()
    repeats = count_repeats(tried)
    told, expected = drafts_by_place(tried, asked), drafts_by_place(anew(make()), asked)
    early = [(seq_id, n) for seq_id, n in expected if n < len(asked[seq_id].prompt) + 60]
    assert len(early) > 30 * count
    assert {place: told.get(place) for place in early} == {place: expected[place] for place in early}
    assert len(repeats) > 20


def assert_waits_once(tried: Engine, asked: list[Request], least: int) -> None:
    """Twenty rounds wait twenty times at most; so many of them are repeated at least."""
    for each in asked:
        tried.submit(each)
    for _ in range(20):
        tried.step()
    repeats = count_repeats(tried)
    torch.cuda.synchronize()
    with SyncCounter() as waits:
        for _ in range(20):
            tried.step()
    assert waits.count <= 20, waits
    assert len(repeats) > least


def test_a_repeated_round_waits_once(make: Make):
    assert_waits_once(make(pinned=False), asks(3, 1.0, lengths=(300,)), 10)
