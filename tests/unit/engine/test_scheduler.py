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


class Stand:
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
        turns = self.scheduler.next_round(max_draft)
        for turn in turns:
            whole = turn.complete
            turn.seq.cached += turn.chunk
            if whole:
                turn.seq.tokens.append(1)
        self.pool.check()
        return {turn.seq.id: (turn.chunk, turn.budget) for turn in turns}

    def ids(self) -> tuple[list[int], list[int]]:
        return [seq.id for seq in self.scheduler.running], [seq.id for seq in self.scheduler.waiting]


def test_an_empty_scheduler_has_no_turns():
    stand = Stand()
    assert stand.round() == {}
    assert len(stand.scheduler) == 0


def test_a_prompt_is_read_in_chunks_then_decoded_with_a_draft():
    stand = Stand(max_round_tokens=10)
    stand.add(1, 23)
    rounds = [stand.round() for _ in range(4)]
    assert rounds == [{1: (10, 0)}, {1: (10, 0)}, {1: (3, 0)}, {1: (1, 4)}]


def test_only_the_last_chunk_is_complete():
    stand = Stand(max_round_tokens=10)
    stand.add(1, 20)
    complete: list[bool] = []
    for _ in range(2):
        (turn,) = stand.scheduler.next_round(4)
        complete.append(turn.complete)
        turn.seq.cached += turn.chunk
    assert complete == [False, True]


def test_decoding_goes_before_reading_whoever_came_first():
    """The older one has to read its text again, as after a rollback its cache could not do."""
    stand = Stand(max_round_tokens=64)
    older, newer = stand.add(1, 30), stand.add(2, 3)
    stand.round()
    older.cached = 0
    turns = stand.scheduler.next_round(4)
    assert [(turn.seq.id, turn.chunk) for turn in turns] == [(2, 1), (1, 31)]
    assert turns[0] == ScheduledSequence(newer, 1, 4, complete=True)


def test_newcomers_read_what_is_left_of_the_round():
    stand = Stand(max_round_tokens=12)
    stand.add(1, 2)
    stand.round()
    stand.add(2, 30)
    stand.add(3, 30)
    assert stand.round() == {1: (1, 4), 2: (7, 0)}
    assert stand.ids() == ([1, 2], [3])


def test_every_decoding_sequence_moves_on_even_where_the_round_is_full():
    stand = Stand(max_round_tokens=5)
    for seq_id in range(1, 4):
        stand.add(seq_id, 1)
    stand.round()
    assert stand.round(max_draft=9) == {1: (1, 2), 2: (1, 0), 3: (1, 0)}


def test_drafts_leave_half_a_round_to_those_who_read():
    """Budgets may go unused: nobody's first token waits for that."""
    stand = Stand(max_round_tokens=64, pages=640)
    for seq_id in range(1, 5):
        stand.add(seq_id, 1)
    stand.round()
    assert stand.round(max_draft=15) == dict.fromkeys(range(1, 5), (1, 15))
    stand.add(5, 100)
    rounds = [stand.round(max_draft=15) for _ in range(4)]
    assert [r[5] for r in rounds] == [(30, 0), (30, 0), (30, 0), (10, 0)]
    assert all(sum(map(sum, r.values())) <= 64 and sum(r[i][1] for i in range(1, 5)) == 30 for r in rounds)
    assert stand.round(max_draft=15) == {i: (1, 15 if i < 5 else 0) for i in range(1, 6)} | {4: (1, 14)}


def test_somebody_reads_even_where_those_who_go_on_fill_the_round():
    stand = Stand(max_round_tokens=3)
    for seq_id in range(1, 5):
        stand.add(seq_id, 1)
    for _ in range(2):
        stand.round()
    stand.add(9, 4)
    assert [stand.round(max_draft=5)[9] for _ in range(4)] == [(1, 0)] * 4


