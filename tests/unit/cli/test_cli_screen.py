"""Drawing: nothing a terminal obeys, lines broken between words, colours kept."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from outrider.cli import screen as screens
from outrider.cli.screen import MAX_HELD_CELLS, Screen, WordWrapper, clean, progress_line

PIECES = st.lists(st.tuples(st.text("ab \n", max_size=9), st.sampled_from(["red", "blue"])), max_size=60)


def wrapped(pieces: list[tuple[str, str]], width: int) -> Text:
    wrapper, out = WordWrapper(width), Text()
    for piece, style in pieces:
        out.append_text(wrapper.feed(piece, style))
    return out.append_text(wrapper.flush())


def letters(text: Text) -> list[tuple[str, str]]:
    """Every letter with its colour."""
    return [
        (letter, str(span.style))
        for span in sorted(text.spans, key=lambda span: span.start)
        for letter in text.plain[span.start : span.end]
    ]


@given(st.text())
def test_clean_leaves_nothing_to_obey_and_all_else_alone(text):
    shown = clean(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    harmless = r"[^\x00-\x08\x0b-\x1f\x7f-\x9f]"
    kept = re.findall(harmless, text)
    assert [c for c in re.findall(harmless, shown) if not "\u2400" <= c <= "\u2421" and c != "\ufffd"] == [
        c for c in kept if not "\u2400" <= c <= "\u2421" and c != "\ufffd"
    ]


def test_clean_shows_what_was_there():
    assert clean("a\x1b[31mb\x07\x7f\x9b\r\nc\rd\te") == "a␛[31mb␇␡\ufffd\nc␍d\te"


@given(PIECES)
def test_wrapping_moves_words_and_changes_none(pieces):
    out = wrapped(pieces, 30)
    assert letters(out) == [(c, style) for piece, style in pieces for c in piece if not c.isspace()]
    whole = "".join(piece for piece, _ in pieces)
    if not re.search(rf"\S{{{MAX_HELD_CELLS},}}", whole):
        assert out.plain.split() == whole.split()
        assert all(cell_len(line) <= 30 for line in out.plain.split("\n"))


@given(PIECES)
def test_wrapping_is_the_same_however_the_text_was_cut(pieces):
    whole = "".join(piece for piece, _ in pieces)
    if not re.search(rf"\S{{{MAX_HELD_CELLS},}}", whole):
        assert wrapped(pieces, 30).plain == wrapped([(whole, "red")], 30).plain


def test_lines_that_fit_keep_their_shape():
    code = "def f(x):\n    if x:\n\n        return  1\n"
    assert wrapped([(code, "")], 40).plain == code


def test_a_long_word_does_not_wait_for_its_end():
    wrapper = WordWrapper(40)
    assert wrapper.feed("汉" * 13, "").plain == "汉" * 13
    assert wrapper.feed("字", "").plain == ""
    assert wrapper.flush().plain == "字"


def test_a_line_just_filled_ends_before_its_space():
    assert wrapped([("ab cd ef", "")], 5).plain == "ab cd\nef"


def test_a_word_wider_than_the_line_is_left_to_the_terminal():
    assert wrapped([("ab abcdefghij cd", "")], 8).plain == "ab\nabcdefghij cd"


def test_progress_tells_what_is_left_of_what_this_run_does(monkeypatch, capsys):
    now = 100.0
    monkeypatch.setattr(screens.time, "monotonic", lambda: now)
    tell = progress_line(Screen(), "measured")
    told: list[str] = []
    for done, now in ((4, 100.0), (5, 120.0), (8, 180.0)):  # noqa: B007 - the clock reads it
        tell("more", done, 10)
        told += capsys.readouterr().err.splitlines()
    assert told == [
        "4 of 10 measured, 0 s; now: more",  # by a run before
        "5 of 10 measured, 20 s, about 2 min left; now: more",
        "8 of 10 measured, 80 s, about 40 s left; now: more",
    ]
