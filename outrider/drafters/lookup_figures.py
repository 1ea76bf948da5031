"""What is learned from earlier lookups, by text: how many tokens to draft after a match, and how many are accepted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling import Token
from outrider.drafters.confidence import BatchConfidence, Integers, repeated
from outrider.drafters.lookup_rules import MAX_MIN_PROB, LookupRules
from outrider.runners.text_store import pack_limits

_FIRST_REACH = 3
"""The reach of a new text, until it is known how many tokens its matches call for."""
_NOTHING = -2
"""Equal to no token of a continuation, nor to its padding."""


class MatchFigures:
    """The figures of each slot, for continuations of its own text (kind 0) and of other texts (kind 1)."""

    def __init__(self, rules: LookupRules, slots: int, k: int) -> None:
        """k: max tokens drafted in one round."""
        self.rules, self.k, self.max_match = rules, k, len(rules.limits) - 1
        self.limits = np.zeros((slots, 2, self.max_match + 1), dtype=np.int64)
        """[slots, kinds, 1 + max_match]: max tokens drafted after a match of each length, and the mean chance of each,
        as `pack_limits` packs them."""
        self.reach = np.zeros(slots, dtype=np.int64)
        """[slots]: the most tokens that a match lately called for, halved in every round that calls for fewer."""
        self.expected = np.zeros(slots)
        """[slots]: the most accepted tokens that a lookup was lately worth, halved likewise."""
        self._confidence = BatchConfidence(slots, rules.priors, rules.start)
        self._most = np.array(rules.limits)
        self._min_prob = rules.min_prob
        """Min probability of a drafted token, for a batch of the last round's size."""
        self._first_limits: dict[float, Integers] = {}
        """By `_min_prob`: the limits of a slot that nothing is known of."""

    def set_batch(self, texts: int) -> None:
        """Set the number of texts of a round: the more there are, the likelier a token must be to be drafted."""
        self._min_prob = max(self.rules.min_prob, min(MAX_MIN_PROB, self.rules.row_share * texts))

    def reset(self, slot: int) -> None:
        """Start anew: a slot now belongs to another text."""
        self.reach[slot], self.expected[slot] = min(self.k, _FIRST_REACH), 0
        self._confidence.reset(slot)
        first = self._first_limits.get(self._min_prob)
        if first is None:
            self._learn(np.array([slot, slot]), np.arange(2))
            first = self._first_limits[self._min_prob] = self.limits[slot].copy()
        self.limits[slot] = first

    def worth(self, slots: Integers, kinds: Integers, matches: Integers, counts: Integers) -> NDArray[np.float64]:
        """How many of the first `counts` tokens after each match should be accepted."""
        paths = self._confidence.paths(slots, kinds, self.max_match, self.k)
        return _sum_first(paths[np.arange(len(slots)), matches], counts)

    def note_reach(self, slots: Integers, wanted: Integers) -> None:
        """Note how many tokens each slot's match called for in a round."""
        self.reach[slots] = np.maximum(wanted, self.reach[slots] // 2)

    def judge(
        self, slots: Integers, kinds: Integers, matches: Integers, came: Integers, missed: Integers, wanted: Integers
    ) -> None:
        """Learn from one or more rounds: a continuation for each entry, whose match called for `wanted` tokens.

        slots: where a slot occurs several times, its oldest round comes first. matches: 0 where nothing was found.
        came, missed: as from `compare`. What continuations were worth is computed from all that is known by then.
        """
        later = repeated(slots)
        self.expected *= 0.5 ** np.bincount(slots, minlength=len(self.expected))
        some = np.flatnonzero(matches)
        if not some.size:
            return
        if some.size < len(slots):
            slots, kinds, matches, came, missed, wanted, later = (
                each[some] for each in (slots, kinds, matches, came, missed, wanted, later)
            )
        self._confidence.judge(slots, kinds, matches, came, missed)
        keys, occurs = 2 * slots + kinds, np.zeros(2 * len(self.expected), dtype=np.bool_)
        occurs[keys] = True
        judged = np.flatnonzero(occurs)
        paths = self._learn(judged // 2, judged % 2)[(occurs.cumsum() - 1)[keys], matches]
        np.maximum.at(self.expected, slots, 0.5**later * _sum_first(paths, wanted))

    def _learn(self, slots: Integers, kinds: Integers) -> NDArray[np.float64]:
        """Set the limits of these slots: max tokens after a match of each length, and the mean chance of each token.

        Returns the probabilities, as `BatchConfidence.paths`.
        """
        paths = self._confidence.paths(slots, kinds, self.max_match, self.k)
        tokens = np.minimum((paths >= self._min_prob).sum(-1), self._most)
        self.limits[slots, kinds] = pack_limits(tokens, _mean_chances(paths, tokens))
        return paths


def compare(continuations: Integers, committed: Seq[tuple[Token, ...]]) -> tuple[Integers, Integers]:
    """Of continuations padded with negatives: how many tokens came true, and 1 where the next did not, [B] both."""
    counts = np.array([*map(len, committed)])
    longest = int(counts.max())
    most = min(longest, continuations.shape[1])
    tokens = np.full((len(counts), longest), _NOTHING)
    tokens[np.arange(longest) < counts[:, None]] = np.fromiter(chain.from_iterable(committed), np.int64)
    same = np.zeros((len(counts), most + 1), dtype=np.bool_)  # the last column ends every continuation
    np.equal(continuations[:, :most], tokens[:, :most], out=same[:, :most])
    came = same.argmin(1)
    following = continuations[np.arange(len(came)), np.minimum(came, most - 1)]
    return came, ((came < np.minimum(counts, most)) & (following >= 0)).astype(np.int64)


def _sum_first(paths: NDArray[np.float64], counts: Integers) -> NDArray[np.float64]:
    """The sum of the first `counts` of each row."""
    return np.where(np.arange(paths.shape[1]) < counts[:, None], paths, 0).sum(1)


def _mean_chances(paths: NDArray[np.float64], counts: Integers) -> NDArray[np.float64]:
    """[N, M]: the geometric mean of the chances of the first `counts` [N, M] tokens; 0 where there are none.

    paths [N, M, k]: the probability that the first 1 to k tokens all come true.
    """
    last = np.take_along_axis(paths, np.maximum(counts - 1, 0)[..., None], -1)[..., 0]
    return last ** (1 / np.maximum(counts, 1)) * (counts > 0)
