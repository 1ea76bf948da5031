"""TextStream against whole-text decoding and naive search, for three kinds of tokenizer and any split."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from outrider.core.errors import RequestError
from outrider.engine.text import TextStream
from outrider.models.token_bytes import OwnTexts

FIXED = {"deadline": None, "derandomize": True}
FFFD = "\N{REPLACEMENT CHARACTER}"
PICKS = [
    *"aab c\n.",
    " ",
    "é",
    "e\u0301",
    "ß",
    "中",
    "文",
    "한",
    "€",
    "👍🏽",
    "👩\u200d👩\u200d👧",
    "\U0001f600",
    "𝔘",
    "\u200d",
    "▁",
]


class Rust:
    """A `tokenizers` tokenizer as Outrider decodes with it, with a count of the ids it was asked to decode."""

    own_texts: OwnTexts | None = None

    def __init__(self, backend: Tokenizer) -> None:
        self.backend, self.asked = backend, 0
        self.special = backend.token_to_id("<s>")

    def decode(self, ids: list[int], /) -> str:
        self.asked += len(ids)
        return self.backend.decode(ids, skip_special_tokens=True)


class RustByToken(Rust):
    """The same, and it says what each token adds to a text."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__(backend)
        self.own_texts = OwnTexts(backend)


def byte_level() -> Rust:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    backend.train_from_iterator(["the cat and the hat 中文中文 👍 café naïve the the"] * 4, trainer)
    return Rust(backend)


def sentencepiece(*, strip: bool) -> Rust:
    """Llama's decoder (strip) or Gemma's: words with a space mark, single bytes for the rest."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "a", "b", "c", ".", "▁a", "▁ab", "ab", "▁▁", "\n", "é", "中", FFFD]
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab"), ("▁", "▁")]
    backend = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, byte_fallback=True))
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>", "</s>")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return Rust(backend)


def metaspace() -> Rust:
    vocab = [("<unk>", 0.0), ("<s>", 0.0), *((p, -1.0) for p in ["▁", "a", "b", "c", "▁a", "▁ab", "é", "中", "👍"])]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0))
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", "<s>")])
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return Rust(backend)


BYTES, LLAMA, GEMMA, META = byte_level(), sentencepiece(strip=True), sentencepiece(strip=False), metaspace()
BY_TOKEN = RustByToken(BYTES.backend)
BYTE_IDS = {v: k for k, v in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
KINDS = pytest.mark.parametrize(
    "tok", [BYTES, BY_TOKEN, LLAMA, GEMMA, META], ids=["byte-level", "by-token", "llama", "gemma", "metaspace"]
)


class Pieces:
    """A byte-level decoder whose tokens are arbitrary byte strings, handed to it as their places in a list."""

    own_texts = None

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: list[int], /) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


def all_of(stream: TextStream, ids: list[int]) -> list[str]:
    return [*(stream.push(i) for i in ids), stream.flush()]


texts = st.lists(
    st.sampled_from(PICKS) | st.characters(exclude_categories=["Cs"], exclude_characters=[FFFD]), max_size=40
).map("".join)
meant = st.lists(st.sampled_from([*PICKS, FFFD, FFFD * 3]), max_size=30).map(
    lambda picks: re.sub(FFFD + "{12,}", FFFD * 12, "".join(picks))
)


@st.composite
def cut_bytes(draw: st.DrawFn, source: st.SearchStrategy[str] = texts) -> list[bytes]:
    """A text's bytes, cut anywhere: inside characters, several characters to a piece."""
    data = draw(source).encode()
    cuts = draw(st.sets(st.integers(1, max(1, len(data) - 1)))) if data else set()
    ends = [0, *sorted(c for c in cuts if c < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


def ids_of(tok: Rust) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, tok.backend.get_vocab_size() - 1), max_size=60)


def byte_fallback_ids(tok: Rust, text: str, draw: st.DrawFn) -> list[int]:
    """Ids of a text: a piece where there is one and the draw says so, else the character's bytes."""
    ids: list[int] = []
    for char in text.replace("▁", "_").replace(" ", "▁"):
        piece = tok.backend.token_to_id(char)
        if piece is not None and (char == "▁" or draw(st.booleans())):
            ids.append(piece)
        else:
            ids += [tok.backend.token_to_id(f"<0x{b:02X}>") for b in char.encode()]
    return ids


