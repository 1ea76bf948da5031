"""A draft model where room ends, in mixed batches, with long prompts and as a tree: what it reads and drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from outrider.core.draft import Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams, Token
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.draft_model import DraftModel, DraftModelConfig, chain_lengths, fair_shares
from outrider.drafters.none import NoDraft
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.runners.base import ChainStart, Scores
from outrider.runners.device_state import DeviceState
from outrider.testing.toy import ByteTokenizer, ToyRunner
from outrider.verify.base import make_verifier
from outrider.verify.seeded import choose_tokens

VOCAB = 40
CONTEXT = 256


class Chaining(ToyRunner):
    """Drafts whole chains, as on a device; counts them, and the passes and tokens that the host asks for."""

    asynchronous = True
    chains = passes = read = 0

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self.passes += 1
        self.read += sum(len(span.tokens) for span in spans)
        return super().score(spans, after)

    def draft_chains(self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None) -> list[list[Token]]:
        self.chains += len(starts)
        return [self._chain(start, steps) for start in starts]

    def _chain(self, start: ChainStart, steps: int) -> list[Token]:
        logits, chain = super().score([Span(start.seq_id, start.length - 2, start.last)]).logits, []
        params = SamplingParams(temperature=start.temperature)
        for place in range(start.length, start.length + steps):
            ((token,),) = choose_tokens(logits, [Sequence(start.seq_id, [0] * place, 1, params, start.seed)], [Draft()])
            chain.append(token)
            if len(chain) < steps:
                logits = super().score([Span(start.seq_id, place, (token,))]).logits
        return chain


def drafter(model: ToyRunner, mode: Literal["seeded", "distribution"] = "seeded", **options: Any) -> DraftModel:
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, mode=mode)
    return DraftModel(model, context, DraftModelConfig(model="-", **options))


def chaining(order: int = 4, cache_tokens: int = 4096) -> Chaining:
    return Chaining(VOCAB, context=CONTEXT, cache_tokens=cache_tokens, order=order)


def text(seq_id: int, tokens: Seq[Token], **params: Any) -> Sequence:
    return Sequence(seq_id, list(tokens), 1, SamplingParams(**params), seed=seq_id)


def step_by_step(seq: Sequence, budget: int) -> Seq[Token]:
    """The judge: drafted alone by a model that has read nothing yet, a token at a time."""
    model = ToyRunner(VOCAB, context=8192, cache_tokens=8192, order=4)
    context = DrafterContext(vocab_size=VOCAB, context=8192, max_round_tokens=8192)
    tried = DraftModel(model, context, DraftModelConfig(model="-", k=64))
    return (tried.propose(RoundView([seq], [budget])) or [Draft()])[0].tokens


# --- where room ends ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", [4, 1], ids=["accepted", "rejected"])
def test_up_to_the_context_s_end_no_text_is_read_twice(order: int):
    k, prompt = 16, [i % 30 for i in range(200)]
    model = chaining(order)
    target = ToyRunner(VOCAB, context=CONTEXT, order=4)
    tried = Engine(target, drafter(model, k=k), make_verifier("seeded"), ByteTokenizer())
    asked = Request(prompt=tuple(prompt), params=SamplingParams(max_tokens=4096, ignore_eos=True))
    (seq_id,) = tried.submit(asked)
    seq = tried.live(seq_id).seq
    rounds: list[tuple[int, int, int]] = []  # text before, tokens read for it, chains and passes
    while tried.busy:
        before, drafted, length = model.read, model.chains + model.passes, len(seq.tokens)
        tried.step()
        rounds.append((length, model.read - before, model.chains + model.passes - drafted))
    judged = [*prompt]
    while len(judged) < CONTEXT:
        judged.append(int(target.logits_after(judged).argmax()))
    assert seq.tokens == judged
    again = [read for _, read, _ in rounds[2:]]  # the prompt is read by the target first, then by the draft
    assert max(again) <= k + 1
    assert any(drafted for length, _, drafted in rounds if length > CONTEXT - k)  # there too, with shorter drafts
    if order == 4:
        assert tried.stats.all.accepted == tried.stats.all.drafted
        assert len(rounds) <= 3 + -(-(CONTEXT - len(prompt)) // (k + 1))


def test_a_chain_is_as_long_as_the_pages_allow():
    """A pool of 64 tokens: drafts get shorter as the text grows, and only what is new is read."""
    model = chaining(cache_tokens=64)
    tried, seq = drafter(model, k=16), text(1, [i % 30 for i in range(46)])
    for length in range(46, 64, 3):
        before = model.read
        (draft,) = tried.propose(RoundView([seq], [16]))
        assert list(draft.tokens) == list(step_by_step(seq, min(16, 64 - length)))
        assert model.read - before <= (46 if length == 46 else 20)
        seq.tokens += [*draft.tokens[:2], 7]
        tried.observe([seq], [draft], [Verdict(tuple(seq.tokens[-3:]), (0, 1))])
    model.pool.check()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_budget_shorter_than_a_chain_does_not_cost_the_cache(asynchronous: bool):
    model = chaining(cache_tokens=64)
    model.asynchronous = asynchronous
    tried, seq = drafter(model, k=16), text(1, [i % 30 for i in range(58)])
    tried.propose(RoundView([seq], [3]))
    for _ in range(2):
        before = model.read
        seq.tokens.append(5)
        (draft,) = tried.propose(RoundView([seq], [2]))
        assert list(draft.tokens) == list(step_by_step(seq, 2))
        assert model.read - before <= 4


def test_where_no_draft_fits_the_pages_go_to_another_text():
    """Neither text could continue if both kept what they hold."""
    model = chaining(cache_tokens=64)
    tried = drafter(model, k=4)
    first, second = text(1, [1] * 28), text(2, [2] * 27)
    assert [len(draft) for draft in tried.propose(RoundView([first, second], [4, 4]))] == [4, 4]
    first.tokens += [3, 4, 5, 6]
    second.tokens += [3, 4, 5, 6, 7]
    assert [len(draft) for draft in tried.propose(RoundView([first, second], [4, 4]))] == [0, 4]
    assert first.id not in model.pool
    assert model.pool.used == 3


def test_a_text_as_long_as_the_draft_s_context_holds_nothing():
    model = Chaining(VOCAB, context=32)
    tried, seq = drafter(model, k=4), text(1, range(31))
    assert len(tried.propose(RoundView([seq], [4]))[0]) == 1
    seq.tokens.append(3)
    assert len(tried.propose(RoundView([seq], [4]))[0]) == 0
    assert model.pool.used == 0


# --- mixed batches ------------------------------------------------------------------------------


def test_with_a_text_that_goes_step_by_step_none_takes_passes_of_its_own():
    model = chaining()
    seqs = [text(i, [1, 2, 3, i], temperature=0.7) for i in range(7)] + [text(9, [1, 2, 3, 4], logit_bias={5: 9.0})]
    drafts = drafter(model, k=5).propose(RoundView(seqs, [5] * 8))
    assert (model.passes, model.chains) == (5, 0)
    assert [list(draft.tokens) for draft in drafts] == [list(step_by_step(seq, 5)) for seq in seqs]


@pytest.mark.parametrize("seed", range(6))
def test_texts_go_from_chains_to_steps_and_back(seed: int):
    """By who else is asked for. They grow by accepted tokens and by others; every draft is the judge's."""
    rng, model = random.Random(seed), chaining()
    tried = drafter(model, k=4)
    options: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"presence_penalty": 0.9}, {"banned_token_ids": (1, 2)}]
    seqs = [text(i, rng.choices(range(VOCAB), k=rng.choice((1, 2, 30))), **options[i % 4]) for i in range(8)]
    for turn in range(40):
        asked = [seq for seq in seqs if len(seq.tokens) < CONTEXT and rng.random() < 0.8]
        if turn % 3:
            asked = [seq for seq in asked if seq.unprocessed]
        budgets = [min(rng.choice((2, 4, 4, 9)), CONTEXT - len(seq.tokens)) for seq in asked]
        drafts = tried.propose(RoundView(asked, budgets))
        for seq, budget, draft in zip(asked, budgets, drafts, strict=True):
            assert list(draft.tokens) == list(step_by_step(seq, min(4, budget)))
            accepted = rng.randrange(len(draft) + 1)
            seq.tokens += [*draft.tokens[:accepted], rng.randrange(VOCAB)]
        tried.observe(asked, drafts, [Verdict((seq.tokens[-1],)) for seq in asked])
        for seq in seqs:  # rounds in which nobody asks for a draft
            seq.tokens += rng.choices(range(VOCAB), k=rng.choice((0, 0, 0, 3)))
        model.pool.check()
    assert model.chains > 20
    for seq in seqs:
        tried.forget(seq)
    assert model.pool.used == 0


