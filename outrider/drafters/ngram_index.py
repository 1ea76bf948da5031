"""Where the last tokens of a text occurred before: hash chains over texts that come and go."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Seq

from outrider.core.sampling import Token

END: Token = -1
"""Comes after each finished text. No token is negative, so nothing matches across it."""

MAX_INDEXED = 2048
"""Max tokens of one sequence that a drafter indexes in one round: other sequences wait meanwhile."""

GRAMS = (1, 2, 4, 8)
"""Lengths of the runs looked up. Longer and in-between matches are found by comparing tokens."""


class NgramIndex:
    """The places where runs of tokens occurred, in one growing text or in a queue of finished ones.

    As in deflate: for each run length a table from a run's hash to the last place it
    occurred, and at each place a link to the place before. A place is the position of the
    token that followed the run. Counts are read off the places, so there are none to keep:
    a token costs one entry a run length whatever the text, and dropping the oldest text
    only moves `first`. (A suffix tree bounded to 24 levels makes up to 24 nodes a token.)
    """

    def __init__(self) -> None:
        self.text: list[Token] = []
        self.first = 0
        """Position of text[0]: positions count on when old texts are dropped."""
        self._begin = 0
        """Position where the text now being added began."""
        self._sizes: deque[int] = deque()
        """Lengths of the finished texts, oldest first."""
        self._last: tuple[dict[int, int], ...] = tuple({} for _ in GRAMS)
        """For each run length: hash of a run -> the last place it occurred."""
        self._before: tuple[array[int], ...] = tuple(array("q") for _ in GRAMS)
        """For each run length and place: the place before with the same hash, or -1."""

    def __len__(self) -> int:
        return len(self.text)

    def extend(self, tokens: Seq[Token]) -> None:
        """Add tokens to the current text. A run is entered once it has a follower."""
        text, first = self.text, self.first
        for token in tokens:
            at = len(text)
            inside = at + first - self._begin
            text.append(token)
            for gram, last, before in zip(GRAMS, self._last, self._before, strict=True):
                if gram > inside:
                    before.append(-1)
                else:
                    key = hash(tuple(text[at - gram : at]))
                    before.append(last.get(key, -1))
                    last[key] = at + first

    def finish(self) -> int:
        """End the current text, so that the next tokens begin another; returns the number of its tokens."""
        self.extend((END,))
        end = self.first + len(self.text)
        self._sizes.append(end - self._begin)
        self._begin = end
        return self._sizes[-1] - 1  # END is no token

    def drop_oldest(self) -> int:
        """Forget the oldest finished text and every place in it; returns how many tokens it had."""
        size = self._sizes.popleft()
        for gram, last, before in zip(GRAMS, self._last, self._before, strict=True):
            for at in range(gram, size):
                key = hash(tuple(self.text[at - gram : at]))
                if last.get(key) == at + self.first:
                    del last[key]
            del before[:size]
        del self.text[:size]
        self.first += size
        return size - 1

    def find(self, tail: Seq[Token], longest: int, scan: int) -> dict[int, int]:
        """Places that follow the last tokens of `tail`, each with how many of them it matches.

        For each run length only the `scan` most recent places are looked at, and matches
        are counted up to `longest`.
        """
        found: dict[int, int] = {}
        text, first, back = self.text, self.first, tail[: -longest - 1 : -1]  # the last token first
        for gram, last, before in zip(GRAMS, self._last, self._before, strict=True):
            if gram > len(back):
                break
            place = last.get(hash(tuple(tail[-gram:])), -1)
            left = scan
            while place >= first and left:
                left -= 1
                at = place - first
                if place not in found:
                    match = 0
                    for token in back:
                        if match == at or text[at - 1 - match] != token:
                            break  # hashes may collide
                        match += 1
                    if match:
                        found[place] = match
                place = before[at]
        return found

    def followers(self, places: list[int], path: tuple[Token, ...]) -> dict[Token, list[int]]:
        """The tokens at these places, each with the places that hold it; texts that ended are left out.

        A place may lie beyond the current text, on a drafted `path` that continues it:
        a repetition copies itself.
        """
        text, first, size = self.text, self.first, len(self.text)
        groups: dict[Token, list[int]] = {}
        for place in places:
            at = place - first
            token = text[at] if at < size else path[at - size]
            if token != END:
                groups.setdefault(token, []).append(place)
        return groups
