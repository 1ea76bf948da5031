"""Where text ends, token by token, whatever block a token came in; who brought it; what the target thought of it."""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.core.draft import Draft, Verdict
from outrider.core.outputs import Provenance
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.engine.events import Event, Live, Outcome, describe, detokenize, extend, logprobs_of
from outrider.engine.judged import JudgedDraft
from outrider.engine.stats import Stats
from outrider.engine.text import TextStream
from outrider.testing.toy import ByteTokenizer

PIECES = ("", "a", "b", "ab", "ba", "c", " ", "é")
BLOCKS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=6), min_size=1, max_size=8)


class Pieces:
    own_texts = None

    def decode(self, ids: list[int]) -> str:
        return "".join(PIECES[i] for i in ids)


def text_in_the_making(room: int = 100, **options: object) -> tuple[Sequence, TextStream]:
    """A sequence with a prompt of two tokens; the end-of-text token is 0."""
    params = SamplingParams(**options)  # pyright: ignore[reportArgumentType]
    seq = Sequence(0, [5, 5], 2, params, 0, frozenset({0, *params.stop_token_ids}), limit=2 + room)
    return seq, TextStream(Pieces(), [5, 5], params.stop)


def grow(seq: Sequence, tokens: tuple[int, ...], stream: TextStream) -> tuple[str, ...]:
    """Take a block of tokens as the engine does: decide where the text ends, then detokenize out what is kept."""
    before = len(seq.tokens)
    kept, pieces = extend(seq, tokens, stream)
    assert seq.tokens[before:] == list(tokens[:kept])
    if not pieces:
        pieces, text = detokenize(seq, tokens[:kept], stream)
        assert "".join(pieces) == text
    assert len(pieces) == kept
    return pieces


def by_hand(tokens: list[int], room: int, params: SamplingParams) -> tuple[int, str, str | None, object]:
    """How many tokens are kept, the text, the finish and the stop: one token at a time, by searching all the text."""
    text = ""
    for count, token in enumerate(tokens, 1):
        may_stop = count >= params.min_tokens
        if may_stop and token in (0, *params.stop_token_ids):
            return count, text, "stop", token
        old, text = len(text), text + PIECES[token]
        found = [
            (at, at + len(stop))
            for stop in params.stop
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > old
        ]
        if may_stop and found:
            begin, end = min(found)
            return count, text[:begin], "stop", text[begin:end]
        if count == room:
            return count, text, "length", None
    return len(tokens), text, None, None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    BLOCKS,
    st.integers(1, 20),
    st.sets(st.sampled_from(["ab", "ba", "aba", "c", "b é", "bab"])),
    st.integers(0, 6),
    st.sampled_from([(), (6,), (6, 7)]),
)
@example([[1, 2, 3, 5, 0, 1]], 4, {"c"}, 0, ())
@example([[1, 1, 0, 1]], 3, set(), 0, ())
@example([[3, 2, 3]], 20, {"ab", "ba"}, 2, ())
def test_any_blocks_end_where_single_tokens_would(
    blocks: list[list[int]], room: int, stop: set[str], min_tokens: int, stop_ids: tuple[int, ...]
):
    options = {"stop": tuple(sorted(stop)), "min_tokens": min_tokens, "stop_token_ids": stop_ids}
    seq, stream = text_in_the_making(room, **options)
    shown = ""
    for block in blocks:
        pieces = grow(seq, tuple(block), stream)
        shown += "".join(pieces)
        if seq.finish:
            break
    flat = [token for block in blocks for token in block]
    kept, text, finish, reason = by_hand(flat, room, seq.params)
    assert seq.tokens == [5, 5, *flat[:kept]]
    assert (seq.finish, seq.stop_reason) == (finish, reason)
    assert shown + stream.flush() == text


def test_a_stop_token_is_kept_and_not_shown():
    seq, stream = text_in_the_making()
    assert grow(seq, (1, 0, 2), stream) == ("a", "")
    assert seq.tokens == [5, 5, 1, 0]
    assert (seq.finish, seq.stop_reason) == ("stop", 0)


def test_what_a_stop_string_held_back_is_shown_when_a_stop_token_ends_the_text():
    seq, stream = text_in_the_making(stop=("abc",))
    assert grow(seq, (1, 2), stream) == ("", "")
    assert grow(seq, (0,), stream) == ("ab",)


