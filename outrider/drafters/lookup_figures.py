"""What came of earlier lookups, by text: how far to draft after a match, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling import Token
from outrider.drafters.confidence import BatchConfidence, Integers
from outrider.drafters.lookup_rules import MAX_MIN_PROB, LookupRules

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
        """[slots, kinds, 1 + max_match]: max tokens drafted after a match of each length."""
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
        return _sum_first(self._confidence.paths(slots, kinds, self.max_match, self.k), matches, counts)

    def judge(
        self, slots: Integers, kinds: Integers, matches: Integers, came: Integers, missed: Integers, wanted: Integers
    ) -> None:
        """Learn from a continuation of each slot, `wanted` tokens of which were to be drafted.

        matches: 0 where nothing was found. came, missed: as of `compare`.
        """
        self.reach[slots] = np.maximum(wanted, self.reach[slots] // 2)
        self.expected[slots] /= 2
        some = np.flatnonzero(matches)
        if not some.size:
            return
        if some.size < len(slots):
            slots, kinds, matches, came, missed, wanted = (
                each[some] for each in (slots, kinds, matches, came, missed, wanted)
            )
        self._confidence.judge(slots, kinds, matches, came, missed)
        worth = _sum_first(self._learn(slots, kinds), matches, wanted)
        self.expected[slots] = np.maximum(worth, self.expected[slots])

    def _learn(self, slots: Integers, kinds: Integers) -> NDArray[np.float64]:
        """Set how far these slots are drafted for after a match of each length; returns the probabilities."""
        paths = self._confidence.paths(slots, kinds, self.max_match, self.k)
        self.limits[slots, kinds] = np.minimum((paths >= self._min_prob).sum(-1), self._most)
        return paths


def compare(continuations: Integers, committed: Seq[tuple[Token, ...]]) -> tuple[Integers, Integers]:
    """How many tokens of each continuation, padded with negative ones, came, and 1 where the next did not: [B] both."""
    counts = list(map(len, committed))
    most = min(max(counts), continuations.shape[1])
    tokens = np.array([(*each[:most], *[_NOTHING] * (most - len(each))) for each in committed])
    came = np.logical_and.accumulate(continuations[:, :most] == tokens, axis=1).sum(1)
    open_ = came < np.minimum(counts, most)
    following = continuations[np.arange(len(came)), np.minimum(came, most - 1)]
    return came, (open_ & (following >= 0)).astype(np.int64)


def _sum_first(paths: NDArray[np.float64], matches: Integers, counts: Integers) -> NDArray[np.float64]:
    """How many of the first `counts` tokens after each match should be accepted."""
    chosen = paths[np.arange(len(paths)), matches]
    return np.where(np.arange(chosen.shape[1]) < counts[:, None], chosen, 0).sum(1)
