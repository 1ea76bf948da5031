"""What went wrong elsewhere where speculation met the API. Each test names the report it comes from."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

import pytest
import torch
from drafter_cast import EVERYBODY
from plain_decoding import Told, assert_same, first_stop, request, run
from testbed import EOS, PIECES, TOKENIZER, VOCAB
from toy_world import TOY, WORLD, target

from outrider.core.draft import Draft
from outrider.core.errors import RequestError
from outrider.core.sampling import MAX_N, SamplingParams, Token
from outrider.core.sequence import Sequence
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.testing.drafters import ScriptedDrafter
from outrider.verify.base import make_verifier

KNOWING = ("oracle", "hidden-oracle", "draft-model:model=draft")
knowing = pytest.mark.parametrize("drafter", KNOWING)
everybody = pytest.mark.parametrize("drafter", EVERYBODY)
LONG = {"max_tokens": 40, "ignore_eos": True, "temperature": 0.9}


def answer(prompt: Seq[Token], **options: object) -> Told:
    """What plain decoding says where nothing stops it."""
    return TOY.judged(request(prompt, **(LONG | options)))[0]


def told(drafter: str, asked: Request) -> Told:
    ((one,),) = run(TOY.engine(drafter, [asked]), [asked])
    assert_same([one], TOY.judged(asked))
    return one


def stop_inside(text: str, begin: int, length: int) -> str:
    """Some of a text to stop at, that does not come earlier in it."""
    for end in range(begin + length, len(text)):
        if text.index(text[begin:end]) == begin:
            return text[begin:end]
    raise AssertionError("the text repeats itself")


@knowing
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_kept_past_a_stop_string(drafter: str, seed: int):
    """vLLM #47616: the text was cut at a stop string, but the tokens and log-probabilities behind it stayed."""
    whole = answer([1, 2], seed=seed)
    stop = stop_inside(whole.text, 5, 3)
    one = told(drafter, request([1, 2], **LONG, seed=seed, stop=(stop,), logprobs=2))
    assert one.finish == "stop"
    assert one.stop_reason == stop
    assert one.text == whole.text[: whole.text.index(stop)]
    assert len(one.tokens) == len(one.logprobs) < len(whole.tokens)
    assert stop in TOKENIZER.decode(one.tokens)
    assert stop not in TOKENIZER.decode(one.tokens[:-1])


@knowing
@pytest.mark.parametrize("turned", [False, True])
def test_the_stop_that_comes_first_wins_whatever_the_list_says(drafter: str, turned: bool):
    """vLLM #49391: of two stops in one accepted block, the first of the list won, not the first of the text."""
    whole = answer([3, 1], seed=5)
    early, late = stop_inside(whole.text, 6, 2), stop_inside(whole.text, 9, 2)
    stops = (late, early) if turned else (early, late)
    one = told(drafter, request([3, 1], **LONG, seed=5, stop=stops))
    assert one.stop_reason == early
    assert one.text == whole.text[: whole.text.index(early)]


@knowing
@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_token_anywhere_in_a_block_ends_the_text_there(drafter: str, at: int):
    """SGLang #27637: a stop in the middle of an accepted chunk was missed."""
    whole = answer([2, 2], seed=1).tokens
    stop = whole[at]
    one = told(drafter, request([2, 2], **LONG, seed=1, stop_token_ids=(stop,)))
    assert one.finish == "stop"
    assert one.stop_reason == stop
    assert one.tokens == whole[: whole.index(stop) + 1]


@knowing
@pytest.mark.parametrize("room", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["id", "string"])
def test_a_stop_within_the_limit_beats_the_limit(drafter: str, room: int, kind: str):
    """SGLang #31599: a block that crossed max_tokens ended as `length` though a stop lay before the limit."""
    whole = answer([4, 3], seed=2)
    if kind == "id":
        options: dict[str, object] = {"stop_token_ids": (whole.tokens[5],)}
        needed = whole.tokens.index(whole.tokens[5]) + 1
    else:
        stop = stop_inside(whole.text, 6, 2)
        options = {"stop": (stop,)}
        needed = next(n for n in range(41) if stop in TOKENIZER.decode(whole.tokens[:n]))
    asked = request([4, 3], **(LONG | {"max_tokens": needed + room}), seed=2, **options)
    one = told(drafter, asked)
    assert (one.finish, len(one.tokens)) == ("stop", needed)
    if room == 0:
        short = told(drafter, request([4, 3], **(LONG | {"max_tokens": needed - 1}), seed=2, **options))
        assert (short.finish, len(short.tokens)) == ("length", needed - 1)