@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_no_round_takes_more_than_it_may(seed):
    """One token of every text that goes on, and one to read; beyond these never more than `max_round_tokens`."""
    rng = random.Random(seed)
    stand = Stand(pages=2000, max_batch=rng.randint(1, 9), max_round_tokens=rng.randint(1, 40))
    for seq_id in range(12):
        stand.add(seq_id, rng.randint(1, 60), limit=10_000)
    for _ in range(40):
        going = sum(seq.pending == 1 for seq in stand.scheduler.running)
        taken = sum(map(sum, stand.round(max_draft=rng.randint(0, 20)).values()))
        assert taken <= max(stand.scheduler.max_round_tokens, going + 1)


def test_a_budget_is_the_least_of_all_that_bounds_it():
    stand = Stand(max_round_tokens=100)
    stand.add(1, 1)
    stand.add(2, 1, max_draft=2)
    stand.add(3, 1, max_draft=0)
    stand.add(4, 1, limit=4)
    stand.add(5, 1, max_draft=50)
    stand.round()
    # the fourth has two tokens and room for two more: one drafted and one of the target's own
    assert {seq_id: budget for seq_id, (_, budget) in stand.round(max_draft=6).items()} == {
        1: 6,
        2: 2,
        3: 0,
        4: 1,
        5: 6,
    }


def test_no_more_sequences_than_the_batch_holds_in_order_of_coming():
    stand = Stand(max_batch=2)
    for seq_id in range(1, 6):
        stand.add(seq_id, 3)
    assert list(stand.round()) == [1, 2]
    stand.scheduler.remove(stand.scheduler.running[0])
    stand.target.release(1)
    assert list(stand.round()) == [2, 3]
    assert stand.ids() == ([2, 3], [4, 5])


def test_remove_takes_from_either_queue():
    stand = Stand(max_batch=1)
    first, second = stand.add(1, 3), stand.add(2, 3)
    stand.round()
    stand.scheduler.remove(second)
    assert stand.ids() == ([1], [])
    stand.scheduler.remove(first)
    assert len(stand.scheduler) == 0


def test_drafts_are_given_up_before_anybody_loses_pages():
    stand = Stand(pages=2)
    for seq_id in (1, 2):
        stand.add(seq_id, PAGE - 2)
    stand.round()
    # each has 15 tokens: one more fits its page, a draft does not
    assert stand.round(max_draft=8) == {1: (1, 0), 2: (1, 0)}
    assert stand.scheduler.preempted == []


def test_the_newest_yields_and_comes_back_first():
    stand = Stand(pages=3)
    for seq_id in (1, 2, 3):
        stand.add(seq_id, PAGE)
    stand.add(4, 3)
    stand.round()
    assert stand.ids() == ([1, 2, 3], [4])
    assert list(stand.round()) == [1]  # it needs a page: 3 yields, then 2 needs one and, newest now, yields itself
    assert [seq.id for seq in stand.scheduler.preempted] == [3, 2]
    assert stand.ids() == ([1], [2, 3, 4])
    assert all(seq.cached == 0 for seq in stand.scheduler.waiting)
    assert 2 not in stand.pool


def test_nobody_is_admitted_in_the_round_that_preempted():
    stand = Stand(pages=2)
    for seq_id in (1, 2):
        stand.add(seq_id, PAGE)
    stand.round()
    assert list(stand.round()) == [1]
    assert stand.ids() == ([1], [2])


def test_a_preempted_text_finds_its_pages_again():
    stand = Stand(pages=4)
    first, second = stand.add(1, PAGE), stand.add(2, 2 * PAGE)
    stand.round()
    for seq in (first, second):
        stand.pool.publish(seq.id, seq.tokens, seq.cached)
    for _ in range(PAGE + 1):
        stand.round(max_draft=0)
    assert stand.ids() == ([1], [2])
    stand.scheduler.remove(first)
    stand.target.release(1)
    (turn,) = stand.scheduler.next_round(0)
    assert turn.seq is second
    assert turn.shared == turn.seq.cached > 0
    assert turn.shared % PAGE == 0


def test_an_admission_that_does_not_fit_leaves_no_trace():
    stand = Stand(pages=2)
    stand.add(1, PAGE + 1)
    stand.round()
    waiting = stand.add(2, 5)
    stand.round()
    assert waiting.cached == 0
    assert 2 not in stand.pool
    assert stand.ids() == ([1], [2])


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