@given(cut_bytes())
@settings(max_examples=300, **FIXED)
@example([b"\xe2", b"\x82", b"\xac\xe2", b"\x82", b"\xac\xe2", b"\x82", b"\xac"])
def test_any_split_of_any_text_comes_back_whole(pieces):
    full = b"".join(pieces).decode()
    stream, shown, seen = TextStream(Pieces(pieces)), "", b""
    for i, piece in enumerate(pieces):
        shown += stream.push(i)
        seen += piece
        assert shown == seen.decode(errors="ignore")  # everything up to the last whole character, at once
    assert shown + stream.flush() == full == stream.text


@given(cut_bytes(meant))
@settings(max_examples=300, **FIXED)
def test_a_replacement_character_that_is_meant_comes_out_and_holds_up_little(pieces):
    full = b"".join(pieces).decode()
    stream = TextStream(Pieces(pieces))
    for i in range(len(pieces)):
        stream.push(i)
        assert full.startswith(stream.text)
        due = b"".join(pieces[: max(0, i - 2)]).decode(errors="ignore")  # whole three tokens ago: out by now
        assert stream.text.startswith(due)
    stream.flush()
    assert stream.text == full


def encoded(tok: Rust, text: str, draw: st.DrawFn) -> list[int]:
    """The text's ids, with a few special tokens strewn in, which have no text wherever they are."""
    ids = tok.backend.encode(text, add_special_tokens=False).ids
    for place in draw(st.lists(st.integers(0, len(ids)), max_size=4)):
        ids.insert(place, tok.special)
    return ids


@KINDS
@given(data=st.data())
@settings(max_examples=100, **FIXED)
def test_pushed_and_flushed_text_is_the_decoded_whole(tok, data):
    ids = encoded(tok, data.draw(texts | meant), data.draw)
    stream = TextStream(tok)
    assert "".join(all_of(stream, ids)) == stream.text == tok.decode(ids)


@KINDS
@given(data=st.data())
@settings(max_examples=100, **FIXED)
def test_tokens_pushed_at_once_are_pushed_one_by_one(tok, data):
    ids = encoded(tok, data.draw(texts | meant), data.draw)
    stop = data.draw(st.sampled_from([(), ("never here",)]))
    one_by_one, at_once = TextStream(tok, (), stop), TextStream(tok, (), stop)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(0, len(ids))))), len(ids)]
    for a, b in pairwise(cuts):
        pieces = tuple(one_by_one.push(token) for token in ids[a:b])
        assert at_once.push_all(ids[a:b]) == (pieces, "".join(pieces))
        assert at_once.text == one_by_one.text
    assert at_once.flush() == one_by_one.flush()
    with pytest.raises(RuntimeError, match="ended with flush"):
        at_once.push_all([0])


@KINDS
@given(data=st.data())
@settings(max_examples=150, **FIXED)
def test_the_output_is_what_it_adds_to_the_prompt(tok, data):
    ids = encoded(tok, data.draw(texts), data.draw)
    cut = data.draw(st.integers(0, len(ids)))
    with_text = [i for i in ids[:cut] if i != tok.special]
    # What the prompt finished: up to three of its last tokens may have begun a character.
    finished = max((tok.decode(with_text[: len(with_text) - n]).rstrip(FFFD) for n in range(4)), key=len)
    shown = "".join(all_of(TextStream(tok, ids[:cut]), ids[cut:]))
    assert finished + shown == tok.decode(ids)


@pytest.mark.parametrize("tok", [LLAMA, GEMMA], ids=["llama", "gemma"])
@given(data=st.data())
@settings(max_examples=250, **FIXED)
def test_bytes_of_characters_come_back_whole_from_byte_fallback_tokens(tok, data):
    ids = byte_fallback_ids(tok, data.draw(meant if data.draw(st.booleans()) else texts), data.draw)
    stream, full = TextStream(tok), tok.decode(ids)
    for i in ids:
        stream.push(i)
        assert full.startswith(stream.text)
    stream.flush()
    assert stream.text == full