class Long(list[Token]):
    """A text that counts how much of it is copied."""

    copied = 0

    def __iter__(self) -> Iterator[Token]:
        Long.copied += len(self)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        Long.copied += len(found) if isinstance(index, slice) else 0
        return found


def test_a_step_does_not_touch_the_text_that_was_read_before():
    tried, seq = drafter(ToyRunner(VOCAB, context=CONTEXT), k=5), text(1, [1] * 200)
    seq.tokens = Long(seq.tokens)
    tried.propose(RoundView([seq], [5]))
    Long.copied = 0
    seq.tokens += [2, 3]
    tried.propose(RoundView([seq], [5]))
    assert Long.copied < 50


def told(drafting: Any, asked: list[Request]) -> tuple[list[list[Token]], Engine]:
    target = ToyRunner(VOCAB, context=CONTEXT, order=4)
    engine = Engine(target, drafting, make_verifier("seeded"), ByteTokenizer(), limits=EngineLimits(max_batch=6))
    seqs = [engine.live(i).seq for each in asked for i in engine.submit(each)]
    while engine.busy:
        engine.step()
        engine.check()
    return [seq.tokens for seq in seqs], engine


def test_mixed_batches_yield_plain_texts_and_every_draft_of_a_twin_is_accepted():
    """A rejected token was drafted from a wrong cache. Those with options end first, then chains begin."""
    options: list[dict[str, Any]] = [{"temperature": 0.8}, {"logit_bias": {5: 2.0}}, {}, {"frequency_penalty": 0.4}]
    asked = [
        Request(
            prompt=tuple(range(1 + i, 3 + 4 * i)),
            params=SamplingParams(seed=i, max_tokens=20 + i if i % 2 else 300, ignore_eos=True, **options[i % 4]),
        )
        for i in range(9)
    ]
    model = chaining()
    texts, tried = told(drafter(model, k=5), asked)
    assert texts == told(NoDraft(), asked)[0]
    assert tried.stats.all.accepted == tried.stats.all.drafted > 0
    assert model.chains > 50
    assert model.pool.used == 0


