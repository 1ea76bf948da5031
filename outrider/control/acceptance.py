"""How likely the next draft tokens are to be accepted, by drafter, request and position in the draft.

A draft of γ tokens of which a were accepted tells about positions 1 to min(a + 1, γ): tokens 1 to a were accepted, and
token a + 1 was rejected. A draft accepted whole says nothing of what lies beyond it. So an acceptance rate is kept for
each position, among the drafts that reached it, and the survival at position j is the product of the rates up to j.

A drafter may state its confidence in each token of a draft. The confidences of a request's last draft correct the rates
of its next one: rate + slope * (confidence - mean confidence where drafts reached the position). The slope is that of a
regression over earlier drafts: of the acceptance that the rates did not explain, on the confidences stated one draft
before. So a confidence counts for as much as it proved to be worth.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_REQUEST_DECAY, _DRAFTER_DECAY = 0.9, 0.997
"""Decay for each draft: a request's figures cover about its last ten drafts, a drafter's about its last 333."""
_DRAFTER_ROUNDS = 100
"""A drafter's figures cover at most about this many rounds: of a request that is alone, more are of other texts."""
_DRAFTER_WEIGHT = 30.0
"""The drafter's rates are the prior of each request's rates, and count as this number of drafts. A plan is the best of
several estimates: from few drafts each, the best one is the luckiest, and promises more than comes."""
_LONG_DECAY = 0.998
"""Decay of what confidences and expectations proved to be worth: about the last 500 drafts count."""
_FIRST_RATE, _FIRST_WEIGHT = 0.75, 4.0
"""The acceptance rate assumed of a drafter before it has drafted, and the number of drafts that this counts as."""
_PRIOR_WEIGHT = 3.0
"""In `Calibration`: the ratio of all requests is the prior of each one's, and counts as this many expected tokens."""
_MIN_RATE, _MAX_RATE = 0.005, 0.995
_SLOPE_WEIGHT = 2.0
"""The prior of the slope: 0, as if seen with this sum of squared deviations, which is that of some tens of tokens."""
_REACHED_BEYOND = np.array([[1], [0]])
"""Added to the number of accepted tokens: a draft reached one position more than it had tokens accepted."""


class DraftedRounds(NamedTuple):
    """The drafts of consecutive rounds, for the same requests."""

    seq_ids: Seq[int]
    lengths: Seq[Seq[int]]  # [rounds][requests], each at least 1
    accepted: Seq[Seq[int]]  # [rounds][requests]: the number of accepted tokens


