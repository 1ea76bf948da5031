"""Prompt lookup against a search by hand."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.draft import EMPTY
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters import prompt_lookup
from outrider.drafters.base import RoundView
from outrider.drafters.prompt_lookup import PromptLookup, PromptLookupConfig


def by_hand(text, config, k):
    for n in range(min(config.max_match, len(text) - 1), config.min_match - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                longer = list(text)
                for i in range(k):
                    longer.append(longer[start + n + i])
                return tuple(longer[len(text) :])
    return ()


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3),
    st.data(),
)
@settings(max_examples=200, deadline=None)
def test_the_longest_suffix_and_its_last_occurrence(text, k, shortest, more, data):
    config = PromptLookupConfig(k=k, min_match=shortest, max_match=shortest + more, min_prob=0)
    drafter = PromptLookup(config, 0.0)
    seq = Sequence(1, [], 0, SamplingParams(), 0)
    while len(seq.tokens) < len(text):
        grown = data.draw(st.integers(len(seq.tokens) + 1, len(text)))
        seq.tokens = text[:grown]
        budget = data.draw(st.integers(0, k + 2))
        (draft,) = drafter.propose(RoundView([seq], [budget]))
        assert draft.tokens == by_hand(seq.tokens, config, min(budget, k))
        assert draft.parents is None
        assert draft.probs is None
        assert draft.source == ("prompt-lookup" if draft else "")
        assert seq.tokens == text[:grown]


def test_weak_matches_are_not_worth_a_row(make, context):
    drafter = PromptLookupConfig(min_prob=0.5).build(context)
    once, often = make([1, 2, 3, 1]), make([1, 2, 3, 4, 5, 6, 1, 2, 3, 4])
    quiet, loud = drafter.propose(RoundView([once, often], [8, 8]))
    assert quiet is EMPTY
    assert loud.tokens[0] == 5
    assert 0.5 <= loud.expected < len(loud) + 1


def test_it_stops_proposing_where_its_drafts_fail_and_starts_again(make, context, play):
    drafter = PromptLookupConfig(min_prob=0.25).build(context)
    seq = make([1, 0])
    lies = [token for i in range(2, 120) for token in (1, i)]  # 1 is never followed by the same token twice
    drafts = play(drafter, seq, lies)
    assert any(drafts[:10])
    assert not any(drafts[-20:])
    drafts = play(drafter, seq, [1, 500] * 60)
    assert all(drafts[-5:])
    assert len(drafts) < 60


def test_each_sequence_has_its_own_memory(make, context):
    drafter = PromptLookupConfig(min_prob=0).build(context)
    a, b = make([1, 2, 1]), make([1, 3, 1])
    assert [d.tokens[0] for d in drafter.propose(RoundView([a, b], [1, 1]))] == [2, 3]
    drafter.forget(a)
    a.tokens = [4, 5, 4]
    assert [d.tokens[0] for d in drafter.propose(RoundView([a, b], [1, 1]))] == [5, 3]


def test_a_long_text_is_indexed_in_bounded_steps(make, context, monkeypatch):
    monkeypatch.setattr(prompt_lookup, "MAX_INDEXED", 100)
    drafter, seq, small = PromptLookupConfig(min_prob=0).build(context), make([1, 2, 3, 4, 5] * 50), make([1, 2, 3] * 6)
    for indexed in (100, 200):
        waiting, ready = drafter.propose(RoundView([seq, small], [5, 5]))
        assert waiting is EMPTY
        assert len(ready) == 5
        assert drafter._states[seq.id].indexed == indexed
    assert drafter.propose(RoundView([seq], [5]))[0].tokens == (1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0},
        {"k": 257},
        {"k": 2.5},
        {"k": True},
        {"max_match": 0},
        {"min_match": 5, "max_match": 4},
        {"min_prob": 2},
    ],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PromptLookupConfig(**wrong)
