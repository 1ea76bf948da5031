"""Suffix drafting against the rule worked out by hand, over counted occurrences."""

import random
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.draft import EMPTY
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters import suffix
from outrider.drafters.base import RoundView
from outrider.drafters.confidence import Confidence, prior_prob
from outrider.drafters.ngram_index import NgramIndex
from outrider.drafters.suffix import Suffix, SuffixConfig
from outrider.drafters.tree_builder import TreeLimits, build_chain, build_tree

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@settings(deadline=None, max_examples=200)
@given(st.lists(tokens, min_size=1, max_size=3), st.integers(1, 8), st.integers(1, 8), st.sampled_from((0.0, 0.25)))
def test_a_chain_is_the_tree_of_width_1(texts, nodes, depth, min_prob):
    index = NgramIndex()
    for text in texts[:-1]:
        index.extend(text)
        index.finish()
    index.extend(texts[-1])
    found = index.find(texts[-1], 16, 16)
    for match in set(found.values()):
        places = [place for place, m in found.items() if m >= match]
        limits = TreeLimits(nodes, depth, 1, min_prob)
        chain, tree = (build(index, places, match, Confidence(0.8), limits) for build in (build_chain, build_tree))
        assert tree.parents == list(range(-1, len(tree.tokens) - 1))
        assert (chain.tokens, chain.priors) == (tree.tokens, tree.priors)
        assert chain.expected == pytest.approx(tree.expected)
        assert chain.likeliest(7) == tree.likeliest(7)


def continuations(source, tail, own):
    """What followed `tail` in the source, most recent first; a text of its own continues with its own tokens."""
    runs = []
    for text in reversed(source):
        for place in range(len(text) - 1 if own else len(text), len(tail) - 1, -1):
            if text[place - len(tail) : place] == tail:
                period = text[place:]
                runs.append((period * 20)[:20] if own else period)
    return [run for run in runs if run]


def chain_by_hand(runs, match, depth, least, worth):
    """Greedy by votes, the chance of each token its share less the doubt, times `worth`."""
    chain, chance, expected = [], 1.0, 0.0
    while len(chain) < depth:
        here = [run for run in runs if len(run) > len(chain) and run[: len(chain)] == chain]
        votes = [run[len(chain)] for run in here]
        if not votes:
            break
        token = max(votes, key=votes.count)
        chance *= min(0.99, prior_prob(match + len(chain), votes.count(token), len(votes)) * worth)
        if chance < least:
            break
        chain.append(token)
        expected += chance
    return chain, expected


def best_by_hand(config, text, answers):
    best, expected = [], 0.0
    for source, own, worth in (([text], True, 1.0), (answers, False, 0.5)):
        for match in range(len(text), 0, -1):
            depth = min(config.k, config.draft_limit(match))
            runs = continuations(source, text[-match:], own)
            chain, value = chain_by_hand(runs, match, depth, config.min_prob, worth)
            if value > expected + 1e-12:
                best, expected = chain, value
    return tuple(best), expected


@given(
    tokens,
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=10), max_size=3),
    st.sampled_from([0.02, 0.1, 0.4]),
    st.sampled_from([0.5, 1.0, 3.0]),
    st.integers(1, 8),
)
@settings(max_examples=300, deadline=None)
def test_the_match_that_expects_most_is_proposed(text, answers, min_prob, factor, k):
    config = SuffixConfig(k=k, factor=factor, min_prob=min_prob, max_depth=64)
    drafter = Suffix(config, min_prob)
    for i, answer in enumerate(answers):
        drafter.forget(Sequence(i, list(answer), 0, SamplingParams(), 0))
    with patch.object(suffix, "_MAX_OCCURRENCES", 10_000):
        (draft,) = drafter.propose(RoundView([Sequence(99, list(text), 0, SamplingParams(), 0)], [k]))
    chain, expected = best_by_hand(config, text, answers)
    assert draft.expected == pytest.approx(expected)
    assert draft.tokens == chain


