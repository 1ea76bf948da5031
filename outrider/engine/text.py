"""Ids to text, one token at a time, and where a stop string ends it."""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice, product
from typing import Protocol, cast

from outrider.engine.stop_strings import automaton

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows bytes that are not (yet) a character
MAX_UTF8 = 4  # most bytes in a character, so most tokens one can be spread over
CONTEXT = 5  # ids of the prompt decoded along with the output, so that a first word keeps its space
KEEP, WINDOW, FULL = 5, 9, 64  # ids kept when the window is cut; where cutting starts; where it must succeed


class Detokenizer(Protocol):
    """What turns ids into text, leaving out special tokens."""

    @property
    def own_texts(self) -> Mapping[int, str | bytes] | None:
        """What each token adds to a text, where that is just its bytes: bytes if not of whole characters, or U+FFFD."""
        ...

    def decode(self, ids: list[int], /) -> str: ...


class TextStream:
    """Ids to text, one token at a time: never a broken character, never a character of a stop string.

    All that `push` and `flush` return, put together, is what the output adds to the
    prompt when both are decoded as one. Stop strings are looked for after every token,
    in all text so far: the one that begins first ends the text, and of two that begin
    at the same place, the shorter. A stop string counts where its last character came
    out of a push with `may_stop`; where it began does not matter. One completed
    without `may_stop` is ordinary text for good.
    """

    def __init__(self, tokenizer: Detokenizer, prompt: Seq[int] = (), stop: tuple[str, ...] = ()) -> None:
        self.stopped: str | None = None
        """The stop string that ended the text."""
        texts = tokenizer.own_texts
        self._window = _Window(tokenizer, prompt) if texts is None else _OwnTexts(tokenizer, texts, prompt)
        self._stops = automaton(stop)
        self._state = 0
        self._held = ""  # out of the window, but it could be the beginning of a stop string
        self._shown: list[str] = []
        self._may_stop = True
        self._ended = False

    @property
    def text(self) -> str:
        """Everything shown so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Take the next token; return the text that is now safe to show."""
        self._check_open()
        self._may_stop = may_stop
        new = self._window.push(token)
        return self._show(new if self._stops is None else self._pass(new))

    def push_all(self, tokens: Seq[int]) -> tuple[tuple[str, ...], str]:
        """What `push` returns for each of these, and all of it put together."""
        if self._stops is not None:
            pieces = tuple([self.push(token) for token in tokens])
            return pieces, "".join(pieces)
        self._check_open()
        pieces, text = self._window.push_all(tokens)
        self._show(text)
        return pieces, text

    def flush(self) -> str:
        """End the text and return what was held back: nothing after a stop.

        Bytes that never became a character come out as the tokenizer shows them. Should
        they complete a stop string, it counts as in the last push.
        """
        if self._ended:
            return ""
        ready = self._pass(self._window.flush())
        if self.stopped is None:
            ready += self._held
        self._held, self._ended = "", True
        return self._show(ready)

    def _check_open(self) -> None:
        if self._ended:
            why = f"at the stop string {self.stopped!r}" if self.stopped is not None else "with flush"
            raise RuntimeError(f"this text ended {why}; begin a new TextStream for a new text")

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text

    def _pass(self, new: str) -> str:
        """Look for stop strings in new text; return what is neither one nor could become one."""
        stops, state = self._stops, self._state
        if stops is None:
            return new
        text = self._held + new
        first, length = len(text), 0
        for end, char in enumerate(new, len(self._held) + 1):
            state = stops.step(state, char)
            found = stops.longest[state]
            if found and self._may_stop and end - found < first:
                first, length = end - found, found
        if length:
            self.stopped, self._ended = text[first : first + length], True
            return text[:first]
        self._state = state
        safe = len(text) - stops.hold[state]
        self._held = text[safe:]
        return text[:safe]


