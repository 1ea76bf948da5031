"""Drafts that were not scored, kept until the text has judged them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Evidence

_MAX_JUDGED = 256
"""Guesses that are judged and not taken yet: where nobody asks for them the oldest are dropped."""


class OpenGuesses:
    """At most one guess for each sequence."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Sequence, int, Seq[Token]]] = {}
        self._judged = deque[Evidence](maxlen=_MAX_JUDGED)

    def note(self, seq: Sequence, start: int, tokens: Seq[Token]) -> None:
        """Keep tokens guessed to stand from position `start` on, unless a guess is open. None: nothing was found."""
        self._open.setdefault(seq.id, (seq, start, tokens))

    def judge(self, seq_id: int, length: int, right: int) -> None:
        """As `note` of a guess that is judged already: how many tokens it had, and how many of them came."""
        if seq_id not in self._open:
            self._judged.append(Evidence(seq_id, max(1, length), right))

    def take(self) -> list[Evidence]:
        """The guesses that the text has judged since the last call. One of no tokens is a token that did not come."""
        judged = [*self._judged]
        self._judged.clear()
        for seq_id, (seq, start, tokens) in list(self._open.items()):
            text = seq.tokens[start : start + len(tokens)]
            right = next((i for i, (a, b) in enumerate(zip(tokens, text, strict=False)) if a != b), len(text))
            if right < len(text) or len(text) == len(tokens):
                judged.append(Evidence(seq_id, max(1, len(tokens)), right))
                del self._open[seq_id]
        return judged

    def forget(self, seq_id: int) -> None:
        self._open.pop(seq_id, None)
