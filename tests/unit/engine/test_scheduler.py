"""Who takes part in a round: decoding before reading, chunks, budgets, pages; and nobody waits for ever."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.engine import Engine
from outrider.engine.request import EngineLimits, Request
from outrider.engine.scheduler import ScheduledSequence, Scheduler
from outrider.testing.drafters import ScriptedDrafter
from outrider.testing.toy import ToyRunner
from outrider.verify.base import make_verifier

PAGE = 16


class Setup:
    """A scheduler on a pool of so many pages, and sequences added by hand."""

    def __init__(self, pages: int = 64, max_batch: int = 8, max_round_tokens: int = 64) -> None:
        self.target = ToyRunner(cache_tokens=pages * PAGE)
        self.scheduler = Scheduler(self.target, max_batch=max_batch, max_round_tokens=max_round_tokens)
        self.pool = self.target.pool

    def add(self, seq_id: int, length: int, *, limit: int = 200, max_draft: int | None = None) -> Sequence:
        """A text of its own, so that no two share pages."""
        tokens = [(seq_id * 7 + i) % 64 for i in range(length)]
        seq = Sequence(seq_id, tokens, length, SamplingParams(), 0, limit=limit, max_draft=max_draft)
        self.scheduler.add(seq)
        return seq

    def round(self, max_draft: int = 4) -> dict[int, tuple[int, int]]:
        """Take a round as the engine would, each completed text growing by one token: id -> (chunk, budget)."""
        scheduled = self.scheduler.next_round(max_draft)
        for each in scheduled:
            whole = each.complete
            each.seq.cached += each.chunk
            if whole:
                each.seq.tokens.append(1)
        self.pool.check()
        return {each.seq.id: (each.chunk, each.budget) for each in scheduled}

    def ids(self) -> tuple[list[int], list[int]]:
        return [seq.id for seq in self.scheduler.running], [seq.id for seq in self.scheduler.waiting]


def test_an_empty_scheduler_has_no_turns():
    setup = Setup()
    assert setup.round() == {}
    assert len(setup.scheduler) == 0


def test_a_prompt_is_read_in_chunks_then_decoded_with_a_draft():
    setup = Setup(max_round_tokens=10)
    setup.add(1, 23)
    rounds = [setup.round() for _ in range(4)]
    assert rounds == [{1: (10, 0)}, {1: (10, 0)}, {1: (3, 0)}, {1: (1, 4)}]


def test_only_the_last_chunk_is_complete():
    setup = Setup(max_round_tokens=10)
    setup.add(1, 20)
    complete: list[bool] = []
    for _ in range(2):
        (each,) = setup.scheduler.next_round(4)
        complete.append(each.complete)
        each.seq.cached += each.chunk
    assert complete == [False, True]


def test_decoding_goes_before_reading_whoever_came_first():
    """The older one has to read its text again, as after a rollback its cache could not do."""
    setup = Setup(max_round_tokens=64)
    older, newer = setup.add(1, 30), setup.add(2, 3)
    setup.round()
    older.cached = 0
    scheduled = setup.scheduler.next_round(4)
    assert [(each.seq.id, each.chunk) for each in scheduled] == [(2, 1), (1, 31)]
    assert scheduled[0] == ScheduledSequence(newer, 1, 4, complete=True, room=196)


def test_newcomers_read_what_is_left_of_the_round():
    setup = Setup(max_round_tokens=12)
    setup.add(1, 2)
    setup.round()
    setup.add(2, 30)
    setup.add(3, 30)
    assert setup.round() == {1: (1, 4), 2: (7, 0)}
    assert setup.ids() == ([1, 2], [3])


def test_every_decoding_sequence_moves_on_even_where_the_round_is_full():
    setup = Setup(max_round_tokens=5)
    for seq_id in range(1, 4):
        setup.add(seq_id, 1)
    setup.round()
    assert setup.round(max_draft=9) == {1: (1, 2), 2: (1, 0), 3: (1, 0)}


def test_drafts_leave_half_a_round_to_those_who_read():
    """Budgets may go unused: nobody's first token waits for that."""
    setup = Setup(max_round_tokens=64, pages=640)
    for seq_id in range(1, 5):
        setup.add(seq_id, 1)
    setup.round()
    assert setup.round(max_draft=15) == dict.fromkeys(range(1, 5), (1, 15))
    setup.add(5, 100)
    rounds = [setup.round(max_draft=15) for _ in range(4)]
    assert [r[5] for r in rounds] == [(30, 0), (30, 0), (30, 0), (10, 0)]
    assert all(sum(map(sum, r.values())) <= 64 and sum(r[i][1] for i in range(1, 5)) == 30 for r in rounds)
    assert setup.round(max_draft=15) == {i: (1, 15 if i < 5 else 0) for i in range(1, 6)} | {4: (1, 14)}