@knowing
@pytest.mark.parametrize("at", [0, 2, 5])
def test_no_figure_counts_tokens_past_the_end(drafter: str, at: int):
    """SGLang #39826: counters took in the whole accepted block, so that usage said more than was told."""
    whole = answer([6, 6], seed=3).tokens
    asked = request([6, 6], **LONG, seed=3, stop_token_ids=(whole[at],))
    tried = TOY.engine(drafter, [asked])
    ((one,),) = run(tried, [asked])
    tally = tried.stats.all
    assert tried.stats.tokens == len(one.tokens)
    assert tally.emitted == len(one.tokens)
    assert tally.accepted <= len(one.tokens)
    assert tally.tau == len(one.tokens) / tally.rounds


def test_tokens_found_in_the_cache_are_at_most_the_prompt():
    """The same kind of figure: a text that was preempted and found its own pages again has no larger prompt."""
    asked = [request([i, 1, 2], max_tokens=60, ignore_eos=True) for i in range(3)]
    tried = TOY.engine("none", asked, cache_tokens=112)
    ids = [tried.submit(each)[0] for each in asked]
    stats = {event.seq_id: event.stats for _ in range(300) for event in tried.step() if event.stats}
    assert sum(stats[i].preemptions for i in ids) > 0
    for seq_id in ids:
        assert stats[seq_id].shared_tokens <= stats[seq_id].prompt_tokens