class Acceptance:
    """The acceptance of one drafter's tokens, for every live request and for all of them together."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: the longest draft, in tokens."""
        self.max_tokens = max(1, max_tokens)
        self._rows: dict[int, int] = {}
        """By sequence id, its row in the arrays. Row 0 stays empty: it serves sequences that nothing is known of."""
        self._free: list[int] = []
        self._figures = np.zeros((1, 2, self.max_tokens))
        """[rows, 2, max_tokens]: decayed numbers of drafts that reached the position, and whose token was accepted."""
        self._all = np.zeros((2, self.max_tokens))
        """[2, max_tokens]: the same over all requests."""
        self._first = np.tri(self.max_tokens + 1, self.max_tokens, -1)  # row n: 1 at the first n positions
        self.drafts = 0
        """The number of drafts noted so far."""
        self._first_weight = _FIRST_WEIGHT
        """The number of drafts that `_FIRST_RATE` still counts as: it decays with every draft noted."""
        self._stated = np.full((1, self.max_tokens), np.nan)  # [rows, max_tokens], of each last draft; NaN: none
        self.states = False
        """Whether the drafter has ever stated a confidence."""
        self._sum_stated, self._times_stated = np.zeros(self.max_tokens), np.zeros(self.max_tokens)
        self._products, self._squares = 0.0, _SLOPE_WEIGHT  # of the regression

    def note(self, seq_ids: Seq[int], lengths: Seq[int], accepted: Seq[int]) -> None:
        """Note drafts of these lengths, each at least 1, and how many of their tokens were accepted."""
        self.note_rounds([DraftedRounds(seq_ids, [lengths], [accepted])])

    def note_rounds(self, parts: Seq[DraftedRounds]) -> None:
        """As `note`, for the drafts of consecutive rounds."""
        accepted = [n for part in parts for each in part.accepted for n in each]
        drafts = len(accepted)
        if not drafts:
            return
        self.drafts += drafts
        lengths = [n for part in parts for each in part.lengths for n in each]
        if drafts == 1:
            self._note_one(self._row(parts[0].seq_ids[0]), lengths[0], accepted[0])
            return
        counts = np.minimum(np.asarray(accepted) + _REACHED_BEYOND, lengths)  # [2, drafts]
        told = self._first.take(counts, 0, mode="clip")  # [2, drafts, max_tokens]
        at = 0
        for part in parts:  # as if noted one after the other
            rounds, batch = len(part.accepted), len(part.seq_ids)
            of_part = told[:, at : at + rounds * batch]
            self._all += self._forget(rounds, batch) @ of_part
            own = _ages(_REQUEST_DECAY, rounds) @ of_part.reshape(2, rounds, -1)
            rows = [self._row(seq_id) for seq_id in part.seq_ids]
            before = self._figures.take(rows, 0) * _REQUEST_DECAY**rounds
            self._figures[rows] = before + own.reshape(2, batch, -1).swapaxes(0, 1)
            at += rounds * batch

    def _note_one(self, row: int, length: int, accepted: int) -> None:
        """The rest of `note_rounds` for a single draft, the usual case where one request runs alone."""
        told = self._first.take((min(length, accepted + 1), min(length, accepted)), 0, mode="clip")
        self._forget(1, 1)
        self._all += told
        own = self._figures[row]
        own *= _REQUEST_DECAY
        own += told

    def _forget(self, rounds: int, batch: int) -> Floats:
        """Let the drafter's figures decay for the drafts of so many rounds of `batch` each; returns their weights."""
        drafts, decay = rounds * batch, min(_DRAFTER_DECAY, 1 - 1 / (_DRAFTER_ROUNDS * max(1, batch)))
        self._first_weight *= decay**drafts
        self._all *= decay**drafts
        return _ages(decay, drafts)

    def note_stated(self, seq_ids: Seq[int], stated: Floats, lengths: Seq[int], accepted: Seq[int]) -> None:
        """Note the confidences [sequences, max_tokens] of drafts, NaN where none was stated. Called before `note`.

        lengths, accepted: of the same drafts.
        """
        self.states = True
        rows = [self._row(seq_id) for seq_id in seq_ids]
        if len(rows) == 1:
            self._note_one_stated(rows[0], stated[0], lengths[0], accepted[0])
        else:
            self._note_all_stated(seq_ids, rows, stated, lengths, accepted)

    def _note_one_stated(self, row: int, stated: Floats, length: int, accepted: int) -> None:
        """As `_note_all_stated` for a single draft, the usual case where one request runs alone."""
        prior, sums, times = self._rates(), self._sum_stated.tolist(), self._times_stated.tolist()
        reached, came = self._figures[row].tolist()
        products = squares = 0.0
        self._sum_stated *= _LONG_DECAY
        self._times_stated *= _LONG_DECAY
        for j, told in enumerate(self._stated[row, : min(length, accepted + 1)].tolist()):
            if told != told:  # NaN
                continue
            before = told - sums[j] / times[j] if times[j] > 0 else 0.0
            rate = (came[j] + _DRAFTER_WEIGHT * prior[j]) / (reached[j] + _DRAFTER_WEIGHT)
            products += ((j < accepted) - rate) * before
            squares += before * before
            self._sum_stated[j] += told
            self._times_stated[j] += 1
        self._products = self._products * _LONG_DECAY + products
        self._squares = (self._squares - _SLOPE_WEIGHT) * _LONG_DECAY + squares + _SLOPE_WEIGHT
        self._stated[row] = stated

    def _note_all_stated(
        self, seq_ids: Seq[int], rows: Seq[int], stated: Floats, lengths: Seq[int], accepted: Seq[int]
    ) -> None:
        """As `note_stated`. rows: of these requests, in the arrays."""
        place = np.arange(self.max_tokens)
        right = np.asarray(accepted)[:, None]
        reached = (place < np.asarray(lengths)[:, None]) & (place <= right) & ~np.isnan(self._stated[rows])
        before, unexplained = self._deviations(rows), (place < right) - self._own_rates(seq_ids)
        decay = _LONG_DECAY ** len(seq_ids)
        self._products = self._products * decay + float((unexplained * before)[reached].sum())
        self._squares = (self._squares - _SLOPE_WEIGHT) * decay + float((before**2)[reached].sum()) + _SLOPE_WEIGHT
        self._sum_stated = self._sum_stated * decay + np.where(reached, self._stated[rows], 0.0).sum(0)
        self._times_stated = self._times_stated * decay + reached.sum(0)
        self._stated[rows] = stated

    def forget_stated(self, seq_ids: Iterable[int]) -> None:
        """Drop the last confidences of these requests, which had no draft in a round: they are of an earlier place."""
        if self.states:
            rows = [self._rows[seq_id] for seq_id in seq_ids if seq_id in self._rows]
            if rows:
                self._stated[rows] = np.nan

    def _deviations(self, rows: Seq[int]) -> Floats:
        """[rows, max_tokens]: the confidences of each last draft, minus the mean of earlier ones, of those whose next
        draft reached the position; 0 where none is known."""
        sums, times = self._sum_stated.tolist(), self._times_stated.tolist()
        mean = [total / count if count > 0 else np.nan for total, count in zip(sums, times, strict=True)]
        found = self._stated.take(rows, 0) - mean
        return np.where(np.isnan(found), 0.0, found)

    @property
    def slope(self) -> float:
        """The change of the acceptance rate for each unit of confidence, limited to 0 to 1."""
        return min(max(self._products / self._squares, 0.0), 1.0)

    def survival(self, seq_ids: Seq[int]) -> Floats:
        """[sequences, max_tokens]: the probability that all tokens up to a position are accepted."""
        if len(seq_ids) == 1:
            return np.array([self._survival_of(self._rows.get(seq_ids[0], 0))])
        rates, slope = self._own_rates(seq_ids), self.slope
        if slope > 0:
            rates += slope * self._deviations(self._rows_of(seq_ids))
        np.maximum(rates, _MIN_RATE, out=rates)
        np.minimum(rates, _MAX_RATE, out=rates)
        return rates.cumprod(1)

    def _survival_of(self, row: int) -> list[float]:
        """As `survival` for one request, in plain Python: numpy takes several times as long for so few numbers."""
        slope, (reached, came) = self.slope, self._figures[row].tolist()
        stated: list[float] = self._deviations([row])[0].tolist() if slope > 0 else [0.0] * self.max_tokens
        found, survival = list[float](), 1.0
        for prior, right, count, told in zip(self._rates(), came, reached, stated, strict=True):
            rate = (right + _DRAFTER_WEIGHT * prior) / (count + _DRAFTER_WEIGHT) + slope * told
            if rate < _MIN_RATE:
                rate = _MIN_RATE
            elif rate > _MAX_RATE:
                rate = _MAX_RATE
            survival *= rate
            found.append(survival)
        return found

    def fade(self, share: float) -> None:
        """Forget a share of all that was noted, so that a drafter that was not asked for long is judged anew."""
        self._figures *= 1 - share
        self._all *= 1 - share
        self._first_weight += share * (_FIRST_WEIGHT - self._first_weight)

    def _own_rates(self, seq_ids: Seq[int]) -> Floats:
        """[sequences, max_tokens]: the acceptance rates of each request, with the drafter's rates as their prior."""
        rows, prior = self._rows_of(seq_ids), np.array(self._rates())
        figures = self._figures.take(rows, 0)
        return (figures[:, 1] + _DRAFTER_WEIGHT * prior) / (figures[:, 0] + _DRAFTER_WEIGHT)

    def _rows_of(self, seq_ids: Seq[int]) -> list[int]:
        return [self._rows.get(seq_id, 0) for seq_id in seq_ids]

    def _rates(self) -> list[float]:
        """[max_tokens]: the drafter's rate at each position, with the rate at the position before as its prior."""
        rates: list[float] = []
        before, weight = _FIRST_RATE, self._first_weight
        for reached, came in zip(*self._all.tolist(), strict=True):
            before = (came + weight * before) / (reached + weight)
            rates.append(before)
            weight = _FIRST_WEIGHT
        return rates

    def forget(self, seq_id: int) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._figures[row] = 0.0
            self._stated[row] = np.nan
            self._free.append(row)

    def _row(self, seq_id: int) -> int:
        if seq_id not in self._rows:
            if not self._free:
                count = max(7, len(self._figures))
                self._free = list(range(len(self._figures) + count - 1, len(self._figures) - 1, -1))
                self._figures = np.concatenate((self._figures, np.zeros((count, 2, self.max_tokens))))
                self._stated = np.concatenate((self._stated, np.full((count, self.max_tokens), np.nan)))
            self._rows[seq_id] = self._free.pop()
        return self._rows[seq_id]


class Calibration:
    """The ratio of accepted tokens to those that the drafter expected to be accepted, for each request."""

    def __init__(self) -> None:
        self._all = [_PRIOR_WEIGHT, _PRIOR_WEIGHT]  # accepted, expected
        self._requests: dict[int, list[float]] = {}

    def note(self, seq_id: int, expected: float, accepted: int) -> None:
        for sums, decay in (
            (self._all, _LONG_DECAY),
            (self._requests.setdefault(seq_id, [0.0, 0.0]), _REQUEST_DECAY),
        ):
            sums[0] = sums[0] * decay + accepted
            sums[1] = sums[1] * decay + expected

    def ratio(self, seq_id: int) -> float:
        accepted, expected = self._requests.get(seq_id, (0.0, 0.0))
        prior = self._all[0] / self._all[1]
        return (accepted + _PRIOR_WEIGHT * prior) / (expected + _PRIOR_WEIGHT)

    def forget(self, seq_id: int) -> None:
        self._requests.pop(seq_id, None)


@lru_cache(1024)
def _ages(decay: float, count: int) -> Floats:
    """[count]: the weight that is left of each of `count` consecutive entries, the oldest first."""
    return np.power(decay, np.arange(count - 1, -1, -1), dtype=np.float64)
