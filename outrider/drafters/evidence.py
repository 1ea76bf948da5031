"""Guesses: drafts that were not scored, kept until the text shows how many of their tokens were right."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq

from outrider.core.sampling import Token
from outrider.core.sequence import Sequence
from outrider.drafters.base import Evidence

_MAX_JUDGED = 256
"""Max judged guesses that are kept until `take`; the oldest are dropped where nobody takes them."""


class OpenGuesses:
    """At most one guess for each sequence."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[Sequence, int, Seq[Token]]] = {}
        self._judged = deque[Evidence](maxlen=_MAX_JUDGED)

    def note(self, seq: Sequence, start: int, tokens: Seq[Token]) -> None:
        """Keep tokens guessed to follow from position `start` on, unless a guess is open. Empty: no match was found."""
        self._open.setdefault(seq.id, (seq, start, tokens))

    def judge(self, seq_id: int, length: int, right: int) -> None:
        """Note a guess that is judged already, unless one is open: how many tokens it had, and how many were right."""
        if seq_id not in self._open:
            self._judged.append(Evidence(seq_id, max(1, length), right))

    def take(self) -> list[Evidence]:
        """The guesses decided since the last call. One without tokens counts as one token that was wrong."""
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
