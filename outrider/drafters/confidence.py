"""How far a guess by repetition can be trusted: a measured prior, corrected by what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core import Token

DOUBT = (0.8, 0.7, 0.5, 0.36, 0.2, 0.1, 0.05, 0.03)
"""By grade: chance that a token which once followed such a match does not follow it again."""
_MOST_SEEN = 8
_PRIOR = 6.0
"""The correction starts at 1 with the weight of this many tokens,"""
_KEEP = 1 - 1 / 48
"""and remembers about 48."""
_SURE = 0.99


def grade(match: int) -> int:
    """Match lengths 0, 1, 2, 3-4, 5-8, 9-16, 17-32, and more, as 0 to 7."""
    return min((match - 1).bit_length() + 1, len(DOUBT) - 1) if match > 0 else 0


_CLAIMS = tuple(tuple(1 - doubt**seen for seen in range(_MOST_SEEN + 1)) for doubt in DOUBT)


def claim(match: int, votes: int, seen: int) -> float:
    """Chance that a token comes next which followed in `votes` of `seen` earlier occurrences.

    Each occurrence of the match leaves only a part of the doubt the one before it left.
    """
    return votes / seen * _CLAIMS[grade(match)][min(seen, _MOST_SEEN)]


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens guessed to follow a match, proposed or not, and how likely each was said to be."""

    start: int
    """Place in the text of the first of them."""
    match: int
    tokens: tuple[Token, ...]
    claims: tuple[float, ...]


class Confidence:
    """For each grade of match, the ratio of guesses that came true to guesses claimed to.

    Guesses are judged by the text that came, not by verdicts: so a guess that was never
    proposed counts too, and a drafter that fell silent finds out when it would be right again.
    """

    def __init__(self) -> None:
        self._true = [_PRIOR] * len(DOUBT)
        self._claimed = [_PRIOR] * len(DOUBT)

    def chance(self, match: int, claimed: float) -> float:
        """The claim about a token that follows a match of this length, corrected."""
        g = grade(match)
        return min(_SURE, claimed * self._true[g] / self._claimed[g])

    def settle(self, guess: Guess, text: Seq[Token]) -> None:
        """Compare a guess with the text that came, as far as it came. One wrong token ends it."""
        for i, (token, claimed) in enumerate(zip(guess.tokens, guess.claims, strict=True)):
            if guess.start + i >= len(text):
                return
            came = text[guess.start + i] == token
            self.record(guess.match + i, claimed, came)
            if not came:
                return

    def record(self, match: int, claimed: float, came: bool) -> None:
        """Count one guessed token that followed a match of this length."""
        g = grade(match)
        self._true[g] = self._true[g] * _KEEP + came
        self._claimed[g] = self._claimed[g] * _KEEP + claimed
