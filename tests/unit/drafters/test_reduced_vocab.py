"""A draft model with a reduced vocabulary: the same text, fewer rows, and no token it does not hold."""

from __future__ import annotations

import json
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.bench.llm_factory import DRAFT_MODEL, LLMFactory
from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.draft_model import DraftModel, DraftModelConfig
from outrider.drafters.reduced_vocab import ReducedVocab, read_ranking, reduce_vocab
from outrider.drafters.registry import parse_drafter
from outrider.models.linear import Int8Linear, Linear
from outrider.models.load import load_decoder
from outrider.runners.native import NativeRunner
from outrider.runners.reduced_head import ReducedHead
from outrider.testing.synthetic import EOS, SHAPES, SyntheticPair, rare_logit_scale, rare_tokens, synthetic_pair
from outrider.testing.toy import ByteTokenizer, ToyRunner

VOCAB = 512
PAIR = synthetic_pair("tiny", agreement=0.9, seed=3)
TWINS = synthetic_pair("tiny", seed=5)
PROMPTS = [[*range(260, 290)], [*range(20, 60)], [400, 33, 17]]


def rows(target: NativeRunner, text: tuple[Token, ...], seq_id: int = 0) -> torch.Tensor:
    """The logits after each token of a text, [len(text), vocab]."""
    target.pool.open(seq_id, text, str(seq_id))
    target.pool.reserve(seq_id, len(text))
    return target.score([Span(seq_id, 0, text[:1], Draft(text[1:]))]).logits


def drafter(pair: SyntheticPair, vocab: int, *, mode: Any = "seeded", **options: Any) -> DraftModel:
    config = DraftModelConfig(model="draft", vocab=vocab, **options)
    context = DrafterContext(vocab_size=VOCAB, context=512, mode=mode, eos_ids=pair.tokenizer.eos_ids)
    return DraftModel(NativeRunner(pair.draft, 4096), context, config)


def text(seq_id: int, tokens: list[Token], *, salt: str = "", temperature: float = 0.0) -> Sequence:
    return Sequence(seq_id, tokens, len(tokens), SamplingParams(temperature=temperature, seed=1), 1, salt=salt)


# --- the text -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def factory() -> LLMFactory:
    return LLMFactory(PAIR, cache_tokens=2048, context=512)


