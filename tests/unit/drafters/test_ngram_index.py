"""The index of occurrences, against counting by hand."""

import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafters import ngram_index
from outrider.drafters.ngram_index import END, GRAMS, NgramIndex

texts = st.lists(st.integers(0, 2), max_size=30)
LONGEST = 12


def common_suffix(a, b):
    n = 0
    while n < min(len(a), len(b), LONGEST) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def by_hand(finished, tail, first=0):
    """Every place in these texts that follows the end of `tail`, with how far it matches."""
    found = {}
    for text in finished:
        for place in range(1, len(text)):
            if match := common_suffix(text[:place], tail):
                found[first + place] = match
        first += len(text)
    return found


@given(texts, st.data())
@settings(max_examples=150, deadline=None)
def test_one_growing_text(text, data):
    index = NgramIndex()
    size = 0
    while size < len(text):
        grown = data.draw(st.integers(size + 1, len(text)))
        index.extend(text[size:grown])
        size = grown
        assert index.find(text[:size], LONGEST, 10_000) == by_hand([text[:size]], text[:size])


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), max_size=8), texts, st.data())
@settings(max_examples=150, deadline=None)
def test_finished_texts_come_and_go(finished, tail, data):
    index, kept, dropped = NgramIndex(), [], 0
    for text in finished:
        index.extend(text)
        index.finish()
        kept.append([*text, END])
        while kept and data.draw(st.booleans()):
            assert index.drop_oldest() == len(kept[0]) - 1
            dropped += len(kept.pop(0))
        found = index.find(tail, LONGEST, 10_000)
        assert found == by_hand(kept, tail, dropped)
        for length in set(found.values()):
            groups = index.followers([p for p, match in found.items() if match >= length], ())
            assert {token: len(places) for token, places in groups.items()} == count(kept, tail[-length:])
    while kept:
        index.drop_oldest()
        kept.pop()
    assert len(index) == sum(map(len, index._last)) == 0
    assert index.find(tail, LONGEST, 10_000) == {}


def count(finished, run):
    """What followed `run` in these texts, and how often."""
    followers = Counter()
    for text in finished:
        for start in range(len(text) - len(run)):
            if text[start : start + len(run)] == run:
                followers[text[start + len(run)]] += 1
    followers.pop(END, None)
    return dict(followers)


@given(texts, st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_only_the_most_recent_are_scanned(text, scan):
    index = NgramIndex()
    index.extend(text)
    everywhere = by_hand([text], text)
    expected = {}
    for gram in GRAMS:
        recent = sorted((p for p, match in everywhere.items() if match >= gram), reverse=True)[:scan]
        expected |= {place: everywhere[place] for place in recent}
    assert index.find(text, LONGEST, scan) == expected


def test_colliding_hashes_change_nothing(monkeypatch):
    text = [1, 2, 1, 3, 1, 2, 1, 2, 0, 1, 2]
    monkeypatch.setattr(ngram_index, "hash", lambda run: 0, raising=False)
    index = NgramIndex()
    index.extend(text)
    index.finish()
    index.extend(text)
    expected = by_hand([[*text, END], text], text)
    assert index.find(text, LONGEST, 10_000) == expected
    assert math.prod(expected.values()) > 1
    index.drop_oldest()
    assert index.find(text, LONGEST, 10_000) == by_hand([text], text, len(text) + 1)


def test_a_place_beyond_the_text_reads_the_draft():
    index = NgramIndex()
    index.extend([5, 6, 5, 6])
    assert index.followers([2], ()) == {5: [2]}
    assert index.followers([4], (7,)) == {7: [4]}