def finished(drafter, make, answer, salt=""):
    drafter.forget(make([0, *answer], prompt_len=1, salt=salt))


def test_answers_are_drafted_from_and_prompts_are_not(make, context):
    drafter = SuffixConfig(min_prob=0.01).build(context)
    drafter.forget(make([1, 2, 3, 4, 5, 6, 7, 8], prompt_len=4))
    known, unknown = drafter.propose(RoundView([make([9, 5, 6]), make([9, 2, 3])], [8, 8]))
    assert known.tokens == (7, 8)
    assert unknown is EMPTY


def test_texts_of_one_salt_never_show_in_another(make, context):
    drafter = SuffixConfig(min_prob=0.01).build(context)
    finished(drafter, make, [5, 6, 7, 8], salt="ours")
    drafts = drafter.propose(RoundView([make([5, 6], salt=salt) for salt in ("ours", "theirs", "")], [4] * 3))
    assert [draft.tokens for draft in drafts] == [(7, 8), (), ()]


@pytest.mark.parametrize("limit", [{"cached_requests": 2}, {"cached_tokens": 8}])
def test_the_oldest_answers_go_first_whatever_their_salt(limit, make, context):
    drafter = SuffixConfig(min_prob=0.01, **limit).build(context)
    for salt, answer in (("a", [1, 2, 3, 4]), ("b", [5, 6, 7, 8]), ("a", [11, 12, 13, 14])):
        finished(drafter, make, answer, salt)
    drafts = drafter.propose(
        RoundView([make(t, salt=s) for t, s in (([1, 2], "a"), ([5, 6], "b"), ([11, 12], "a"))], [4] * 3)
    )
    assert [draft.tokens for draft in drafts] == [(), (7, 8), (13, 14)]
    finished(drafter, make, [20, 21], "c")
    finished(drafter, make, [30, 31, 32, 33, 34, 35, 36, 37], "c")
    assert set(drafter._answers) == {"c"}


def test_an_answer_too_long_to_keep_is_kept_from_its_end(make, context):
    drafter = SuffixConfig(min_prob=0.01, cached_tokens=3).build(context)
    finished(drafter, make, [1, 2, 3, 4, 5])
    drafts = drafter.propose(RoundView([make([1, 2]), make([3, 4])], [4, 4]))
    assert [draft.tokens for draft in drafts] == [(), (5,)]


@pytest.mark.parametrize("off", [{"cached_requests": 0}, {"cached_tokens": 0}])
def test_nothing_is_kept_where_nothing_may_be(off, make, context):
    drafter = SuffixConfig(min_prob=0.01, **off).build(context)
    finished(drafter, make, [5, 6, 7, 8])
    assert drafter.propose(RoundView([make([5, 6])], [4])) == [EMPTY]
    assert not drafter._answers


def test_a_long_repetition_is_drafted_to_the_full(make, context):
    drafter = SuffixConfig(k=16).build(context)
    (draft,) = drafter.propose(RoundView([make([1, 2, 3] * 200)], [16]))
    assert draft.tokens == ((1, 2, 3) * 6)[:16]
    assert draft.expected > 10


def test_no_more_than_the_budget_and_a_zero_budget_is_one(make, context):
    drafter = SuffixConfig().build(context)
    seq = make([1, 2, 3] * 20)
    assert [len(drafter.propose(RoundView([seq], [b]))[0]) for b in (0, 1, 5, 99)] == [0, 1, 5, 15]


def test_match_and_proposal_stay_within_the_depth():
    config = SuffixConfig(factor=1.0, max_depth=24)
    assert [config.draft_limit(m) for m in (1, 5, 12, 20, 100)] == [1, 5, 12, 12, 12]
    assert SuffixConfig(factor=3.0, max_depth=24).draft_limit(100) == 18