def answers(factory: LLMFactory, spec: str, temperature: float, **options: Any) -> list[tuple[Token, ...]]:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    return [result.tokens for result in factory.llm(spec, **options).generate(PROMPTS, params)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_the_same_with_any_vocab(factory: LLMFactory, temperature: float):
    plain = answers(factory, "none", temperature)
    for vocab in (0, 256, 300, VOCAB - 1, VOCAB, 1 << 20):
        assert answers(factory, f"{DRAFT_MODEL},vocab={vocab}", temperature) == plain
    assert answers(factory, f"{DRAFT_MODEL},vocab=256,beams=3,k=3", temperature) == plain
    assert answers(factory, f"{DRAFT_MODEL},vocab=256,min_prob=0.1", temperature) == plain


def test_mode_distribution_greedy_is_the_plain_text_and_a_seed_repeats(factory: LLMFactory):
    spec = f"{DRAFT_MODEL},vocab=256"
    assert answers(factory, spec, 0.0, mode="distribution") == answers(factory, "none", 0.0)
    assert answers(factory, spec, 1.0, mode="distribution") == answers(factory, spec, 1.0, mode="distribution")


def test_the_whole_vocabulary_drafts_as_without_the_option(factory: LLMFactory):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    stats = [
        factory.llm(spec).generate(PROMPTS[0], params).stats.all
        for spec in (f"{DRAFT_MODEL},vocab=256", DRAFT_MODEL, f"{DRAFT_MODEL},vocab=512", f"{DRAFT_MODEL},vocab=256")
    ]
    assert stats[1].alpha == stats[2].alpha > stats[0].alpha
    assert stats[0].alpha == stats[3].alpha  # nothing is left of the drafters before


# --- the head -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_reduced_logits_are_the_whole_ones_and_nothing_elsewhere(tmp_path: Path, quantize: Any):
    _, folder = TWINS.save(tmp_path)
    target = NativeRunner(load_decoder(folder, device="cpu", quantize=quantize), 512)
    asked = (300, 7, 21, 256, 9)
    whole = rows(target, asked)
    held = random.Random(0).sample(range(VOCAB), 100)
    head = target.reduce_vocab(held)
    assert head is not None
    changed = [t for t in range(VOCAB) if t not in held][:3]
    for _ in range(2):
        reduced = rows(target, asked, 1)
        assert reduced.shape == whole.shape
        torch.testing.assert_close(reduced[:, held], whole[:, held], rtol=1e-6, atol=1e-5)
        left_out = [t for t in range(VOCAB) if t not in held]
        assert bool((reduced[:, left_out] == -torch.inf).all())
        head.put([99, 4, 50], changed)
        held[99], held[4], held[50] = changed
        target.release(1, unpublish=True)
    assert target.reduce_vocab(()) is None
    assert torch.equal(rows(target, asked, 2), whole)


def test_a_soft_cap_is_applied_to_reduced_logits_too():
    from dataclasses import replace

    from outrider.models.decoder import Decoder

    capped = Decoder(replace(PAIR.draft.config, final_softcap=2.0), PAIR.draft.weights, torch.float32)
    target = NativeRunner(capped, 256)
    whole = rows(target, (4, 5, 6))
    assert 1.5 < float(whole.abs().max()) <= 2.0
    target.reduce_vocab([3, 1, 4])
    torch.testing.assert_close(rows(target, (4, 5, 6), 1)[:, [3, 1, 4]], whole[:, [3, 1, 4]])


@pytest.mark.parametrize("kind", [Linear, Int8Linear])
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_are_taken_and_overwritten_one_by_one(kind: Any, biased: bool):
    g = torch.Generator().manual_seed(1)
    whole = kind(torch.randn(50, 40, generator=g), torch.randn(50, generator=g) if biased else None)
    x = torch.randn(3, 40, generator=g)
    taken = whole.take(torch.tensor([7, 49, 0, 3]))
    torch.testing.assert_close(taken(x), whole(x)[:, [7, 49, 0, 3]])
    before = whole(x)
    taken.put(torch.tensor([3, 1]), whole, torch.tensor([20, 21]))
    torch.testing.assert_close(taken(x), before[:, [7, 21, 0, 20]])
    assert torch.equal(whole(x), before)


def test_a_head_of_the_same_width_takes_its_place_in_memory():
    """Captured passes read it there."""
    target = NativeRunner(PAIR.draft, 256)
    one = target.reduce_vocab([1, 2, 3])
    other = target.reduce_vocab([4, 5])
    assert target.reduce_vocab([7, 6, 500]) is one is not other
    assert one is not None
    assert one.ids.tolist() == [7, 6, 500]


# --- which tokens -------------------------------------------------------------------------------


class Recorder:
    """Takes the place of a reduced head: its tokens now, and how often it was changed."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.told = [*tokens], 0

    def put(self, columns: list[int], tokens: list[Token]) -> None:
        self.told += 1
        for column, token in zip(columns, tokens, strict=True):
            self.tokens[column] = token


def frequent(size: int = 256) -> tuple[ReducedVocab, Recorder]:
    head = Recorder([*range(size)])
    return ReducedVocab(head, head.tokens, VOCAB), head  # pyright: ignore[reportArgumentType]


def test_tokens_seen_take_the_oldest_places_first():
    which, head = frequent()
    which.note([text(0, [1, 300, 2, 301, 300])])
    assert head.tokens[224:227] == [300, 301, 226]
    assert head.told == 1
    which.note([text(0, [1, 300, 2, 301, 300])])
    assert head.told == 1  # nothing new, nothing sent
    seq = text(0, [1, 300, 2, 301, 300, *range(310, 340)])
    which.note([seq])
    assert head.tokens[224:] == [300, 301, *range(310, 340)]
    seq.tokens.append(224)  # frequent once, and pushed out
    which.note([seq])
    assert head.tokens[224:] == [224, 301, *range(310, 340)]
    assert head.tokens[:224] == [*range(224)]


def test_what_is_remembered_is_bounded_and_first_in_is_first_out():
    """Judged by a queue."""
    which, head = frequent()
    queue = deque(range(224, 256))
    for i in range(200):
        tokens = random.Random(i).choices(range(VOCAB), k=20)
        which.note([text(i, tokens)])
        new = [t for t in dict.fromkeys(tokens) if t >= 224 and t not in queue]
        queue = deque([*queue, *new][-32:])
        assert head.tokens[:224] == [*range(224)]
        assert sorted(head.tokens[224:]) == sorted(queue)
        which.forget(text(i, []))
    assert head.tokens == which.tokens
    assert which._read == {}


def test_of_a_text_with_too_much_that_is_new_the_end_stays():
    which, head = frequent()
    which.note([text(0, [*range(256, VOCAB)])])
    assert head.tokens == [*range(224), *range(VOCAB - 32, VOCAB)]


def test_tokens_beyond_the_draft_s_vocabulary_are_passed_over():
    which, head = frequent()
    which.note([text(0, [VOCAB, 300, VOCAB + 7])])
    assert head.tokens == [*range(224), 300, *range(225, 256)]


def test_nothing_is_remembered_from_one_salt_to_another():
    which, head = frequent()
    fresh = [*head.tokens]
    mine, yours = text(0, [300, 301], salt="a"), text(1, [400], salt="b")
    which.note([mine])
    assert {300, 301} <= set(head.tokens)
    which.note([yours])
    assert head.tokens == [*fresh[:224], 400, *fresh[225:]]
    which.note([mine, yours])
    assert head.tokens == fresh
    which.note([])
    which.note([mine, yours])
    assert head.tokens == fresh
    which.note([mine])
    assert head.tokens == [*fresh[:224], 300, 301, *fresh[226:]]


def test_ends_of_text_are_always_held():
    model = NativeRunner(PAIR.draft, 256)
    assert EOS not in range(256)
    made = DraftModel(
        model,
        DrafterContext(vocab_size=VOCAB, context=512, eos_ids=PAIR.tokenizer.eos_ids),
        DraftModelConfig(model="-", vocab=256),
        [500, 499],
    )
    assert made._vocab is not None
    assert made._vocab.tokens == [EOS, 500, 499, *range(253)]
    assert made._vocab.head.ids.tolist() == made._vocab.tokens


@pytest.mark.parametrize(("k", "beams"), [(4, 1), (3, 3)])
@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_never_drafted_before_it_was_seen(mode: Any, temperature: float, k: int, beams: int):
    """Drafts for many texts: all within the head, and over the whole head they are not."""
    reduced, whole = (drafter(TWINS, v, mode=mode, k=k, beams=beams) for v in (256, 0))
    assert reduced._vocab is not None
    beyond = 0
    for i in range(12):
        ask = [text(i, [i, 2 * i + 1, 77], temperature=temperature)]
        (draft,), (free,) = (each.propose(RoundView(ask, [k * beams])) for each in (reduced, whole))
        assert len(draft)
        assert set(draft.tokens) <= set(reduced._vocab.tokens) == {*range(255), EOS}
        beyond += len(set(free.tokens) - set(reduced._vocab.tokens))
        if draft.probs is not None:
            probs = draft.probs
            torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs), dtype=probs.dtype))
            assert not probs[:, [t for t in range(VOCAB) if t not in reduced._vocab._held]].any()
    assert beyond


def test_a_token_is_drafted_once_it_was_seen():
    """Greedy: the draft's own best token beyond the head, before and after another text holds it."""
    reduced, whole = drafter(TWINS, 256, k=1), drafter(TWINS, 0, k=1)
    assert reduced._vocab is not None
    firsts = {i: whole.propose(RoundView([text(i, [i, 5])], [1]))[0].tokens[0] for i in range(40)}
    i, wanted = next((i, token) for i, token in firsts.items() if token not in reduced._vocab._held)
    ask = text(i, [i, 5])
    (before,) = reduced.propose(RoundView([ask], [1]))
    assert before.tokens[0] != wanted
    reduced.propose(RoundView([text(100, [8, wanted, 9])], [1]))
    (after,) = reduced.propose(RoundView([ask], [1]))
    assert after.tokens[0] == wanted


def test_reduced_probs_are_the_whole_ones_given_their_tokens():
    """Mode `distribution`: the stated probabilities against the whole ones, cut and normalised by hand."""
    reduced, whole = (drafter(TWINS, v, mode="distribution", k=1) for v in (256, 0))
    ask = [text(0, [9, 8, 7], temperature=0.8)]
    (draft,), (free,) = (each.propose(RoundView(ask, [1])) for each in (reduced, whole))
    assert draft.probs is not None
    assert free.probs is not None
    inside = [*range(255), EOS]
    expected = torch.zeros_like(free.probs[0])
    expected[inside] = free.probs[0][inside] / free.probs[0][inside].sum()
    torch.testing.assert_close(draft.probs[0], expected, rtol=1e-5, atol=1e-9)


# --- options and rankings -----------------------------------------------------------------------


def test_a_ranking_orders_and_ids_follow(tmp_path: Path):
    file = tmp_path / "ranking.json"
    file.write_text(json.dumps([*range(500, 400, -1)]))
    assert read_ranking(str(file), VOCAB) == [*range(500, 400, -1)]
    assert read_ranking("", VOCAB) == []
    made = reduce_vocab(NativeRunner(PAIR.draft, 256), 256, [*range(500, 400, -1), VOCAB + 3], VOCAB)
    assert made is not None
    assert made.tokens == [*range(500, 400, -1), *range(156)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("{}", "must hold a list of token ids"),
        ("[]", "must hold a list of token ids"),
        ("[1, 2, 512]", "512 is no token of this model; ids run from 0 to 511"),
        ("[-1]", "-1 is no token"),
        ("[1.0]", "1.0 is no token"),
        ("[true]", "True is no token"),
        ("[null]", "None is no token"),
        ('["a"]', "'a' is no token"),
        ("[[1]]", r"\[1\] is no token"),
        ("[5, 6, 5]", "names token 5 2 times"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_ranking_that_is_none_is_refused_before_a_model_is_loaded(tmp_path: Path, content: str | None, said: str):
    file = tmp_path / "ranking.json"
    if content is not None:
        file.write_text(content)
    config = parse_drafter(f"draft-model:model=x,vocab=256,ranking={file}")

    def load(*_: Any, **__: Any) -> Any:
        raise AssertionError("loaded")

    with pytest.raises(ConfigError, match=said):
        config.build(DrafterContext(vocab_size=VOCAB, context=64, tokenizer=PAIR.tokenizer, load_runner=load))


def test_a_ranking_larger_than_any_vocabulary_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outrider.drafters.reduced_vocab.MAX_RANKING_BYTES", 10)
    (tmp_path / "ranking.json").write_text("[1, 2, 3, 4, 5]")
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        read_ranking(str(tmp_path / "ranking.json"), VOCAB)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("vocab=255", "vocab must be 0 or 256 to"),
        ("vocab=-1", "vocab must be 0 or 256 to"),
        (f"vocab={1 << 21}", "vocab must be 0 or 256 to"),
        ("vocab=1.5", "vocab must be a whole number"),
        ("ranking=x.json", "give vocab too"),
    ],
)
def test_options_out_of_range_are_refused(options: str, said: str):
    with pytest.raises(ConfigError, match=said):
        parse_drafter(f"draft-model:model=x,{options}")


def test_a_model_without_a_head_of_ours_is_refused_only_where_tokens_would_be_left_out():
    setting = DrafterContext(vocab_size=VOCAB, context=64, tokenizer=ByteTokenizer())
    with pytest.raises(ConfigError, match="vocab=256 needs a native draft model"):
        DraftModel(ToyRunner(VOCAB), setting, DraftModelConfig(model="-", vocab=256))
    DraftModel(ToyRunner(VOCAB), setting, DraftModelConfig(model="-", vocab=VOCAB))


# --- a synthetic pair with rare words -----------------------------------------------------------


def share_below(pair: SyntheticPair, frequent: int) -> float:
    """How often the target's best token is one of the first ids, after random text."""
    asked = torch.randint(EOS + 1, VOCAB, (600,), generator=torch.Generator().manual_seed(1))
    return float((rows(NativeRunner(pair.target, 1024), tuple(asked.tolist())).argmax(-1) < frequent).float().mean())


def test_rare_words_are_as_rare_as_asked_and_only_meanwhile():
    pair = synthetic_pair("tiny", seed=2)
    before = share_below(pair, 256)
    assert before < 0.6
    with rare_tokens(pair, 256, 0.9):
        assert share_below(pair, 256) == pytest.approx(0.9, abs=0.04)
    assert share_below(pair, 256) == before
    made = synthetic_pair("tiny", seed=2, frequent=256)
    assert share_below(made, 256) == pytest.approx(0.98, abs=0.02)
    assert rare_logit_scale(VOCAB, VOCAB, 0.98) == 1.0


@pytest.mark.parametrize(("frequent", "coverage"), [(256, 0.4), (256, 1.0), (-3, 0.9)])
def test_a_coverage_that_cannot_be_is_refused(frequent: int, coverage: float):
    with pytest.raises(ConfigError, match="coverage must be"):
        synthetic_pair(SHAPES["tiny"], frequent=frequent, coverage=coverage)


def test_the_factor_gives_the_coverage_it_was_found_for():
    """By drawing normal logits."""
    for frequent, vocab, coverage in ((256, 512, 0.98), (3000, 9000, 0.9)):
        logits = torch.randn(4000, vocab, generator=torch.Generator().manual_seed(vocab))
        logits[:, frequent:] *= rare_logit_scale(frequent, vocab, coverage)
        assert float((logits.argmax(-1) < frequent).float().mean()) == pytest.approx(coverage, abs=0.015)


# --- the kernel ---------------------------------------------------------------------------------


def test_a_head_is_made_of_rows_that_are_its_own():
    head = ReducedHead(PAIR.draft, [5, 6])
    before = PAIR.draft.logits(torch.ones(1, 64))
    head.put([0], [9])
    assert torch.equal(PAIR.draft.logits(torch.ones(1, 64)), before)
    torch.testing.assert_close(head.logits(torch.ones(1, 64))[:, [9, 6]], before[:, [9, 6]])