# --- long prompts -------------------------------------------------------------------------------


class Counting(ToyRunner):
    """Notes how many tokens each pass reads of each sequence; without a context's end."""

    def __init__(self, order: int = 4) -> None:
        super().__init__(VOCAB, context=8192, cache_tokens=16384, order=order)
        self.calls: list[dict[int, int]] = []

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self.calls.append({span.seq_id: len(span.tokens) for span in spans})
        return super().score(spans, after)


class CountingChains(Counting, Chaining):
    """Drafts chains on the device."""


BOUND = 256


def bounded(model: ToyRunner, **options: Any) -> DraftModel:
    context = DrafterContext(vocab_size=VOCAB, context=8192, max_round_tokens=BOUND)
    return DraftModel(model, context, DraftModelConfig(model="-", k=4, **options))


def long_text(seq_id: int, length: int) -> Sequence:
    return text(seq_id, [(seq_id + i * i) % VOCAB for i in range(length)])


@pytest.mark.parametrize("kind", [Counting, CountingChains])
@pytest.mark.parametrize("options", [{}, {"beams": 2}, {"min_prob": 0.001}], ids=str)
def test_a_long_prompt_is_read_in_bounded_steps(kind: type[Counting], options: dict[str, Any]):
    model, seq = kind(), long_text(1, 5000)
    tried = bounded(model, **options)
    rounds = 0
    while not (draft := (tried.propose(RoundView([seq], [4])) or [Draft()])[0]):
        assert sum(sum(call.values()) for call in model.calls) <= BOUND
        model.calls.clear()
        rounds += 1
    assert rounds == 4999 // BOUND
    assert list(draft.tokens)[:1] == list(step_by_step(seq, 1))[:1]
    assert sum(sum(call.values()) for call in model.calls) <= BOUND + 4 * 8  # the rest of the prompt, and the draft