def test_a_prompt_is_read_even_where_decoding_sequences_fill_the_round():
    setup = Setup(max_round_tokens=3)
    for seq_id in range(1, 5):
        setup.add(seq_id, 1)
    for _ in range(2):
        setup.round()
    setup.add(9, 4)
    assert [setup.round(max_draft=5)[9] for _ in range(4)] == [(1, 0)] * 4


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_no_round_takes_more_than_it_may(seed: int):
    """One token of every decoding text, and one to read; beyond these never more than `max_round_tokens`."""
    rng = random.Random(seed)
    setup = Setup(pages=2000, max_batch=rng.randint(1, 9), max_round_tokens=rng.randint(1, 40))
    for seq_id in range(12):
        setup.add(seq_id, rng.randint(1, 60), limit=10_000)
    for _ in range(40):
        going = sum(seq.pending == 1 for seq in setup.scheduler.running)
        taken = sum(map(sum, setup.round(max_draft=rng.randint(0, 20)).values()))
        assert taken <= max(setup.scheduler.max_round_tokens, going + 1)


def test_a_budget_is_the_least_of_all_that_bounds_it():
    setup = Setup(max_round_tokens=100)
    setup.add(1, 1)
    setup.add(2, 1, max_draft=2)
    setup.add(3, 1, max_draft=0)
    setup.add(4, 1, limit=4)
    setup.add(5, 1, max_draft=50)
    setup.round()
    # the fourth has two tokens and room for two more: one drafted and one of the target's own
    assert {seq_id: budget for seq_id, (_, budget) in setup.round(max_draft=6).items()} == {
        1: 6,
        2: 2,
        3: 0,
        4: 1,
        5: 6,
    }


def test_no_more_sequences_than_the_batch_holds_in_order_of_coming():
    setup = Setup(max_batch=2)
    for seq_id in range(1, 6):
        setup.add(seq_id, 3)
    assert list(setup.round()) == [1, 2]
    setup.scheduler.remove(setup.scheduler.running[0])
    setup.target.release(1)
    assert list(setup.round()) == [2, 3]
    assert setup.ids() == ([2, 3], [4, 5])


def test_remove_takes_from_either_queue():
    setup = Setup(max_batch=1)
    first, second = setup.add(1, 3), setup.add(2, 3)
    setup.round()
    setup.scheduler.remove(second)
    assert setup.ids() == ([1], [])
    setup.scheduler.remove(first)
    assert len(setup.scheduler) == 0


def test_drafts_are_given_up_before_anybody_loses_pages():
    setup = Setup(pages=2)
    for seq_id in (1, 2):
        setup.add(seq_id, PAGE - 2)
    setup.round()
    # each has 15 tokens: one more fits its page, a draft does not
    assert setup.round(max_draft=8) == {1: (1, 0), 2: (1, 0)}
    assert setup.scheduler.preempted == []