@pytest.mark.parametrize("tok", [BYTES, BY_TOKEN], ids=["byte-level", "by-token"])
@given(ids_of(BYTES), st.integers(0, 20))
@settings(max_examples=300, **FIXED)
def test_bytes_that_make_no_sense_are_shown_as_byte_level_decoding_shows_them(tok, ids, cut):
    before, full = tok.decode(ids[:cut]), tok.decode(ids)
    shown = "".join(all_of(TextStream(tok, ids[:cut]), ids[cut:]))
    # Where the output made a character of the prompt's last bytes, it belongs to the output.
    assert (before if full.startswith(before) else before[:-1]) + shown == full


@KINDS
@given(data=st.data())
@settings(max_examples=100, **FIXED)
def test_whatever_the_ids_no_text_is_lost_and_nothing_stalls(tok, data):
    ids = data.draw(ids_of(tok))
    shown, full = "".join(all_of(TextStream(tok), ids)), tok.decode(ids)
    if FFFD not in full:
        assert shown == full
    rest = iter(shown)
    assert all(char in rest for char in full if char != FFFD)  # in order; a wrong byte costs no other character


def test_a_character_over_four_tokens_comes_at_once_and_whole():
    pieces = Pieces([b"\xf0", b"\x9f", b"\x98", b"\x80", b"a"])
    assert all_of(TextStream(pieces), [0, 1, 2, 3, 4]) == ["", "", "", "\U0001f600", "a", ""]


def test_an_unfinished_tail_comes_out_at_flush_as_the_tokenizer_shows_it():
    assert all_of(TextStream(Pieces([b"ok \xe2\x82"])), [0]) == ["ok ", FFFD]
    tail = [LLAMA.backend.token_to_id(t) for t in ("a", "<0xE2>", "<0x82>")]
    assert all_of(TextStream(LLAMA), tail) == ["a", "", "", FFFD * 2]


def test_replacement_characters_never_stall_the_text():
    stream = TextStream(Pieces([FFFD.encode()]))
    lengths = [len(stream.push(0)) for _ in range(200)]
    assert sum(lengths) == 197  # only the last three could still be something else
    assert stream.flush() == FFFD * 3


@pytest.mark.parametrize("tok", [LLAMA, META], ids=["llama", "metaspace"])
@pytest.mark.parametrize("specials", [0, 1, 40])
def test_the_first_word_keeps_its_space_after_a_prompt_and_loses_it_without(tok, specials):
    a, ab = tok.backend.token_to_id("▁a"), tok.backend.token_to_id("▁ab")
    assert "".join(all_of(TextStream(tok, [tok.special] * specials), [ab, a])) == "ab a"
    assert "".join(all_of(TextStream(tok, [a, *[tok.special] * specials]), [ab, a])) == " ab a"


def test_a_character_begun_in_the_prompt_is_shown_when_the_output_finishes_it():
    pieces = Pieces([b"price: 5 ", b"\xe2\x82", b"\xac!", b"x"])
    assert "".join(all_of(TextStream(pieces, [0, 1]), [2, 3])) == "€!x"
    assert "".join(all_of(TextStream(pieces, [0, 1]), [3])) == "x"  # it stayed unfinished: the prompt's
    euro = [LLAMA.backend.token_to_id(f"<0x{b:02X}>") for b in "é€".encode()]
    assert "".join(all_of(TextStream(LLAMA, euro[:3]), euro[3:])) == "€"


@KINDS
def test_the_cost_of_a_token_does_not_grow_with_the_text(tok):
    """Counted in ids decoded, which does not depend on the machine; garbage and special tokens included."""
    size = tok.backend.get_vocab_size()
    sane = tok.backend.encode("the cat ab é中a. 👍" * 300, add_special_tokens=False).ids
    wild = [(i * 7919 + 3) % size for i in range(3000)]
    for ids in (sane, wild, [tok.special] * 3000, [size - 1] * 3000):
        stream = TextStream(tok, ids)  # a prompt as long as the output
        tok.asked, most = 0, 0
        for token in ids:
            before = tok.asked
            stream.push(token)
            most = max(most, tok.asked - before)
        assert most <= 128
        assert tok.asked <= (16 if ids is sane else 64) * len(ids)


