"""Lookups inside captured rounds: the texts of plain decoding, the drafts of a search, one wait a round."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
from test_graph_runner import VOCAB, decoder
from test_repeated_on_gpu import count_repeats

from outrider.bench.syncs import SyncCounter
from outrider.core.sampling import SamplingParams
from outrider.drafters.base import Drafter, DrafterConfig, DrafterContext
from outrider.drafters.device_lookup import DeviceLookup
from outrider.drafters.mix import MixConfig
from outrider.drafters.none import NoDraft
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.suffix import SuffixConfig
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.runners.native import NativeRunner
from outrider.testing.toy import ByteTokenizer
from outrider.verify.base import make_verifier

sys.path.insert(0, str(Path(__file__).parents[1] / "conformance"))
from lookup_checks import CheckedLookup

pytestmark = pytest.mark.gpu
BATCH = 8
CONFIGS = {
    "suffix": SuffixConfig(),
    "eager": SuffixConfig(k=6, min_prob=0.0),
    "prompt-lookup": PromptLookupConfig(min_prob=0.0),
    "prediction": PredictionConfig(),
    "mix": MixConfig(),
}
configs = pytest.mark.parametrize("name", CONFIGS)


def runner(cache: int = 8192) -> NativeRunner:
    """Pinned, so that a text has the same bits with and without drafts."""
    return NativeRunner(decoder(2), cache, context=1024, pinned=True)


def engine(target: NativeRunner, drafter: Drafter) -> Engine:
    list(target.capture(BATCH, 1 + drafter.traits.max_tokens))
    limits = EngineLimits(max_batch=BATCH, max_round_tokens=512)
    return Engine(target, drafter, make_verifier("seeded"), ByteTokenizer(), limits=limits)


def built(config: DrafterConfig, target: NativeRunner) -> Drafter:
    return config.build(DrafterContext(vocab_size=VOCAB, context=1024, target=target, max_batch=BATCH, device="cuda"))


def requests(count: int, temperature: float, tokens: int = 80) -> list[Request]:
    """Prompts that repeat a phrase, so that matches are found though the model is random."""
    rng = random.Random(count)
    asked = []
    for i in range(count):
        phrase = [rng.randrange(VOCAB) for _ in range(rng.choice((3, 9, 30)))]
        params = SamplingParams(max_tokens=tokens - i % 3, temperature=temperature, seed=i % 5, ignore_eos=True)
        asked.append(Request(prompt=tuple(phrase * 3), params=params))
    return asked


def answers(tried: Engine, asked: list[Request]) -> list[tuple[int, ...]]:
    ids = [tried.submit(each)[0] for each in asked]
    seqs = [tried.live(i).seq for i in ids]
    while tried.busy:
        tried.step()
    tried.check()
    return [tuple(seq.tokens[seq.prompt_len :]) for seq in seqs]


@configs
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cache", [8192, 1024], ids=["roomy", "preempted"])
def test_pinned_texts_are_plain_decodings(name: str, temperature: float, cache: int):
    """Asked twice: the second time every answer is in the history, and is its own prediction."""
    asked = requests(12, temperature)
    target = runner()
    expected = answers(engine(target, NoDraft()), asked)
    target = runner(cache)
    drafter = built(CONFIGS[name], target)
    assert drafter.traits.drafts_ahead
    tried = engine(target, drafter)
    again = [
        Request(prompt=each.prompt, params=each.params, prediction=text)
        for each, text in zip(asked, expected, strict=True)
    ]
    assert answers(tried, asked) == expected
    assert answers(tried, again) == expected
    assert tried.stats.draft_failures == 0
    if name != "prompt-lookup":
        assert tried.stats.all.accepted > 300


def test_drafts_are_what_a_search_of_the_text_finds():
    target = runner()
    rules = PromptLookupConfig(k=5).rules(0.0)
    tried = CheckedLookup(rules, target, BATCH)
    made = engine(target, tried)
    asked = requests(20, 0.0)
    answers(made, asked)
    beyond = tried.drafted - made.stats.all.drafted  # the ends of texts: figures count their last drafts up to there
    assert 0 <= beyond <= 5 * len(asked)
    assert made.stats.all.drafted > 100
    assert made.stats.draft_failures == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", ["suffix", "eager"])
def test_pinned_texts_are_plain_decodings_where_rounds_are_repeated(name: str, count: int, temperature: float):
    asked = requests(count, temperature, tokens=200)
    expected = answers(engine(runner(), NoDraft()), asked)
    target = runner()
    tried = engine(target, built(CONFIGS[name], target))
    repeats = count_repeats(tried)
    assert answers(tried, asked) == expected
    assert answers(tried, asked) == expected
    assert len(repeats) > 30
    assert tried.stats.draft_failures == 0


def test_drafts_share_rows_in_repeated_rounds():
    """Every draft is what a search of its text finds, and texts begin as plain decoding's: shapes change their bits."""
    asked = requests(BATCH, 0.0, tokens=200)
    target = NativeRunner(decoder(2), 8192, context=1024)
    expected = answers(engine(target, NoDraft()), asked)
    target = NativeRunner(decoder(2), 8192, context=1024)
    tried = CheckedLookup(PromptLookupConfig(k=7).rules(0.0), target, BATCH)
    made = engine(target, tried)
    repeats = count_repeats(made)
    told = answers(made, asked)
    assert sum(text[:24] == plain[:24] for text, plain in zip(told, expected, strict=True)) >= BATCH * 3 // 4
    assert made.stats.draft_failures == 0
    assert made.stats.all.accepted > 100
    shared = [each for each in repeats if any(span.draft.share is not None for span in each.spans)]
    assert len(shared) > 10


@configs
def test_a_round_waits_once_and_rounds_follow_each_other(name: str):
    target = NativeRunner(decoder(2), 8192, context=1024)
    tried = engine(target, built(CONFIGS[name], target))
    for each in requests(BATCH, 1.0, tokens=600):
        tried.submit(each)
    for _ in range(20):
        tried.step()
    assert len(tried._in_flight) == 1
    before = tried.stats.tokens
    torch.cuda.synchronize()
    with SyncCounter() as waits:
        for _ in range(20):
            tried.step()
    assert waits.count <= 20, waits.where
    assert before == tried.stats.tokens  # none has ended meanwhile


@configs
def test_rounds_launch_their_kernels_in_captured_work_alone(name: str):
    """Lookups, drafts, states and choices: Python launches no Triton kernel by itself."""
    from triton import knobs

    from outrider.kernels.triton_sample import sample_tokens

    target = NativeRunner(decoder(2), 8192, context=1024)
    tried = engine(target, built(CONFIGS[name], target))
    for each in requests(BATCH, 1.0, tokens=600):
        tried.submit(each)
    for _ in range(20):
        tried.step()
    launched: list[object] = []
    note = launched.append
    knobs.runtime.launch_enter_hook.add(note)
    try:
        for _ in range(20):
            tried.step()
        assert launched == []
        sample_tokens(torch.zeros(1, 8, device="cuda"))
        assert len(launched) == 2  # one for parts, one for the best of them
    finally:
        knobs.runtime.launch_enter_hook.remove(note)


def test_only_captured_targets_in_mode_seeded_are_looked_up_for_on_the_device():
    target = runner()
    context = DrafterContext(vocab_size=VOCAB, context=1024, target=target, mode="distribution", device="cuda")
    assert not isinstance(SuffixConfig().build(context), DeviceLookup)
    assert not isinstance(built(SuffixConfig(width=2), target), DeviceLookup)
    assert isinstance(built(SuffixConfig(), target), DeviceLookup)