def test_the_newest_yields_and_comes_back_first():
    setup = Setup(pages=3)
    for seq_id in (1, 2, 3):
        setup.add(seq_id, PAGE)
    setup.add(4, 3)
    setup.round()
    assert setup.ids() == ([1, 2, 3], [4])
    assert list(setup.round()) == [1]  # 3 is preempted for its page, then 2, the newest now, preempts itself
    assert [seq.id for seq in setup.scheduler.preempted] == [3, 2]
    assert setup.ids() == ([1], [2, 3, 4])
    assert all(seq.cached == 0 for seq in setup.scheduler.waiting)
    assert 2 not in setup.pool


def test_nobody_is_admitted_in_the_round_that_preempted():
    setup = Setup(pages=2)
    for seq_id in (1, 2):
        setup.add(seq_id, PAGE)
    setup.round()
    assert list(setup.round()) == [1]
    assert setup.ids() == ([1], [2])


def test_a_preempted_text_finds_its_pages_again():
    setup = Setup(pages=4)
    first, second = setup.add(1, PAGE), setup.add(2, 2 * PAGE)
    setup.round()
    for seq in (first, second):
        setup.pool.publish(seq.id, seq.tokens, seq.cached)
    for _ in range(PAGE + 1):
        setup.round(max_draft=0)
    assert setup.ids() == ([1], [2])
    setup.scheduler.remove(first)
    setup.target.release(1)
    (each,) = setup.scheduler.next_round(0)
    assert each.seq is second
    assert each.shared == each.seq.cached > 0
    assert each.shared % PAGE == 0


def test_an_admission_that_does_not_fit_leaves_no_trace():
    setup = Setup(pages=2)
    setup.add(1, PAGE + 1)
    setup.round()
    waiting = setup.add(2, 5)
    setup.round()
    assert waiting.cached == 0
    assert 2 not in setup.pool
    assert setup.ids() == ([1], [2])


def test_behind_a_round_all_texts_take_pages_ahead_where_one_has_few_left():
    setup = Setup(pages=64)
    texts = [setup.add(1, PAGE - 4), setup.add(2, 2), setup.add(3, 2, limit=2 * PAGE)]
    for _ in range(2):
        setup.round(max_draft=0)
    in_flight = setup.scheduler.next_round(0)
    assert [len(setup.pool.table(seq.id)) for seq in texts] == [1, 1, 1]
    assert setup.scheduler.next_round_after(in_flight, 0)
    ahead = [len(setup.pool.table(seq.id)) for seq in texts]
    assert ahead == [9, 9, 6]  # 128 tokens, but 64 beyond the last one's end
    changes = setup.pool.changes
    while len(texts[0].tokens) + 1 + 64 < 9 * PAGE:
        for seq in texts[:2]:
            seq.tokens.append(1)
            seq.cached += 1
        assert setup.scheduler.next_round_after(in_flight, 0)
        assert setup.pool.changes == changes
    texts[0].tokens.append(1)
    texts[0].cached += 1
    assert setup.scheduler.next_round_after(in_flight, 0)
    assert [len(setup.pool.table(seq.id)) for seq in texts] == [13, 13, 6]
    setup.pool.check()


# Rounds that are launched again behind themselves, by what may come of them.


def fits(setup: Setup, each: ScheduledSequence, length: int, rows: int) -> bool:
    """Whether a text of this length has pages for its draft and the pass, and stays within the context."""
    capacity = len(setup.pool.table(each.seq.id)) * PAGE
    return length - 1 + max(1 + each.budget, rows) <= capacity and length + each.budget + 1 <= setup.target.context