@everybody
@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_min_tokens_and_processors_hold_at_every_place_of_a_draft(drafter: str, mode: str):
    """vLLM #26317: the rejection sampler skipped min_tokens and logits processors at drafted places."""

    def never_five(tokens: Seq[Token], logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(0, torch.tensor([5]), float("-inf"))

    params = SamplingParams(
        temperature=1.0,
        seed=7,
        n=4,
        max_tokens=24,
        min_tokens=20,
        logit_bias={EOS: 6.0},
        logits_processors=(never_five,),
    )
    asked = Request(prompt=(1, 2, 3), params=params)
    (texts,) = run(TOY.engine(drafter, [asked], mode=mode), [asked])  # pyright: ignore[reportArgumentType]
    for one in texts:
        assert 20 <= len(one.tokens) <= 24
        assert EOS not in one.tokens[:19]
        assert 5 not in one.tokens
    if mode == "seeded":
        assert_same(texts, TOY.judged(asked))


@everybody
@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_allowed_tokens_without_penalties(drafter: str, mode: str):
    """vLLM #35654: speculation with allowed_token_ids and no penalties crashed the worker."""
    allowed = (1, 4, 7, 9, 12)
    params = SamplingParams(temperature=0.8, seed=1, n=3, max_tokens=12, allowed_token_ids=allowed)
    plain_one = Request(prompt=(8, 1), params=SamplingParams(max_tokens=12))
    asked = Request(prompt=(8, 2), params=params)
    texts, _ = run(TOY.engine(drafter, [asked, plain_one], mode=mode), [asked, plain_one])  # pyright: ignore[reportArgumentType]
    assert all(set(one.tokens) <= set(allowed) for one in texts)
    if mode == "seeded":
        assert_same(texts, TOY.judged(asked))


@everybody
def test_min_p_and_bias_hold_at_every_place_of_a_draft(drafter: str):
    """vLLM #42744: options that never move the argmax were left out at drafted places."""
    asked = request([9, 9], temperature=1.3, min_p=0.3, logit_bias={1: 2.0}, seed=11, n=3, max_tokens=20)
    (texts,) = run(TOY.engine(drafter, [asked]), [asked])
    assert_same(texts, TOY.judged(asked))


@everybody
def test_a_mask_that_opens_in_the_middle_of_a_draft(drafter: str):
    """vLLM #44297: `</think>` inside the window lost the grammar's mask for the rest of it."""
    marker = 7

    def grammar(tokens: Seq[Token], logits: torch.Tensor) -> torch.Tensor:
        """Behind the marker, small and large tokens take turns."""
        if marker not in tokens:
            return logits
        small = torch.arange(VOCAB) < VOCAB // 2
        return logits.masked_fill(small if len(tokens) % 2 else ~small, float("-inf"))

    asked = request([1, 2, 3], temperature=0.8, seed=21, max_tokens=40, ignore_eos=True, logits_processors=(grammar,))
    one = told(drafter, asked)
    text = [1, 2, 3, *one.tokens]
    begin = text.index(marker) + 1
    assert 3 < begin < 30
    for place in range(begin, len(text)):
        assert (text[place] >= VOCAB // 2) == bool(place % 2)


def test_a_processor_sees_the_draft_before_it_and_nothing_else():
    """lmdeploy #4559: forks of a grammar were advanced by the argmax, not by the drafted token."""
    seen: list[tuple[Token, ...]] = []

    def spy(tokens: Seq[Token], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tokens))
        return logits

    draft = Draft((4, 9, 4, 2), (-1, -1, 1, 2))
    tried = _scripted(lambda seq, budget: draft)
    tried.submit(request([1, 2, 3], max_tokens=8, ignore_eos=True, logits_processors=(spy,)))
    (first,) = tried.step()
    text = (1, 2, 3, *first.tokens)
    assert seen == [(1, 2, 3)] * 2  # twice at a text's first token, to tell an impure one
    seen.clear()
    tried.step()
    assert sorted(seen[:5]) == sorted([text, (*text, 4), (*text, 9), (*text, 9, 4), (*text, 9, 4, 2)])


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize("bad", [-1, VOCAB, VOCAB + 1, 1 << 31, 1 << 63])
@pytest.mark.parametrize("tree", [False, True])
def test_ids_outside_the_vocabulary_never_come_out(mode: str, bad: int, tree: bool):
    """CVE-2026-54234: a recovered token at or beyond the vocabulary killed the engine."""

    def script(seq: Sequence, budget: int) -> Draft:
        good = seq.tokens[-1]
        tokens = (good, bad, (good + 1) % VOCAB)[:budget]
        return Draft(tokens, (-1, -1, 0)[:budget] if tree else None)

    tried = _scripted(script, mode)
    asked = request([1, 2], temperature=1.2, seed=6, n=3, max_tokens=15, ignore_eos=True, repetition_penalty=1.2)
    (texts,) = run(tried, [asked])
    assert all(0 <= token < VOCAB for one in texts for token in one.tokens)
    if mode == "seeded":
        assert_same(texts, TOY.judged(asked))


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
def test_stated_probs_wider_than_the_vocabulary(mode: str):
    """CVE-2026-54234 again, by a drafter whose distribution reaches beyond the target's vocabulary."""

    def script(seq: Sequence, budget: int) -> Draft:
        probs = torch.full((budget, VOCAB + 5), 1 / (VOCAB + 5), dtype=torch.float64)
        return Draft(tuple(range(budget)), probs=probs)

    asked = request([1, 2], temperature=1.2, seed=6, n=3, max_tokens=15, ignore_eos=True)
    (texts,) = run(_scripted(script, mode), [asked])
    assert all(0 <= token < VOCAB for one in texts for token in one.tokens)


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 0.7}],
    ids=lambda o: next(iter(o)),
)
def test_penalties_with_drafts_of_every_shape_in_one_batch(mode: str, options: dict[str, float]):
    """CVE-2026-44223: the shape of the draft tensor and the penalties' did not agree, and the engine died."""
    rng = random.Random(2)

    def script(seq: Sequence, budget: int) -> Draft:
        tokens = tuple(rng.sample(range(VOCAB), budget))
        shapes = (None, (-1,) * budget, tuple((i - 1) // 2 for i in range(budget)))
        return Draft(tokens, shapes[seq.id % 3]).first_nodes((seq.id * 5 + seq.round) % (budget + 1))

    asked = [request([i, 1], temperature=0.9, seed=i, max_tokens=20, **options) for i in range(8)]
    texts = run(_scripted(script, mode), asked)
    if mode == "seeded":
        for one, each in zip(texts, asked, strict=True):
            assert_same(one, TOY.judged(each))


def test_n_is_bounded():
    """CVE-2026-34756: an unbounded n blocked the server and ran it out of memory."""
    with pytest.raises(RequestError, match=f"at most {MAX_N}"):
        SamplingParams(n=MAX_N + 1)


def test_the_judge_finds_stops_by_place():
    """The judge's own rule: the stop that begins first, of equals the shorter, and only if it ends in new text."""
    assert first_stop("xabcab", 0, ("bc", "ab", "abc")) == (1, 3)
    assert first_stop("xabcab", 4, ("bc", "ab", "abc")) == (4, 6)
    assert first_stop("xabcab", 6, ("bc", "ab")) is None
    assert len(PIECES) == VOCAB == WORLD.logits_after([1]).shape[0]


def _scripted(script: Callable[[Sequence, int], Draft], mode: str = "seeded") -> Engine:
    verifier = make_verifier(mode)  # pyright: ignore[reportArgumentType]
    return Engine(target(), ScriptedDrafter(script), verifier, TOKENIZER, eos_ids=TOKENIZER.eos_ids)
