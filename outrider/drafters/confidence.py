"""How far a guess by repetition can be trusted: a measured prior, corrected by what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.sampling import Token

DOUBT = (0.8, 0.74, 0.53, 0.4, 0.22, 0.11, 0.06, 0.03)
"""By grade: chance that a token which once followed such a match does not follow it again."""
_MAX_SEEN = 8
_PRIOR = 6.0
"""The ratio assumed at first has the weight of this many tokens."""
_KEEP = 1 - 1 / 48
"""The running ratio remembers about 48 tokens."""
_SURE = 0.99
"""No guess is surer than this, whatever it was seen to do."""


_GRADES = (0, 1, 2, 3, 3, *[4] * 4, *[5] * 8, *[6] * 16)


def grade(match: int) -> int:
    """Match lengths 0, 1, 2, 3-4, 5-8, 9-16, 17-32, and more, as 0 to 7."""
    return _GRADES[match] if match < len(_GRADES) else 7


_CLAIMS = tuple(tuple(1 - doubt**seen for seen in range(_MAX_SEEN + 1)) for doubt in DOUBT)


def claim(match: int, votes: int, seen: int) -> float:
    """Chance that a token comes next which followed in `votes` of `seen` earlier occurrences.

    Each occurrence of the match leaves only a part of the doubt the one before it left.
    """
    return votes / seen * _CLAIMS[grade(match)][min(seen, _MAX_SEEN)]


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

    def __init__(self, start: float = 1.0) -> None:
        """`start`: the ratio assumed before anything is known."""
        self._true = [_PRIOR * start] * len(DOUBT)
        self._claimed = [_PRIOR] * len(DOUBT)
        self._ratio = [start] * len(DOUBT)

    def chance(self, match: int, claimed: float) -> float:
        """The claim about a token that follows a match of this length, corrected."""
        return min(_SURE, claimed * self._ratio[grade(match)])

    def worth(self, guess: Guess, min_prob: float) -> tuple[int, float]:
        """How many of the tokens have a chance of at least `min_prob` to stand, and how many of those will."""
        standing, expected = 1.0, 0.0
        for i, claimed in enumerate(guess.claims):
            standing *= self.chance(guess.match + i, claimed)
            if standing < min_prob:
                return i, expected
            expected += standing
        return len(guess.tokens), expected

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
        self._ratio[g] = self._true[g] / self._claimed[g]
