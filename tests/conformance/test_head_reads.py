"""A head reads what the target has read when it is asked, and nothing before: its drafts do not depend on when."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from conformance_models import native_testbed
from drafter_cast import with_heads
from plain_decoding import assert_same, request, run
from testbed import CONTEXT, TOKENIZER, VOCAB, Testbed

from outrider.core.draft import EMPTY
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext, RoundView
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.kvcache.pages import PagePool
from outrider.runners.head_reads import MAX_READ_ROWS, HeadReads, Unread, reading_passes
from outrider.runners.native import NativeRunner
from outrider.verify.base import make_verifier

SPECS = [
    "eagle:model=tiny-eagle3,k=3",
    "eagle:model=tiny-eagle1,tree=7,depth=3,top_k=3",
    "block:model=tiny-block",
    "medusa:model=tiny-medusa,tree=9",
    "mtp:model=tiny-mtp,k=2",
]
PROMPT = [random.Random(3).randrange(1, VOCAB) for _ in range(37)]


@pytest.fixture(scope="module")
def world() -> Testbed:
    return native_testbed("llama-deep")


def engine(world: Testbed, spec: str, *, asynchronous: bool = False) -> Engine:
    target = world.target(4096)
    assert isinstance(target, NativeRunner)
    target.asynchronous = asynchronous
    context = DrafterContext(vocab_size=VOCAB, context=CONTEXT, target=target)
    drafter = parse_drafter(with_heads(spec, target)).build(context)
    return Engine(target, drafter, make_verifier("seeded"), TOKENIZER, eos_ids=TOKENIZER.eos_ids)


def drafts_by_length(tried: Engine, gaps: random.Random | None) -> dict[int, tuple[int, ...]]:
    """Each draft of an answer, by the length of the text that it continues; gaps: it is not asked in many rounds."""
    drafter: Any = tried.drafter
    propose, made, rest = drafter.propose, dict[int, tuple[int, ...]](), 0

    def sometimes(view: Any) -> Any:
        nonlocal rest
        if gaps is not None and rest:
            rest -= 1
            return [EMPTY] * len(view.seqs)
        rest = 0 if gaps is None else gaps.choice((0, 0, 1, 2, 9))
        drafts = propose(view)
        for i, (seq, draft) in enumerate(zip(view.seqs, drafts, strict=True)):
            length = len(seq.tokens) if view.state is None else int(view.state.lengths[i])
            made[length] = tuple(draft.tokens)
        return drafts

    drafter.propose = sometimes
    run(tried, [request(PROMPT, max_tokens=60, ignore_eos=True)])
    assert tried.stats.draft_failures == 0
    return made


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waited", "in flight"])
@pytest.mark.parametrize("spec", SPECS)
def test_drafts_do_not_depend_on_when_a_head_is_asked(world: Testbed, spec: str, asynchronous: bool):
    always = drafts_by_length(engine(world, spec), None)
    compared = 0
    for seed in range(3):
        tried = engine(world, spec, asynchronous=asynchronous)
        for length, draft in drafts_by_length(tried, random.Random(seed)).items():
            if length in always and draft and always[length]:
                shorter = min(len(draft), len(always[length]))
                assert draft[:shorter] == always[length][:shorter]
                compared += 1
    assert compared > 10


@pytest.mark.parametrize("spec", SPECS)
def test_a_head_that_nobody_asks_runs_nothing(world: Testbed, spec: str):
    tried = engine(world, spec)
    drafter: Any = tried.drafter
    calls: list[int] = []
    for module in drafter.head.modules():
        module.register_forward_pre_hook(lambda *_: calls.append(1))
    run(tried, [replace(request(PROMPT, max_tokens=20), max_draft=0)])
    assert not calls
    assert not tried.drafter.traits.follows_target
    run(tried, [request(PROMPT, max_tokens=20)])
    assert calls


def test_a_round_behind_another_has_room_for_a_whole_draft_up_to_the_texts_end(world: Testbed):
    """What is drafted beyond it is cut: so rounds are alike to the end. Only the model's context is a limit."""
    tried = engine(world, "block:model=tiny-block", asynchronous=True)
    drafter: Any = tried.drafter
    propose, behind = drafter.propose, list[tuple[int, int]]()

    def one_token(view: Any) -> Any:
        if view.state is not None:
            behind.append((view.seqs[0].room, view.budgets[0]))
        return [draft.first_nodes(1) if draft else draft for draft in propose(view)]

    drafter.propose = one_token
    most = drafter.traits.max_tokens
    for tokens, beyond in ((60, CONTEXT - len(PROMPT) - 60), (CONTEXT - len(PROMPT), 0)):
        behind.clear()
        ((told,),) = run(tried, [request(PROMPT, max_tokens=tokens, ignore_eos=True)])
        assert len(told.tokens) == tokens
        assert [budget for _, budget in behind] == [max(0, min(most, room + beyond - 1 - 2)) for room, _ in behind]
        assert min(room for room, _ in behind) <= most