def test_what_a_stop_string_held_back_is_shown_at_the_limit():
    seq, stream = text_in_the_making(room=2, stop=("abc",))
    assert grow(seq, (1, 2, 5), stream) == ("", "ab")
    assert (seq.finish, seq.stop_reason) == ("length", None)


def test_a_stop_string_hides_its_beginning_in_earlier_blocks():
    seq, stream = text_in_the_making(stop=("abc",))
    assert grow(seq, (6, 1), stream) == (" ", "")
    assert grow(seq, (2, 5, 1), stream) == ("", "")
    assert seq.tokens == [5, 5, 6, 1, 2, 5]
    assert seq.stop_reason == "abc"


def test_a_stop_on_the_last_token_of_the_limit_is_a_stop():
    for token, options, reason in ((0, {}, 0), (5, {"stop": ("c",)}, "c")):
        seq, stream = text_in_the_making(room=2, **options)
        grow(seq, (1, token, 1), stream)
        assert (seq.finish, seq.stop_reason, seq.generated) == ("stop", reason, 2)


def test_before_min_tokens_nothing_ends_the_text():
    seq, stream = text_in_the_making(min_tokens=3, stop=("a",))
    assert "".join(grow(seq, (1, 0, 2, 5), stream)) == "abc"
    assert seq.finish is None


def event_of(draft: Draft, verdict: Verdict, round_: int, kept: int | None = None) -> tuple[Event, Stats]:
    """The event of a round that ended with `kept` tokens of the verdict, and the figures it was counted in."""
    seq, stream = text_in_the_making()
    seq.round, live = round_ + 1, Live(seq, stream, Stats())
    return describe(Outcome(live, draft, verdict, verdict.tokens[:kept])), live.stats


def told_of(draft: Draft, verdict: Verdict, round_: int) -> tuple[Provenance, ...]:
    return event_of(draft, verdict, round_)[0].provenance


@pytest.mark.parametrize(
    ("draft", "verdict", "expected"),
    [
        (Draft(), Verdict((4,)), [("plain", "", 0)]),
        (Draft((1, 2), source="s"), Verdict((6,)), [("recovered", "s", 0)]),
        (Draft((1, 2), source="s"), Verdict((1, 6), (0,)), [("accepted", "s", 0), ("recovered", "s", 1)]),
        (
            Draft((1, 2), source="s"),
            Verdict((1, 2, 6), (0, 1)),
            [("accepted", "s", 0), ("accepted", "s", 1), ("bonus", "s", 2)],
        ),
        (Draft((1, 2, 3), (-1, -1, 0), source="t"), Verdict((2, 6), (1,)), [("accepted", "t", 0), ("bonus", "t", 1)]),
        (
            Draft((1, 2, 3), (-1, -1, 0), source="t"),
            Verdict((1, 6), (0,)),
            [("accepted", "t", 0), ("recovered", "t", 1)],
        ),
    ],
)
def test_where_each_token_came_from(draft: Draft, verdict: Verdict, expected: list[tuple[str, str, int]]):
    told = told_of(draft, verdict, 7)
    assert [(p.origin, p.drafter, p.position) for p in told] == expected
    assert {(p.round, p.drafted) for p in told} == {(7, len(draft))}


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
@pytest.mark.parametrize("last", [5, 6], ids=["not-rejected", "rejected"])
@pytest.mark.parametrize("stated", [False, True])
def test_a_round_cut_by_a_stop_tells_and_counts_only_what_was_kept(kept: int, last: int, *, stated: bool):
    """The plain way: all of the verdict's provenance, and of that the first few; figures of what was kept."""
    probs = torch.rand(4, 8, generator=torch.Generator().manual_seed(0)) if stated else None
    draft, verdict = Draft((1, 2, 3, 5), probs=probs, source="s"), Verdict((1, 2, 3, last), (0, 1, 2))
    of = [None if probs is None else probs[i, token].item() for i, token in enumerate((1, 2, 3))]
    whole = [Provenance("accepted", "s", i, 7, 4, of[i]) for i in range(3)]
    whole.append(Provenance("recovered" if last == 6 else "bonus", "s", 3, 7, 4))
    event, stats = event_of(draft, verdict, 7, kept)
    assert event.provenance == tuple(whole[:kept])
    assert {type(each) for each in event.provenance} == {Provenance}
    judged = JudgedDraft("s", 4, 4, min(kept, 3), kept, rejected=kept == 4 and last == 6)
    assert JudgedDraft.of(draft, Verdict(verdict.tokens[:kept], verdict.path[:kept])) == judged
    by_hand = Stats()
    by_hand.count(judged)
    assert (stats.all, stats.drafters) == (by_hand.all, by_hand.drafters)
    assert stats.all == stats.drafters["s"]
    assert (stats.all.accepted, stats.all.emitted, stats.all.rejected) == (judged.accepted, kept, judged.rejected)