def decoding(rng: random.Random, max_draft: int) -> tuple[Setup, list[ScheduledSequence], list[int]]:
    """A round of decoding texts, maybe behind another, and the most tokens that each text has when it begins."""
    setup = Setup(pages=rng.choice((6, 12, 30, 200)), max_batch=rng.randint(1, 5), max_round_tokens=512)
    setup.target.context = rng.choice((30, 64, 100, 512))
    for seq_id in range(rng.randint(1, 5)):
        setup.add(
            seq_id, rng.randint(1, 20), limit=rng.randint(24, setup.target.context), max_draft=rng.choice((None, 0, 2))
        )
    for _ in range(rng.randint(2, 5)):
        setup.round(max_draft=0)
    scheduled = setup.scheduler.next_round(max_draft)
    lengths = [len(each.seq.tokens) for each in scheduled]
    for each in scheduled:
        each.budget = rng.randint(0, each.budget)  # tokens that were drafted
    if rng.random() < 0.6 and all(each.decodes for each in scheduled):
        behind = setup.scheduler.next_round_after(scheduled, max_draft)
        if behind:
            lengths = [length + each.budget + 1 for length, each in zip(lengths, scheduled, strict=True)]
            scheduled = behind
            for each in scheduled:
                each.budget = rng.randint(0, each.budget)
    return setup, scheduled, lengths


@given(seed=st.integers(0, 1_000_000), max_draft=st.integers(0, 7), rows=st.integers(0, 12))
@settings(max_examples=300, deadline=None)
def test_a_round_is_repeated_as_often_as_there_is_room_whatever_is_accepted(seed: int, max_draft: int, rows: int):
    rng = random.Random(seed)
    setup, scheduled, longest = decoding(rng, max_draft)
    if not scheduled or not all(each.decodes for each in scheduled):
        return
    changes = setup.scheduler.changes, setup.pool.changes
    repeats = setup.scheduler.repeats(scheduled, rows)
    assert (setup.scheduler.changes, setup.pool.changes) == changes
    assert 0 <= repeats <= 16
    for accepts_all in (True, False):
        lengths = [
            n if accepts_all else rng.randint(len(e.seq.tokens), n) for n, e in zip(longest, scheduled, strict=True)
        ]
        for _ in range(repeats):  # those behind the round itself
            for i, each in enumerate(scheduled):
                lengths[i] += 1 + (each.budget if accepts_all else rng.randint(0, each.budget))
            assert all(fits(setup, each, n, rows) for each, n in zip(scheduled, lengths, strict=True))
    if repeats < 16:  # one more may be given up for a token's sake, two are not
        ends = [n + (repeats + 2) * (1 + each.budget) for n, each in zip(longest, scheduled, strict=True)]
        assert not all(fits(setup, each, n, rows) for each, n in zip(scheduled, ends, strict=True))


def test_rounds_are_repeated_as_far_as_pages_were_taken_ahead():
    setup = Setup(pages=64)
    seq = setup.add(1, PAGE - 4, limit=400)
    for _ in range(2):
        setup.round(max_draft=0)
    in_flight = setup.scheduler.next_round(3)
    assert setup.scheduler.repeats(in_flight, 0) == (2 * PAGE - 14 - 4) // 4 == 3  # 14 tokens, 4 a round
    (behind,) = setup.scheduler.next_round_after(in_flight, 3)
    assert behind.budget == 3
    assert setup.scheduler.repeats([behind], 0) == 16
    capacity = len(setup.pool.table(1)) * PAGE
    seq.tokens += [1] * (capacity - len(seq.tokens) - 20)
    behind.room = seq.room
    assert setup.scheduler.repeats([behind], 4) == (20 - 4) // 4
    assert setup.scheduler.repeats([behind], 9) == (20 - 9) // 4
    assert setup.scheduler.repeats([behind], 21) == 0
    setup.target.context = len(seq.tokens) + 13
    assert setup.scheduler.repeats([behind], 0) == (13 - 4) // 4


