"""The page pool against a naive model of it: who owns what, what is shared, what is left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import OutriderError
from outrider.kvcache.pages import PagePool

SIZE = 4


def pool(count: int = 8, **kw) -> PagePool:
    return PagePool(count, SIZE, **kw)


def test_a_sequence_gets_pages_in_a_row():
    p = pool()
    p.open(1, [1, 2, 3])
    assert p.reserve(1, 3 * SIZE)
    assert p.table(1) == [0, 1, 2]
    p.check()


def test_two_growing_sequences_both_stay_in_a_row():
    p = pool(16)
    for seq in (1, 2):
        p.open(seq, [seq])
        assert p.reserve(seq, 1)
    for length in range(2, 5 * SIZE):
        assert p.reserve(1, length)
        assert p.reserve(2, length)
    for seq in (1, 2):
        table = p.table(seq)
        assert table == list(range(table[0], table[0] + 5))
    p.check()


@pytest.mark.parametrize(("count", "room"), [(300, 64), (60, 16), (20, 4)])
def test_a_new_run_leaves_room_to_the_one_before(count: int, room: int):
    """As much as it has itself at least, and the most of 64, 16 and 4 pages that there is room for."""
    pool = PagePool(count, 16)
    pool.open(0, ())
    pool.reserve(0, 16)
    pool.open(1, ())
    pool.reserve(1, 16)
    assert (pool.table(0), pool.table(1)) == ([0], [1 + room])
    pool.reserve(0, 16 * room)
    pool.reserve(1, 16 * room)
    assert pool.table(0) == list(range(room))
    assert pool.table(1) == list(range(1 + room, 1 + 2 * room))


def test_reserve_is_all_or_nothing():
    p = pool(3)
    p.open(1, [1])
    assert not p.reserve(1, 3 * SIZE + 1)
    assert p.table(1) == []
    assert p.free == 3


def test_ahead_takes_at_most_half_of_what_is_free():
    p = pool(8)
    p.open(1, [1])
    p.reserve_ahead(1, 2 * SIZE)
    assert len(p.table(1)) == 2
    p.reserve_ahead(1, SIZE)
    assert len(p.table(1)) == 2
    p.reserve_ahead(1, 100 * SIZE)
    assert len(p.table(1)) == 5
    p.check()


def test_a_published_prefix_is_found_and_never_the_whole_text():
    p = pool()
    text = list(range(2 * SIZE))
    p.open(1, text)
    p.reserve(1, len(text))
    p.publish(1, text, len(text))
    assert p.open(2, text) == SIZE  # the last token must be read, so its page is not shared
    assert p.open(3, [*text, 9]) == 2 * SIZE
    assert p.table(3) == p.table(1)
    assert p.open(4, [7, *text]) == 0
    p.check()


def test_text_survives_its_owner_until_the_room_is_needed():
    p = pool(2)
    text = list(range(SIZE + 1))
    p.open(1, text)
    p.reserve(1, len(text))
    p.publish(1, text, SIZE)
    p.close(1)
    assert (p.free, p.used) == (2, 0)
    assert p.open(2, text) == SIZE
    p.close(2)
    p.open(3, [50])
    assert p.reserve(3, 2 * SIZE)  # evicts the cached page too
    p.close(3)
    assert p.open(4, text) == 0
    p.check()


def test_salts_never_share():
    p = pool()
    text = list(range(SIZE + 1))
    p.open(1, text, "alice")
    p.reserve(1, len(text))
    p.publish(1, text, SIZE)
    assert p.open(2, text, "bob") == 0
    assert p.open(3, text, "alice") == SIZE


def test_untrusted_text_is_not_shared_after_close():
    p = pool()
    text = list(range(SIZE + 1))
    p.open(1, text)
    p.reserve(1, len(text))
    p.publish(1, text, SIZE)
    p.close(1, unpublish=True)
    assert p.open(2, text) == 0
    p.check()


def test_the_check_notices_a_lost_page():
    p = pool()
    p.open(1, [1])
    p.reserve(1, 1)
    p.table(1).pop()
    with pytest.raises(OutriderError, match="owners"):
        p.check()


words = st.lists(st.integers(0, 1), min_size=1, max_size=5 * SIZE)
steps = st.lists(
    st.tuples(st.sampled_from(["open", "reserve", "ahead", "trim", "publish", "close"]), st.integers(0, 3), words),
    max_size=60,
)


@given(steps)
@settings(max_examples=200, deadline=None)
def test_pages_are_never_lost_doubled_or_wrongly_shared(plan):
    p = pool(10)
    written: dict[int, tuple[int, ...]] = {}  # page -> the text up to its end, when last published
    texts: dict[int, list[int]] = {}
    committed: dict[int, int] = {}
    for verb, seq, text in plan:
        if verb == "open" and seq not in texts:
            cached = p.open(seq, text)
            texts[seq], committed[seq] = text, cached
            assert cached < len(text)
            for i, page in enumerate(p.table(seq)):
                assert written[page] == tuple(text[: (i + 1) * SIZE])
        elif seq not in texts:
            continue
        elif verb == "reserve":
            before, free = list(p.table(seq)), p.free
            fits = p.reserve(seq, len(texts[seq]))
            missing = max(0, -(-len(texts[seq]) // SIZE) - len(before))
            assert fits == (missing <= free)
            assert p.table(seq)[: len(before)] == before
        elif verb == "ahead":
            before, free = list(p.table(seq)), p.free
            p.reserve_ahead(seq, len(text))
            assert p.table(seq)[: len(before)] == before
            assert p.free >= free - free // 2
        elif verb == "trim":
            p.trim(seq, max(committed[seq], len(text)))
        elif verb == "publish":
            covered = min(len(p.table(seq)) * SIZE, len(texts[seq]) - 1)
            committed[seq] = max(committed[seq], covered)
            for i in range(committed[seq] // SIZE):
                written[p.table(seq)[i]] = tuple(texts[seq][: (i + 1) * SIZE])
            p.publish(seq, texts[seq], committed[seq])
        else:
            p.close(seq)
            del texts[seq], committed[seq]
        p.check()
    for seq in list(texts):
        p.close(seq)
    p.check()
    assert p.used == 0