# --- texts of tokens by themselves, against the window ---------------------------------------------------------------


EDGES = [bytes([i]) for i in b"\x80\x8f\x90\x9f\xa0\xbd\xbf\xc2\xe0\xe2\xed\xef\xf0\xf4\xf5"]
"""Bytes at which it is decided whether a character can still become whole."""


def with_added_tokens() -> tuple[Rust, list[list[int]]]:
    """A byte-level tokenizer with added tokens, and what a text may be made of: ids that belong together."""
    backend = byte_level().backend
    backend.add_tokens(["<tool>", "é", "中 文", FFFD, f"a{FFFD}b", "  ", "ÿĀ"])  # some are bytes to the decoder
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    size = backend.get_vocab_size()
    words = [backend.encode(text, add_special_tokens=False).ids for text in [*PICKS, "the cat", " naïve", "👍", FFFD]]
    own = OwnTexts(backend)
    edges = [[i] for i in range(size) if own[i] in EDGES]
    return Rust(backend), [*words, *edges * 20, *([i] for i in range(size)), [size], [size + 70]]  # two have no token


WINDOWED, PARTS = with_added_tokens()


@pytest.mark.parametrize("wild", [0.0, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("stops", [(), ("at", "e c", "中👍", FFFD, f"{FFFD}a", "  ")], ids=["no-stops", "stops"])
def test_texts_of_tokens_by_themselves_come_out_as_those_of_the_window(wild: float, stops: tuple[str, ...]):
    """Token by token: broken bytes, characters over several tokens, prompts that end inside one, silent tokens."""
    by_token = RustByToken(WINDOWED.backend)
    for seed in range(150):
        rng = random.Random(seed)
        words, ids = PARTS[: len(PICKS) + 4], list[int]()
        while len(ids) < 120:
            ids += rng.choice(PARTS if rng.random() < wild else words)
        cut = rng.choice((0, rng.randrange(40)))
        kept = tuple(rng.sample(stops, rng.randint(0, 3) if stops else 0))
        window, fast = (TextStream(tok, ids[:cut], kept) for tok in (WINDOWED, by_token))
        while cut < len(ids) and window.stopped is None:
            count, may_stop = rng.randint(1, 6), rng.random() < 0.5
            if kept:
                assert fast.push(ids[cut], may_stop=may_stop) == window.push(ids[cut], may_stop=may_stop)
                count = 1
            else:
                pieces = tuple(window.push(i) for i in ids[cut : cut + count])
                assert fast.push_all(ids[cut : cut + count]) == (pieces, "".join(pieces))
            cut += count
            assert (fast.text, fast.stopped) == (window.text, window.stopped)
        assert (fast.flush(), fast.text, fast.stopped) == (window.flush(), window.text, window.stopped)


def test_whole_characters_after_whole_characters_are_not_decoded_again():
    ids = [i for word in ("the cat", " and", " the", " hat") for i in BYTES.backend.encode(word).ids] * 5
    stream = TextStream(BY_TOKEN, ids)
    shown, BY_TOKEN.asked = stream.push_all(ids), 0
    assert stream.push_all(ids) == shown
    assert BY_TOKEN.asked == 0


# --- stop strings -------------------------------------------------------------------------------------------------

letters = st.text("ab", min_size=3, max_size=30)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=6), max_size=4).map(tuple)


def naive_stop(text: str, stops: tuple[str, ...], barred: int = 0) -> tuple[int, str] | None:
    """Where and which: the first place of a stop string that ends beyond `barred`, then the shortest."""
    return min(
        ((i, s) for i in range(len(text)) for s in stops if text.startswith(s, i) and i + len(s) > barred),
        key=lambda each: (each[0], len(each[1])),
        default=None,
    )


def could_begin(tail: str, stops: tuple[str, ...]) -> bool:
    return any(s.startswith(tail) and s != tail for s in stops)