def test_who_comes_and_goes_is_a_change_and_a_round_is_none():
    setup = Setup(pages=3, max_batch=2)
    seen: list[int] = []

    def changed() -> bool:
        seen.append(setup.scheduler.changes)
        return len(seen) > 1 and seen[-1] != seen[-2]

    changed()
    first, second = setup.add(1, PAGE - 3), setup.add(2, PAGE - 3)
    assert not changed()  # they only wait
    setup.round(max_draft=0)  # both are admitted
    assert changed()
    setup.round(max_draft=0)
    assert setup.scheduler.next_round_after(setup.scheduler.next_round(0), 0)
    assert not changed()
    waiting = setup.add(3, 2)
    assert not changed()
    setup.scheduler.remove(waiting)
    assert changed()
    while not setup.scheduler.preempted:
        assert not changed()
        setup.round(max_draft=0)
    assert setup.ids() == ([1], [2])
    assert changed()
    setup.scheduler.remove(first)
    setup.target.release(1)
    assert changed()
    setup.round(max_draft=0)
    assert changed()
    setup.scheduler.remove(second)
    assert changed()


# Everything together, through the engine: random mixes on tiny pools all finish, with the right text.

Mix = list[tuple[int, int, int | None]]  # tokens of the prompt, new ones, max_draft

mixes = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.sampled_from([None, 0, 2])), min_size=1, max_size=7
)
limits = st.builds(EngineLimits, max_batch=st.integers(1, 5), max_round_tokens=st.integers(1, 24))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(mixes, st.integers(0, 3), limits, st.integers(0, 1000))
def test_every_request_finishes_with_the_right_text(mix: Mix, spare_pages: int, limits: EngineLimits, seed: int):
    finish_all(mix, spare_pages, limits, seed)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(mixes, st.integers(0, 3), limits, st.integers(0, 10**6))
def test_every_request_finishes_with_the_right_text_at_length(
    mix: Mix, spare_pages: int, limits: EngineLimits, seed: int
):
    finish_all(mix, spare_pages, limits, seed)


def finish_all(mix: Mix, spare_pages: int, limits: EngineLimits, seed: int) -> None:
    """The pool holds the longest text and a few pages more; arrivals are spread over the rounds."""
    longest = max(prompt + new for prompt, new, _ in mix)
    target = ToyRunner(vocab_size=16, cache_tokens=(-(-longest // PAGE) + spare_pages) * PAGE)
    drafter = ScriptedDrafter(half_right(target), max_tokens=5)
    engine = Engine(target, drafter, make_verifier("seeded"), Letters(), limits=limits)
    rng = random.Random(seed)
    requests = [
        Request(
            prompt=tuple(rng.choices(range(4), k=prompt)),  # few letters: beginnings are shared now and then
            params=SamplingParams(max_tokens=new),
            max_draft=max_draft,
        )
        for prompt, new, max_draft in mix
    ]
    texts: dict[int, list[int]] = {}
    todo = dict(enumerate(requests))
    asked: dict[int, Request] = {}
    for _ in range(3000):
        if todo and rng.random() < 0.6:
            request = todo.pop(min(todo))
            (seq_id,) = engine.submit(request)
            asked[seq_id], texts[seq_id] = request, []
        for event in engine.step():
            texts[event.seq_id] += event.tokens
        engine.check()
        if not todo and not engine.busy:
            break
    assert not engine.busy
    assert {i: greedy(target, asked[i]) for i in asked} == texts


class Letters:
    own_texts = None

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def greedy(target: ToyRunner, request: Request) -> list[int]:
    text = list(request.prompt)
    for _ in range(request.params.max_tokens):
        text.append(int(target.logits_after(text).argmax()))
    return text[len(request.prompt) :]


def half_right(target: ToyRunner) -> Callable[[Sequence, int], Draft]:
    """Drafts a tree: what comes, and beside every token of it a wrong one."""

    def script(seq: Sequence, budget: int) -> Draft:
        text, tokens, parents, parent = list(seq.tokens), [], [], -1
        while len(tokens) + 2 <= budget:
            right = int(target.logits_after(text).argmax())
            tokens += [(right + 1) % 16, right]
            parents += [parent, parent]
            parent = len(tokens) - 1
            text.append(right)
        return Draft(tuple(tokens), tuple(parents), source="half-right")

    return script