def test_a_text_that_is_about_to_end_is_not_taken_out_of_a_batch(world: Testbed, monkeypatch: pytest.MonkeyPatch):
    take, taken = RoundView.take, list[list[int]]()

    def noted(self: RoundView, rows: list[int]) -> RoundView:
        taken.append(rows)
        return take(self, rows)

    monkeypatch.setattr(RoundView, "take", noted)
    tried = engine(world, "block:model=tiny-block", asynchronous=True)
    budgets: list[list[int]] = []
    propose = tried.drafting.propose
    monkeypatch.setattr(tried.drafting, "propose", lambda view: (budgets.append(list(view.budgets)), propose(view))[1])
    lengths = (20, 30), (37, 31), (37, 123), (30, 130)  # of prompts and answers: the last two end with the context
    asked = [request(PROMPT[:prompt], max_tokens=n, ignore_eos=True) for prompt, n in lengths]
    plain = run(engine(world, "none", asynchronous=True), asked)
    for told, expected in zip(run(tried, asked), plain, strict=True):
        assert_same(told, expected)
    assert any(min(each) == 0 < max(each) for each in budgets)
    assert not taken


def text(length: int, seq_id: int = 0, rounds: int = 0) -> Sequence:
    made = Sequence(seq_id, list(range(length)), length, SamplingParams(), 0)
    made.round = rounds
    return made


def test_what_is_left_to_read_follows_from_what_was_asked():
    """Positions, for a head that reads the last token too, in passes of 4 rows a text."""
    pool = PagePool(20)
    pool.open(0, ())
    pool.reserve(0, 60)
    reads = HeadReads(pool, 4, last=True)
    assert reads.unread(text(3), 0) == Unread(0, 0)
    assert reads.unread(text(30), 0) == Unread(0, 29)
    assert reads.unread(text(30), 2) == Unread(0, 30)
    reads.note(text(30), 0)
    assert reads.unread(text(33, rounds=1), 0) == Unread(30, 30)
    assert reads.unread(text(35, rounds=1), 0) == Unread(30, 34)
    reads.note(text(35, rounds=1), 3)  # the device may have 38 by now: 36 are sure
    assert reads.unread(text(38, rounds=2), 4) == Unread(38, 38)  # what the host knows now was known there
    assert reads.unread(text(38, rounds=3), 2) == Unread(36, 36)
    assert reads.unread(text(39, rounds=3), 2) == Unread(36, 39)
    pool.open(1, ())
    pool._sequences[1].pages[:] = pool.table(0)[:3]  # as where they are shared
    assert reads.unread(text(47, seq_id=1), 0) == Unread(32, 46)
    pool.writes[pool.table(1)[1]] += 1
    assert reads.unread(text(47, seq_id=1), 0) == Unread(16, 46)


def test_a_block_head_does_not_read_the_last_token():
    pool = PagePool(20)
    pool.open(0, ())
    pool.reserve(0, 60)
    reads = HeadReads(pool, 4, last=False)
    assert reads.unread(text(30), 0) == Unread(0, 29)
    reads.note(text(30), 0)
    assert reads.unread(text(30), 0) == Unread(29, 29)
    assert reads.unread(text(33, rounds=1), 0) == Unread(29, 29)
    assert reads.unread(text(35, rounds=1), 0) == Unread(29, 34)
    assert reads.unread(text(31, rounds=1), 3) == Unread(29, 29)
    assert reads.unread(text(31, rounds=1), 4) == Unread(29, 30)


def test_texts_are_read_in_passes_of_limited_size():
    texts = [(text(MAX_READ_ROWS + 100), Unread(50, MAX_READ_ROWS + 100)), (text(9, seq_id=1), Unread(2, 8))]
    passes = list(reading_passes(texts))
    assert [[(s.seq_id, s.start, len(s.tokens)) for s in each] for each in passes] == [
        [(0, 50, MAX_READ_ROWS)],
        [(0, 50 + MAX_READ_ROWS, 50), (1, 2, 6)],
    ]
    assert passes[1][1].tokens == (2, 3, 4, 5, 6, 7)