def test_a_tree_offers_what_followed_as_well(make, context):
    drafter = SuffixConfig(width=2, min_prob=0.05).build(context)
    text = [1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 3, 9, 1, 2]
    (draft,) = drafter.propose(RoundView([make(text)], [16]))
    firsts = {draft.tokens[node] for node in draft.children(-1)}
    assert firsts == {3, 4}
    assert draft.tokens[0] == 3  # two votes against one
    for node in range(-1, len(draft)):
        siblings = [draft.tokens[child] for child in draft.children(node)]
        assert len(siblings) == len(set(siblings)) <= 2
    (chain,) = SuffixConfig(min_prob=0.05).build(context).propose(RoundView([make(text)], [16]))
    assert chain.parents is None
    assert draft.expected > chain.expected


def test_it_stops_proposing_where_its_drafts_fail_and_starts_again(make, context, play):
    drafter = SuffixConfig(min_prob=0.2).build(context)
    rng = random.Random(3)
    order = rng.sample(range(100), 100)
    seq = make([token for i in range(100) for token in (i, 100 + i)])
    broken = play(drafter, seq, [token for i in order for token in (i, 200 + i)])  # each pair comes apart
    assert any(broken[:20])
    assert not any(broken[-100:])
    play(drafter, seq, [token for i in range(100) for token in (300 + i, 400 + i)])
    kept = play(drafter, seq, [token for i in order for token in (300 + i, 400 + i)])  # each pair holds
    assert len(kept) <= 120


def test_the_same_history_gives_the_same_drafts(make, context, play):
    coming = [(i * i) % 7 for i in range(200)]
    once, again = (play(SuffixConfig().build(context), make([1, 2, 3]), coming) for _ in range(2))
    assert once == again


def test_rounds_without_it_are_caught_up_with(make, context):
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
    late, early = SuffixConfig(min_prob=0).build(context), SuffixConfig(min_prob=0).build(context)
    seq = make(text[:2])
    early.propose(RoundView([seq], [0]))
    seq.tokens = text
    assert late.propose(RoundView([seq], [8])) == early.propose(RoundView([seq], [8]))


def test_a_long_text_is_indexed_in_bounded_steps(make, context, monkeypatch):
    """Nothing is proposed before all of it is indexed; then the same as from an index made in one go."""
    monkeypatch.setattr(suffix, "MAX_INDEXED", 100)
    text = [1, 2, 3, 4, 5] * 90
    drafter, seq, small = SuffixConfig().build(context), make(text), make(text[:20])
    sizes = []
    for _ in range(4):
        waiting, ready = drafter.propose(RoundView([seq, small], [8, 8]))
        assert waiting is EMPTY
        assert len(ready) == 8
        sizes.append(len(drafter._states[seq.id].index))
    assert sizes == [100, 200, 300, 400]
    monkeypatch.setattr(suffix, "MAX_INDEXED", 10_000)
    at_once = SuffixConfig().build(context)
    assert drafter.propose(RoundView([seq], [8])) == at_once.propose(RoundView([seq], [8])) != [EMPTY]


def test_a_long_answer_is_indexed_in_bounded_steps(make, context, monkeypatch):
    monkeypatch.setattr(suffix, "MAX_INDEXED", 100)
    drafter = SuffixConfig(min_prob=0.01).build(context)
    finished(drafter, make, range(300), salt="a")
    finished(drafter, make, range(500, 510), salt="b")
    sizes = []
    for _ in range(4):
        sizes.append(sum(map(len, drafter._answers.values())))
        drafter.propose(RoundView([], []))
    assert sizes == [200, 301, 301 + 11, 301 + 11]  # each ends with a mark
    drafts = drafter.propose(RoundView([make([297, 298], salt="a"), make([507, 508], salt="b")], [4, 4]))
    assert [draft.tokens for draft in drafts] == [(299,), (509,)]
    assert drafter._cached_tokens == 310


@pytest.mark.parametrize("wrong", [{"k": 0}, {"factor": 0}, {"factor": float("nan")}, {"width": "2"}, {"max_depth": 1}])
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SuffixConfig(**wrong)
