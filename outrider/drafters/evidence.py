"""Guesses: drafts that were not scored, kept until the text shows how many of their tokens were right."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Evidence

_MAX_JUDGED = 256
"""Max judged guesses that are kept until `take`; the oldest are dropped where nobody takes them."""
_MAX_OPEN = 16
"""Max guesses of a sequence that are kept until the text decides them: about as many as a guess has tokens."""


class _Guess(NamedTuple):
    seq: Sequence
    start: int
    """The position of its first token."""
    tokens: Seq[Token]
    committed: int
    """As of `Evidence`."""

    def judge(self) -> Evidence | None:
        """None: the text does not decide it yet."""
        text = self.seq.tokens[self.start : self.start + len(self.tokens)]
        right = next((i for i, (a, b) in enumerate(zip(self.tokens, text, strict=False)) if a != b), len(text))
        if right == len(text) < len(self.tokens):
            return None
        return Evidence(self.seq.id, max(1, len(self.tokens)), right, self.committed)


class OpenGuesses:
    """Guesses by sequence."""

    def __init__(self) -> None:
        self._open: dict[int, list[_Guess]] = {}
        self._judged = deque[Evidence](maxlen=_MAX_JUDGED)

    def note(self, seq: Sequence, start: int, tokens: Seq[Token], committed: int = 1) -> None:
        """Keep tokens guessed to follow from position `start` on. Empty: no match was found."""
        guesses = self._open.setdefault(seq.id, [])
        if len(guesses) < _MAX_OPEN:
            guesses.append(_Guess(seq, start, tokens, committed))

    def judge(self, seq_id: int, length: int, right: int, committed: int = 1) -> None:
        """Note a guess that is judged already: how many tokens it had, and how many were right."""
        self._judged.append(Evidence(seq_id, max(1, length), right, committed))

    def take(self) -> list[Evidence]:
        """The guesses decided since the last call. One without tokens counts as one token that was wrong."""
        judged = [*self._judged]
        self._judged.clear()
        for seq_id, guesses in list(self._open.items()):
            found = [guess.judge() for guess in guesses]
            judged += [each for each in found if each is not None]
            left = [guess for guess, each in zip(guesses, found, strict=True) if each is None]
            if left:
                self._open[seq_id] = left
            else:
                del self._open[seq_id]
        return judged

    def forget(self, seq_id: int) -> None:
        self._open.pop(seq_id, None)