@given(cut_bytes(letters) | cut_bytes(texts), stop_lists, st.integers(0, 12))
@settings(max_examples=600, **FIXED)
@example([b"ab", b"a"], ("bb", "aba", "b"), 0)
@example([b"abb"], ("abb", "ab"), 0)
@example([b"a", b"a", b"a"], ("aa",), 2)
def test_stop_strings_end_the_text_where_naive_search_says(pieces, stops, quiet):
    """Judge: after every token, search the whole text; nothing is shown that could still begin a stop string."""
    stream, seen, barred = TextStream(Pieces(pieces), (), stops), "", 0
    for i in range(len(pieces)):
        stream.push(i, may_stop=i >= quiet)
        seen = b"".join(pieces[: i + 1]).decode(errors="ignore")
        if i < quiet:
            barred = len(seen)
        hit = naive_stop(seen, stops, barred)
        if hit is not None:
            assert (stream.text, stream.stopped) == (seen[: hit[0]], hit[1])
            assert stream.flush() == ""
            assert stream.text == seen[: hit[0]]
            with pytest.raises(RuntimeError, match="ended at the stop string"):
                stream.push(0)
            return
        held = next((seen[k:] for k in range(len(seen)) if could_begin(seen[k:], stops)), "")
        assert stream.stopped is None
        assert stream.text == seen[: len(seen) - len(held)]  # exactly the longest tail that could begin one
    stream.flush()
    assert (stream.text, stream.stopped) == (b"".join(pieces).decode(), None)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stopped"),
    [
        (["one ST", "O", "P two"], ("STOP",), "one ", "STOP"),
        (["xabcd"], ("bc", "abcd"), "x", "abcd"),  # begins first, though listed last and ends last
        (["xab", "cd"], ("abcd", "ab"), "x", "ab"),  # begins at the same place: the shorter
        (["xabcd"], ("abcd", "ab"), "x", "ab"),
        (["xab", "y"], ("abc", "b"), "xa", "b"),  # inside one that does not come about
        (["\n", "\n", "Q:"], ("\n\nQ", "Q:"), "", "\n\nQ"),
        (["aab", "aac"], ("aabaad", "aaaa"), "aabaac", None),
        (["héé", "é"], ("éé",), "h", "éé"),
    ],
)
def test_stop_string_cases(pieces, stops, shown, stopped):
    stream = TextStream(Pieces([p.encode() for p in pieces]), (), stops)
    for i in range(len(pieces)):
        if stream.stopped is None:
            stream.push(i)
    stream.flush()
    assert (stream.text, stream.stopped) == (shown, stopped)


def test_the_prompt_is_no_part_of_a_stop_string():
    stream = TextStream(Pieces([b"ST", b"OP", b"!"]), [0], ("STOP",))
    assert all_of(stream, [1, 2]) == ["OP", "!", ""]


def test_a_stop_string_completed_before_stopping_was_allowed_stays_text():
    stream = TextStream(Pieces([b"ab", b"x", b"a", b"b"]), (), ("ab", "abc"))
    assert stream.push(0, may_stop=False) == ""  # it could still become "abc"
    assert stream.push(1) == "abx"
    assert stream.push(2, may_stop=False) == ""
    assert stream.push(3) == ""  # begun before, completed after: it counts
    assert (stream.text, stream.stopped) == ("abx", "ab")


def test_a_stop_string_of_replacement_characters_counts_even_at_flush():
    stream = TextStream(Pieces([b"a", FFFD.encode()]), (), (FFFD,))
    assert all_of(stream, [0, 1]) == ["a", "", ""]
    assert stream.stopped == FFFD


def test_pushing_after_flush_is_an_error_and_flush_says_things_once():
    stream = TextStream(Pieces([b"a"]), (), ("ab",))
    assert (stream.push(0), stream.flush(), stream.flush()) == ("", "a", "")
    with pytest.raises(RuntimeError, match="ended with flush"):
        stream.push(0)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="stop string is empty"):
        TextStream(Pieces([b"a"]), (), ("a", ""))