@pytest.mark.parametrize("stated", [False, True])
def test_an_event_holds_facts_and_no_memory_of_a_device(*, stated: bool):
    probs = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) if stated else None
    event, _ = event_of(Draft((1, 2, 3), probs=probs, source="s"), Verdict((1, 2, 6), (0, 1)), 7)
    assert [each.origin for each in event.provenance] == ["accepted", "accepted", "recovered"]
    assert event._replace(finish="stop").provenance == event.provenance
    assert event.judged is not None
    assert {type(fact) for fact in event.judged} <= {str, int, bool, tuple, type(None)}
    assert Event(1).provenance == ()


def test_stated_probs_are_reported_for_accepted_tokens():
    probs = torch.tensor([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3], [0.25, 0.25, 0.5]])
    draft = Draft((1, 0, 2), (-1, -1, 1), probs, "d")
    told = told_of(draft, Verdict((0, 2, 1), (1, 2)), 3)
    assert [p.draft_prob for p in told] == pytest.approx([0.5, 0.5, None])
    assert [p.draft_prob for p in told_of(Draft((1,)), Verdict((1, 2), (0,)), 3)] == [None, None]


def test_log_probabilities_come_from_the_row_each_token_was_chosen_by():
    """Along the kept branch of a tree: after the text, then after each kept node."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    verdict = Verdict((2, 6, 4), (1, 3))
    told = logprobs_of(3, verdict, (2, 6, 4), logits)
    for each, token, row in zip(told, (2, 6, 4), (0, 2, 4), strict=True):
        scores = [float(x) for x in logits[row].double()]
        norm = math.log(sum(math.exp(x) for x in scores))
        best = sorted(range(8), key=lambda t: -scores[t])[:3]
        assert each.token == token
        assert each.logprob == pytest.approx(scores[token] - norm, abs=1e-5)
        assert each.rank == 1 + sum(x > scores[token] for x in scores)
        assert [t for t, _ in each.top] == best
        assert [p for _, p in each.top] == pytest.approx([scores[t] - norm for t in best], abs=1e-5)


def test_log_probabilities_stop_with_the_text():
    told = logprobs_of(0, Verdict((2, 6, 4), (0, 1)), (2,), torch.zeros(3, 8))
    assert [(each.token, each.top) for each in told] == [(2, ())]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_among_equal_alternatives_the_lowest_ids_are_reported(rows: int):
    """Packed models round their logits to bfloat16, so that equals are common: who is told may not hang on the pass."""
    logits = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)).mul(2).round()
    chain = Verdict((0,) * rows, tuple(range(rows - 1)))
    for each, row in zip(logprobs_of(4, chain, (0,) * rows, logits), logits.tolist(), strict=True):
        best = sorted(range(64), key=lambda t: (-row[t], t))[:4]
        assert [token for token, _ in each.top] == best


def test_a_stop_string_that_shows_only_at_the_very_end_is_a_stop():
    """Half a character at the limit is shown as U+FFFD; where that is a stop string, the text ended at it."""
    params = SamplingParams(stop=("\N{REPLACEMENT CHARACTER}",))
    seq = Sequence(0, [104], 1, params, 0, frozenset(), limit=3)
    pieces = grow(seq, (105, 0xC3), TextStream(ByteTokenizer(), [104], params.stop))
    assert "".join(pieces) == "i"
    assert (seq.finish, seq.stop_reason) == ("stop", "\N{REPLACEMENT CHARACTER}")