class _Window:
    """The last few ids and the text that they decode to, a part of which was returned already.

    Decoding a few ids before the new one gives the new one its context (a space before
    a word, the first bytes of its character) at a cost that does not grow with the text.
    """

    def __init__(self, tokenizer: Detokenizer, prompt: Seq[int]) -> None:
        self._tokenizer, self._decode = tokenizer, tokenizer.decode
        self._ids, unfinished = _context(tokenizer, prompt)
        self._text = self._decode(self._ids)
        self._out = len(self._text)  # how many characters of _text are out
        self._lengths = deque([self._out], MAX_UTF8)  # of _text, after each of the last few tokens
        self._prompt_tail = 0  # unfinished at the prompt's end, and the prompt's unless the output finishes it
        for token in unfinished:
            self.push(token)
        self._prompt_tail = len(self._text) - self._out

    def push(self, token: int) -> str:
        """Take the next token; return the characters that no later token can change."""
        if len(self._ids) > WINDOW:
            self._cut()
        text = self._decode([*self._ids, token])
        if text == self._text and _silent(self._tokenizer, token):
            return ""
        self._ids.append(token)
        self._text = text
        end = len(text)
        self._lengths.append(end)
        if text.endswith(UNFINISHED):
            end = len(text.rstrip(UNFINISHED))
            if len(self._lengths) == MAX_UTF8:
                # Some U+FFFD are meant, or bytes that never made sense. One of the last four tokens ended a
                # character, if anything does; unfinished bytes make the text longer, so the shortest is all finished.
                end = max(end, min(self._lengths))
        return self._release(end) if end > self._out else ""

    def push_all(self, tokens: Seq[int]) -> tuple[tuple[str, ...], str]:
        pieces = tuple(map(self.push, tokens))
        return pieces, "".join(pieces)

    def flush(self) -> str:
        """The rest, finished or not."""
        return self._release(len(self._text))

    @property
    def finished(self) -> bool:
        """All characters so far are whole, and out."""
        return not self._text.endswith(UNFINISHED)

    def _release(self, end: int) -> str:
        """The text up to `end`, less what the prompt's own last bytes decode to."""
        ready = self._text[self._out : end]
        self._out = end
        if not self._prompt_tail:
            return ready
        theirs = min(len(ready) - len(ready.lstrip(UNFINISHED)), self._prompt_tail)
        self._prompt_tail = self._prompt_tail - theirs if theirs == len(ready) else 0
        return ready[theirs:]

    def _cut(self) -> None:
        """Forget the oldest ids, where the rest decodes to the same end of the text.

        A window that begins inside a character shows its first bytes as U+FFFD; with
        byte-fallback tokens it spoils every byte that follows, so the next place is tried.
        """
        left = len(self._text) - self._out
        for keep in range(KEEP, KEEP - MAX_UTF8, -1):
            rest = self._decode(self._ids[-keep:])
            whole = rest.lstrip(UNFINISHED)
            same = whole and self._text.endswith(whole)
            if (same or len(self._ids) >= FULL) and len(rest) >= left:
                gone = len(self._text) - len(rest)
                self._ids, self._text, self._out = self._ids[-keep:], rest, len(rest) - left
                self._lengths = deque((length - gone for length in self._lengths), MAX_UTF8)
                return


class _OwnTexts:
    """What `_Window` does, for tokens whose bytes do not depend on the tokens around them.

    After a whole character, a token of whole characters adds just these.
    """

    def __init__(self, tokenizer: Detokenizer, texts: Mapping[int, str | bytes], prompt: Seq[int]) -> None:
        self._own = texts.__getitem__
        last = next(filter(None, map(self._own, reversed(prompt))), "")
        self._unfinished = None if isinstance(last, str) else _Window(tokenizer, prompt)

    def push(self, token: int) -> str:
        if self._unfinished is None:
            own = self._own(token)
            if isinstance(own, str):
                return own
            self._unfinished = _Bytes(self._own)
        ready = self._unfinished.push(token)
        if self._unfinished.finished:
            self._unfinished = None
        return ready

    def push_all(self, tokens: Seq[int]) -> tuple[tuple[str, ...], str]:
        if self._unfinished is None:
            own = cast("tuple[str, ...]", tuple(map(self._own, tokens)))
            try:
                return own, "".join(own)
            except TypeError:  # bytes among them; to look for these first takes as long as all the rest
                pass
        pieces = tuple(map(self.push, tokens))
        return pieces, "".join(pieces)

    def flush(self) -> str:
        return "" if self._unfinished is None else self._unfinished.flush()


class _Bytes:
    """What `_Window` does, decoding each byte once: keeps the bytes since the last whole character."""

    def __init__(self, own: Callable[[int], str | bytes]) -> None:
        self._own = own
        self._begun = b""  # of a character
        self._held = 0  # U+FFFD that are not out
        self._end = 0  # characters so far, of which none can change
        self._lengths = deque[int](maxlen=MAX_UTF8)  # after each of the last few tokens, with the one begun
        self.finished = False

    def push(self, token: int) -> str:
        own = self._own(token)
        if not own:
            return ""
        data = self._begun + (own.encode() if isinstance(own, str) else own)
        new, used = utf_8_decode(data, "replace")
        self._begun = data[used:]
        if b"\xed\xa0" <= self._begun < b"\xee":  # Python waits for all of a surrogate, which is no character either
            new, self._begun = new + UNFINISHED * 2, b""
        self._end += len(new)
        text = UNFINISHED * self._held + new
        whole = len(text.rstrip(UNFINISHED))
        self.finished = whole == len(text) and not self._begun
        self._lengths.append(self._end + bool(self._begun))
        if len(self._lengths) == MAX_UTF8:  # as in _Window
            whole = max(whole, len(text) - self._end + min(self._lengths))
        self._held = len(text) - whole
        return text[:whole]

    def flush(self) -> str:
        return UNFINISHED * (self._held + bool(self._begun))


def _context(tokenizer: Detokenizer, prompt: Seq[int]) -> tuple[list[int], list[int]]:
    """The end of the prompt: ids that give the output its context, and ids that may leave a character unfinished."""
    with_text = (token for token in reversed(prompt) if not _silent(tokenizer, token))
    ids = list(islice(with_text, CONTEXT + 2 * MAX_UTF8))[::-1]
    head, unfinished = ids, 0
    for unfinished, extra in product(range(MAX_UTF8), range(MAX_UTF8)):
        head = ids[: len(ids) - unfinished][-(CONTEXT + extra) :]
        text = tokenizer.decode(head)
        if not text.startswith(UNFINISHED) and not text.endswith(UNFINISHED):
            break
    return head, ids[len(ids) - unfinished :]


def _silent(tokenizer: Detokenizer, token: int) -> bool:
    """Whether a token has no text at all."""
    return not tokenizer.decode([token, token])  # twice: one space at the beginning decodes to nothing, too