def test_two_sequences_share_what_a_round_may_read():
    model, seqs = Counting(), [long_text(1, 3000), long_text(2, 1000), text(3, [1, 2, 3])]
    tried = bounded(model)
    first = tried.propose(RoundView(seqs, [4] * 3))
    assert first is not None
    assert [len(draft) for draft in first] == [0, 0, 4]
    assert model.calls[0] == {1: (BOUND - 3) // 2 + 1, 2: (BOUND - 3) // 2}
    drafted_after = []
    for _ in range(40):
        for i, draft in enumerate(tried.propose(RoundView(seqs, [4] * 3)) or ()):
            if draft and i not in drafted_after:
                drafted_after.append(i)
    assert drafted_after == [2, 1, 0]


def reading(target: ToyRunner, model: ToyRunner, **limits: int) -> Engine:
    made = EngineLimits(max_batch=4, max_round_tokens=BOUND)
    return Engine(target, bounded(model), make_verifier("seeded"), ByteTokenizer(), limits=replace(made, **limits))


def long_request(seq_id: int, length: int, tokens: int = 20) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(prompt=tuple(long_text(seq_id, length).tokens), params=params)


@pytest.mark.parametrize("kind", [Counting, CountingChains])
def test_a_long_prompt_holds_up_neither_its_first_token_nor_other_texts(kind: type[Counting]):
    """Through an engine: a model that waits for its passes reads after the first token, on a device it reads along."""
    model, target = kind(), kind()
    tried = reading(target, model)
    short = Request(prompt=(1, 2, 3), params=SamplingParams(max_tokens=200, ignore_eos=True))
    (other,), (seq_id,) = tried.submit(short), tried.submit(long_request(1, 5000, tokens=60))
    seq, beside = tried.live(seq_id).seq, tried.live(other)
    drafted, read = [], []
    while tried.busy and not seq.finish:
        model.calls.clear()
        tried.step()
        assert sum(sum(call.values()) for call in model.calls) <= BOUND + 2 * 8
        drafted.append(len(seq.tokens) - seq.prompt_len)
        read.append(sum(call.get(seq_id, 0) for call in model.calls))
    while tried.busy:
        tried.step()
    begun = next(i for i, count in enumerate(drafted) if count)
    if kind is Counting:
        assert not any(read[: begun + 1])
        rounds = 5001 // (BOUND - 2)  # the other text takes two tokens of each
        assert read[begun + 1 : begun + 1 + rounds] == [BOUND - 2] * rounds
        assert drafted[begun + rounds + 1] == 1 + rounds + 5
    else:
        assert sum(read[: begun + 1]) == 4999
        assert drafted[begun + 1] == 1 + 5  # nothing is left to read: a draft of four is accepted at once
    assert beside.stats.all.accepted > 0.6 * beside.stats.tokens  # never starved meanwhile
    assert tried.stats.draft_failures == 0
    assert model.pool.used == 0


def test_prompts_are_read_behind_the_target_s_pass_and_in_one_pass():
    """What is launched, and when the host waits: newcomers are read by the target, by the draft model, then waited for.

    A round holds two prompts of 100 tokens and 56 of a third.
    """
    model, target = CountingChains(), CountingChains()
    tried = reading(target, model)
    told: list[tuple[str, dict[int, int]]] = []

    def telling(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            spans = args[0] if name != "wait" else ()
            told.append((name, {span.seq_id: len(span.tokens) for span in spans if len(span.tokens) > 1}))
            return real(*args, **named)

        return called

    target.score, model.score = telling("target", target.score), telling("draft", model.score)
    tried.verifier.judge = telling("wait", tried.verifier.judge)
    asked = [long_request(i, 100) for i in range(3)]
    ids = [tried.submit(each)[0] for each in asked]
    texts = {seq_id: tried.live(seq_id).seq for seq_id in ids}
    while tried.busy:
        tried.step()
    first, second, third = ids
    assert told[:6] == [
        ("target", {first: 100, second: 100, third: 56}),
        ("draft", {first: 99, second: 99, third: 56}),
        ("wait", {}),
        ("target", {third: 44}),
        ("draft", {third: 43}),
        ("wait", {}),
    ]
    assert not any(read for name, read in told[6:] if name == "draft")
    plain = Engine(Counting(), NoDraft(), make_verifier("seeded"), ByteTokenizer())
    for seq_id, each in zip(ids, asked, strict=True):
        (judge,) = plain.submit(each)
        seq = plain.live(judge).seq
        while plain.busy:
            plain.step()
        assert texts[seq_id].tokens == seq.tokens


def test_a_prompt_read_once_is_shared_within_a_salt():
    model, prompt = Counting(), long_text(1, 900).tokens
    tried = bounded(model)
    first, again, other = (Sequence(i, [*prompt, i], 900, SamplingParams(), 0) for i in range(3))
    other.salt = "another"
    for seq, waits in ((first, 901 // BOUND), (again, 0), (other, 901 // BOUND)):
        drafts = [(tried.propose(RoundView([seq], [4])) or [Draft()])[0] for _ in range(6)]
        assert [len(draft) for draft in drafts] == [0] * waits + [4] * (6 - waits)
        assert list(drafts[-1].tokens) == list(step_by_step(seq, 4))
        tried.forget(seq)
    model.pool.check()
    assert model.pool.used == 0


@pytest.mark.parametrize(
    ("wants", "total", "shares"),
    [([5, 900, 900], 205, [5, 100, 100]), ([3, 3], 100, [3, 3]), ([], 5, []), ([9, 9, 9], 2, [0, 1, 1]), ([7], 0, [0])],
)
def test_shares_are_fair(wants: list[int], total: int, shares: list[int]):
    assert sorted(fair_shares(wants, total)) == sorted(shares)


# --- chains of several lengths ------------------------------------------------------------------


def test_chain_lengths_are_a_short_ladder_up_to_k():
    assert chain_lengths(1) == (1,)
    assert chain_lengths(5) == (1, 2, 3, 5)
    assert chain_lengths(7) == (1, 2, 3, 5, 7)
    for k in range(1, 65):
        lengths = chain_lengths(k)
        assert lengths[-1] == k
        assert list(lengths) == sorted(set(lengths))
        assert len(lengths) <= 10


def test_a_round_s_chains_are_as_long_as_its_largest_budget_and_of_a_captured_length():
    lengths: list[int] = []

    class Noting(Chaining):
        captured: Seq[int] = ()

        def draft_chains(self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None) -> Any:
            lengths.append(steps)
            return super().draft_chains(starts, steps, after)

        def capture_chains(self, batch: int, steps: Seq[int]) -> Iterator[str]:
            self.captured = steps
            return iter(())

    model = Noting(VOCAB, context=CONTEXT, order=4)
    tried, seqs = drafter(model, k=7), [text(1, [1, 2, 3]), text(2, [4, 5, 6])]
    tried.capture(8)
    for budgets in ([1, 1], [2, 1], [4, 2], [6, 1], [7, 7], [40, 3]):
        drafts = tried.propose(RoundView(seqs, budgets)) or []
        wanted = [list(step_by_step(seq, min(budget, 7))) for seq, budget in zip(seqs, budgets, strict=True)]
        assert [list(draft.tokens) for draft in drafts] == wanted
        for seq in seqs:
            seq.tokens.append(9)
    assert lengths == [1, 2, 5, 7, 7, 7]
    assert set(lengths) <= set(model.captured)


# --- options and trees --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 2.5}, r"draft-model: k must be a whole number, got 2\.5"),
        ({"k": True}, "draft-model: k must be a whole number, got True"),
        ({"k": 65}, "draft-model: k must be 1 to 64, got 65"),
        ({"beams": 0}, "draft-model: beams must be 1 to 64, got 0"),
        ({"beams": "3"}, "draft-model: beams must be a whole number, got '3'"),
        ({"min_prob": 1.5}, r"draft-model: min_prob must be 0\.0 to 1\.0, got 1\.5"),
        ({"min_prob": float("nan")}, "draft-model: min_prob must be"),
        ({"min_prob": None}, "draft-model: min_prob must be a number, got None"),
        ({"beams": 3, "min_prob": 0.1}, "min_prob=0.1 ends chains and beams=3 drafts trees.* leave one of them out"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        DraftModelConfig(model="-", **options)


@pytest.mark.parametrize("mode", ["seeded", "distribution"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("k", "beams"), [(5, 3), (2, 4), (1, 5)])
def test_a_tree_is_no_larger_than_the_drafter_says(mode: Any, temperature: float, k: int, beams: int):
    """A member of a `mix` is handed the largest member's budget."""
    tried = drafter(ToyRunner(VOCAB), mode, k=k, beams=beams)
    for budget in (0, 1, beams, k * beams, 64):
        (draft,) = tried.propose(RoundView([text(budget, [1, 2, 3], temperature=temperature)], [budget]))
        assert len(draft) <= min(budget, tried.traits.max_tokens) == min(budget, k * beams)
        assert max(draft.depths(), default=0) <= k
        siblings = [(draft.parent(node), token) for node, token in enumerate(draft.tokens)]
        assert len(set(siblings)) == len(siblings)
        if budget >= beams:
            assert len(draft.children(-1)) == beams
        if draft.probs is not None:
            torch.testing.assert_close(draft.probs.sum(-1), torch.ones(len(draft), dtype=draft.probs.dtype))


def test_a_tree_keeps_to_the_pages_there_are():
    (draft,) = drafter(ToyRunner(VOCAB, cache_tokens=16), k=3, beams=3).propose(RoundView([text(1, range(12))], [9]))
    assert len(draft) == 4
