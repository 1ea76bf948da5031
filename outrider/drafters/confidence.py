"""How likely a token that followed before is to follow again: a measured prior, corrected by earlier continuations."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling import Token

Integers = NDArray[np.int64]
MISS_PROBS = (0.8, 0.74, 0.53, 0.4, 0.22, 0.11, 0.06, 0.03)
"""By grade of match length: probability that a token which followed such a match once does not follow it again."""
_MAX_SEEN = 8
_START_TOKENS = 6.0
"""The ratio assumed at first has the weight of this many tokens."""
_TOKEN_DECAY = 1 - 1 / 48
"""The running ratio remembers about 48 tokens."""
_MAX_PROB = 0.99
"""Upper bound of a corrected probability."""

_GRADES = (0, 1, 2, 3, 3, *[4] * 4, *[5] * 8, *[6] * 16)


def grade(match: int) -> int:
    """The grade, 0 to 7, of a match of 0, 1, 2, 3-4, 5-8, 9-16, 17-32 or more tokens."""
    return _GRADES[match] if match < len(_GRADES) else 7


_HIT_PROBS = tuple(tuple(1 - miss**seen for seen in range(_MAX_SEEN + 1)) for miss in MISS_PROBS)


def prior_prob(match: int, votes: int, seen: int) -> float:
    """The probability that a token comes next that followed in `votes` of `seen` earlier occurrences of a match.

    Each further occurrence of the match multiplies the probability of a miss.
    """
    return votes / seen * _HIT_PROBS[grade(match)][min(seen, _MAX_SEEN)]


@dataclass(frozen=True, slots=True)
class Continuation:
    """Tokens expected to follow a match, proposed or not, and the probability of each before correction."""

    start: int
    """Position in the text of the first of them."""
    match: int
    tokens: tuple[Token, ...]
    priors: tuple[float, ...]


class Confidence:
    """For each grade of match length, the ratio of the tokens that came true to the number expected.

    Continuations are judged by the text, not by verdicts: one that was never proposed counts too, so that a drafter
    that proposes nothing finds out when it would be right again.
    """

    def __init__(self, start: float = 1.0) -> None:
        """`start`: the ratio assumed before anything is known."""
        self._right = [_START_TOKENS * start] * len(MISS_PROBS)
        self._expected = [_START_TOKENS] * len(MISS_PROBS)
        self._ratio = [start] * len(MISS_PROBS)

    def prob(self, match: int, prior: float) -> float:
        """The probability of a token that follows a match of this length, corrected."""
        return min(_MAX_PROB, prior * self._ratio[grade(match)])

    def probs(self, match: int, votes: int, seen: int) -> tuple[float, float]:
        """`prior_prob` of a token, and `prob` of that: one call for both, for every token that is looked at."""
        g = _GRADES[match] if match < len(_GRADES) else 7
        prior = votes / seen * _HIT_PROBS[g][seen if seen < _MAX_SEEN else _MAX_SEEN]
        prob = prior * self._ratio[g]
        return prior, prob if prob < _MAX_PROB else _MAX_PROB

    def expected_accepted(self, continuation: Continuation, min_prob: float) -> tuple[int, float]:
        """The number of first tokens whose survival is at least `min_prob`, and the sum of their survivals."""
        path, expected = 1.0, 0.0
        for i, prior in enumerate(continuation.priors):
            path *= self.prob(continuation.match + i, prior)
            if path < min_prob:
                return i, expected
            expected += path
        return len(continuation.tokens), expected

    def judge(self, continuation: Continuation, text: Seq[Token]) -> None:
        """Compare a continuation with the text, as far as that goes, up to the first wrong token."""
        for i, (token, prior) in enumerate(zip(continuation.tokens, continuation.priors, strict=True)):
            if continuation.start + i >= len(text):
                return
            came = text[continuation.start + i] == token
            self.record(continuation.match + i, prior, came)
            if not came:
                return

    def record(self, match: int, prior: float, came: bool) -> None:
        """Count one token expected to follow a match of this length."""
        g = grade(match)
        self._right[g] = self._right[g] * _TOKEN_DECAY + came
        self._expected[g] = self._expected[g] * _TOKEN_DECAY + prior
        self._ratio[g] = self._right[g] / self._expected[g]


class BatchConfidence:
    """`Confidence` for many sequences at once: each slot has one for continuations of its own text, one for others.

    The probability before correction depends on the length of the match alone.
    """

    def __init__(self, slots: int, priors: Seq[float], start: tuple[float, float]) -> None:
        """priors: by match length, up to the longest and a whole draft. start: for each kind, as for `Confidence`."""
        self._priors, self._start = np.array(priors), np.array(start)[:, None]
        self._grades = np.array([grade(match) for match in range(len(priors))])
        self._right = np.zeros((slots, 2, len(MISS_PROBS)))
        self._expected = np.ones_like(self._right)
        self.reset(np.arange(slots))

    def reset(self, slots: Integers | int) -> None:
        """Forget what was seen of these slots."""
        self._right[slots] = _START_TOKENS * self._start
        self._expected[slots] = _START_TOKENS

    def judge(self, slots: Integers, kinds: Integers, matches: Integers, came: Integers, missed: Integers) -> None:
        """Record a continuation for each entry: its first `came` tokens came true, and the next did not where `missed`.

        slots: where a slot occurs several times, its oldest continuation comes first. kinds: 0 for a continuation of
        the slot's own text, 1 of another. matches: the lengths of the matches. missed: 0 or 1.
        """
        counts = came + missed
        rows = np.arange(len(counts)).repeat(counts)
        steps = np.arange(len(rows)) - (counts.cumsum() - counts)[rows]
        lengths = matches[rows] + steps
        keys = (2 * slots + kinds)[rows] * len(MISS_PROBS) + self._grades[lengths]
        weights, size, shape = _TOKEN_DECAY ** repeated(keys), self._right.size, self._right.shape
        decay = (_TOKEN_DECAY ** np.bincount(keys, minlength=size)).reshape(shape)
        right = np.bincount(keys, weights * (steps < came[rows]), size)
        expected = np.bincount(keys, weights * self._priors[lengths], size)
        self._right = self._right * decay + right.reshape(shape)
        self._expected = self._expected * decay + expected.reshape(shape)

    def paths(self, slots: Integers, kinds: Integers, max_match: int, k: int) -> NDArray[np.float64]:
        """[slots, 1 + max_match, k]: the probability that the next 1 to k tokens all come true, by length of match."""
        ratios = self._right[slots, kinds] / self._expected[slots, kinds]
        probs = np.minimum(_MAX_PROB, self._priors * ratios[:, self._grades])
        return probs[:, _windows(max_match, k)].cumprod(-1)


def repeated(keys: Integers) -> Integers:
    """For each key, the number of equal keys behind it."""
    order = keys.argsort(kind="stable")
    ordered, later = keys[order], np.empty_like(keys)
    later[order] = ordered.searchsorted(ordered, side="right") - 1 - np.arange(len(keys))
    return later


@cache
def _windows(max_match: int, k: int) -> Integers:
    """[1 + max_match, k]: the length of a match of each length when 0 to k - 1 tokens more have matched."""
    return np.arange(max_match + 1)[:, None] + np.arange(k)
