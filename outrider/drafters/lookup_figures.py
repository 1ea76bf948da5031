"""What came of earlier lookups, by text: how far to draft after a match, and what that is worth."""

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
"""How far a new text is drafted for, until it is known how far its matches call for."""
_NOTHING = -2
"""Equals no token of a continuation, nor its padding."""


class MatchFigures:
    """The figures of each slot, for continuations of its own text (kind 0) and of others (kind 1)."""

    def __init__(self, rules: LookupRules, slots: int, k: int) -> None:
        """k: max tokens drafted in one round."""
        self.rules, self.k, self.max_match = rules, k, len(rules.limits) - 1
        self.limits = np.zeros((slots, 2, self.max_match + 1), dtype=np.int64)
        """[slots, kinds, 1 + max_match]: max tokens drafted after a match of each length, and the mean chance of each,
        as `pack_limits` packs them."""
        self.reach = np.zeros(slots, dtype=np.int64)
        """How far each slot was lately to be drafted for; halved with every round in which it was not."""
        self.expected = np.zeros(slots)
        """How many tokens each slot's lookups lately expected to be accepted; halved likewise."""
        self._confidence = BatchConfidence(slots, rules.priors, rules.start)
        self._most = np.array(rules.limits)
        self._min_prob = rules.min_prob
        """In a batch of the size of the last round's."""
        self._first_limits: dict[float, Integers] = {}
        """By `_min_prob`: the limits of a slot of which nothing was seen."""

    def set_batch(self, texts: int) -> None:
        """So many texts share a round: the more there are, the likelier must be what is drafted."""
        self._min_prob = max(self.rules.min_prob, min(MAX_MIN_PROB, self.rules.row_share * texts))

    def reset(self, slot: int) -> None:
        """A slot is another text's."""
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
        """Note how many tokens were to be drafted for each slot in a round."""
        self.reach[slots] = np.maximum(wanted, self.reach[slots] // 2)

    def judge(
        self, slots: Integers, kinds: Integers, matches: Integers, came: Integers, missed: Integers, wanted: Integers
    ) -> None:
        """Learn from a continuation of each slot in each of some rounds, `wanted` tokens of which were to be drafted.

        slots: of one that is named again, the rounds are in their order. matches: 0 where nothing was found. came,
        missed: as of `compare`. What continuations were worth goes by all that is known now.
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
        """Set how far these slots are drafted for after a match of each length, and with what chance of each token.

        Returns the probabilities, as `BatchConfidence.paths`.
        """
        paths = self._confidence.paths(slots, kinds, self.max_match, self.k)
        tokens = np.minimum((paths >= self._min_prob).sum(-1), self._most)
        self.limits[slots, kinds] = pack_limits(tokens, _mean_chances(paths, tokens))
        return paths


def compare(continuations: Integers, committed: Seq[tuple[Token, ...]]) -> tuple[Integers, Integers]:
    """How many tokens of each continuation, padded with negative ones, came, and 1 where the next did not: [B] both."""
    counts = np.array([*map(len, committed)])
    longest = int(counts.max())
    most = min(longest, continuations.shape[1])
    tokens = np.full((len(counts), longest), _NOTHING)
    tokens[np.arange(longest) < counts[:, None]] = np.fromiter(chain.from_iterable(committed), np.int64)
    same = np.zeros((len(counts), most + 1), dtype=np.bool_)  # the last of them ends every continuation
    np.equal(continuations[:, :most], tokens[:, :most], out=same[:, :most])
    came = same.argmin(1)
    following = continuations[np.arange(len(came)), np.minimum(came, most - 1)]
    return came, ((came < np.minimum(counts, most)) & (following >= 0)).astype(np.int64)


def _sum_first(paths: NDArray[np.float64], counts: Integers) -> NDArray[np.float64]:
    """The sum of the first `counts` of each row."""
    return np.where(np.arange(paths.shape[1]) < counts[:, None], paths, 0).sum(1)


def _mean_chances(paths: NDArray[np.float64], counts: Integers) -> NDArray[np.float64]:
    """[N, M]: the chance that each of the first `counts` [N, M] tokens would have if it were the same; 0 of none.

    paths [N, M, k]: that so many of them come.
    """
    last = np.take_along_axis(paths, np.maximum(counts - 1, 0)[..., None], -1)[..., 0]
    return last ** (1 / np.maximum(counts, 1)) * (counts > 0)
