"""How likely the next draft tokens are to be accepted, by drafter, request and position in the draft.

A draft of γ tokens of which a were accepted tells about positions 1 to min(a + 1, γ): those before a + 1 were accepted,
that one rejected. A draft accepted whole says nothing of what lies beyond it. So rates are kept for each position
among the drafts that reached it, and the probability that a token at position j survives is the product up to j.

A drafter may state its confidence in each token of a draft. What it stated of a request's last draft corrects the rates
of the next: rate + slope * (confidence - mean confidence where drafts reached the position). The slope is that of a
regression: of what rates did not explain of earlier drafts, on what was stated before each. So a confidence counts for
as much as it was worth, however it is scaled.
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
"""A request's figures remember about ten drafts, a drafter's about 333."""
_DRAFTER_WEIGHT = 30.0
"""The drafter's figures count as so many drafts of each request. A plan is the best of several estimates, and one of
few drafts is the best by luck: it promises what does not come."""
_LONG_DECAY = 0.998
"""What confidences and expectations are worth is known of about 500."""
_FIRST_RATE, _FIRST_WEIGHT = 0.75, 4.0
"""What is assumed of a drafter before it has drafted, and the number of drafts that this counts as."""
_PRIOR_WEIGHT = 3.0
"""What was expected of all requests counts as so many drafts of each."""
_MIN_RATE, _MAX_RATE = 0.005, 0.995
_SLOPE_WEIGHT = 2.0
"""The slope begins at 0, as if this sum of squared deviations had been seen: some tens of tokens."""
_REACHED_BEYOND = np.array([[1], [0]])
"""A draft reached one position more than were accepted."""


class DraftedRounds(NamedTuple):
    """Drafts of rounds one after the other, for the same requests."""

    seq_ids: Seq[int]
    lengths: Seq[Seq[int]]  # [rounds][requests], each at least 1
    accepted: Seq[Seq[int]]  # [rounds][requests]: how many of their tokens were


class Acceptance:
    """The acceptance of one drafter's tokens, for every live request and for all of them together."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: the longest draft, in tokens."""
        self.max_tokens = max(1, max_tokens)
        self._rows: dict[int, int] = {}
        """By sequence id, its row of the arrays; the first row is of all that nothing is known of, and stays empty."""
        self._free: list[int] = []
        self._figures = np.zeros((1, 2, self.max_tokens))
        """[rows, 2, max_tokens]: drafts that reached the position, and that were accepted there."""
        self._all = np.zeros((2, self.max_tokens))
        """The same of all requests."""
        self._first = np.tri(self.max_tokens + 1, self.max_tokens, -1)  # row n: 1 at the first n positions
        self.drafts = 0
        """How many drafts were noted."""
        self._first_weight = _FIRST_WEIGHT
        """What was assumed at first counts as so many drafts: as all that is old, less with every one noted."""
        self._stated = np.full((1, self.max_tokens), np.nan)  # of the last draft, [rows, max_tokens]; NaN: none
        self.states = False
        """Whether the drafter has ever stated a confidence."""
        self._sum_stated, self._times_stated = np.zeros(self.max_tokens), np.zeros(self.max_tokens)
        self._products, self._squares = 0.0, _SLOPE_WEIGHT  # of the regression

    def note(self, seq_ids: Seq[int], lengths: Seq[int], accepted: Seq[int]) -> None:
        """Note drafts of these lengths, each at least 1, and how many of their tokens were accepted."""
        self.note_rounds([DraftedRounds(seq_ids, [lengths], [accepted])])

    def note_rounds(self, parts: Seq[DraftedRounds]) -> None:
        """As `note` for rounds one after the other."""
        accepted = [n for part in parts for each in part.accepted for n in each]
        drafts = len(accepted)
        if not drafts:
            return
        self.drafts += drafts
        self._first_weight *= _DRAFTER_DECAY**drafts
        self._all *= _DRAFTER_DECAY**drafts
        lengths = [n for part in parts for each in part.lengths for n in each]
        if drafts == 1:
            self._note_one(self._row(parts[0].seq_ids[0]), lengths[0], accepted[0])
            return
        counts = np.minimum(np.asarray(accepted) + _REACHED_BEYOND, lengths)  # [2, drafts]
        told = self._first.take(counts, 0, mode="clip")  # [2, drafts, max_tokens]
        self._all += _ages(_DRAFTER_DECAY, drafts) @ told  # as if one came after the other
        at = 0
        for part in parts:
            rounds, batch = len(part.accepted), len(part.seq_ids)
            own = _ages(_REQUEST_DECAY, rounds) @ told[:, at : at + rounds * batch].reshape(2, rounds, -1)
            rows = [self._row(seq_id) for seq_id in part.seq_ids]
            before = self._figures.take(rows, 0) * _REQUEST_DECAY**rounds
            self._figures[rows] = before + own.reshape(2, batch, -1).swapaxes(0, 1)
            at += rounds * batch

    def _note_one(self, row: int, length: int, accepted: int) -> None:
        """As `note_rounds` for one draft: what most rounds of a single request have."""
        told = self._first.take((min(length, accepted + 1), min(length, accepted)), 0, mode="clip")
        self._all += told
        own = self._figures[row]
        own *= _REQUEST_DECAY
        own += told

    def note_stated(self, seq_ids: Seq[int], stated: Floats, lengths: Seq[int], accepted: Seq[int]) -> None:
        """Note the confidences [sequences, max_tokens] that were stated of drafts, NaN where none was; before `note`.

        lengths, accepted: of these drafts.
        """
        self.states = True
        rows = [self._row(seq_id) for seq_id in seq_ids]
        if len(rows) == 1:
            self._note_one_stated(rows[0], stated[0], lengths[0], accepted[0])
        else:
            self._note_all_stated(seq_ids, rows, stated, lengths, accepted)

    def _note_one_stated(self, row: int, stated: Floats, length: int, accepted: int) -> None:
        """As `_note_all_stated` for one draft: what most rounds of a single request have."""
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
        """As `note_stated`. rows: of these requests."""
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
        """These requests had no draft in a round: what was stated before it is of another place in the text."""
        if self.states:
            rows = [self._rows[seq_id] for seq_id in seq_ids if seq_id in self._rows]
            if rows:
                self._stated[rows] = np.nan

    def _deviations(self, rows: Seq[int]) -> Floats:
        """[rows, max_tokens]: the confidences of each last draft, less their mean where the next draft reached the
        position, as rates are; 0 where nothing is known."""
        sums, times = self._sum_stated.tolist(), self._times_stated.tolist()
        mean = [total / count if count > 0 else np.nan for total, count in zip(sums, times, strict=True)]
        found = self._stated.take(rows, 0) - mean
        return np.where(np.isnan(found), 0.0, found)

    @property
    def slope(self) -> float:
        """What a difference of confidence is worth, in acceptance: from 0 to 1."""
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
        """As `survival` of one request: arrays of a few numbers take several times as long."""
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
        """Forget a share of all that was noted: a drafter that was not tried for long is judged anew."""
        self._figures *= 1 - share
        self._all *= 1 - share
        self._first_weight += share * (_FIRST_WEIGHT - self._first_weight)

    def _own_rates(self, seq_ids: Seq[int]) -> Floats:
        """[sequences, max_tokens]: the rates of each request, which leans on the drafter's."""
        rows, prior = self._rows_of(seq_ids), np.array(self._rates())
        figures = self._figures.take(rows, 0)
        return (figures[:, 1] + _DRAFTER_WEIGHT * prior) / (figures[:, 0] + _DRAFTER_WEIGHT)

    def _rows_of(self, seq_ids: Seq[int]) -> list[int]:
        return [self._rows.get(seq_id, 0) for seq_id in seq_ids]

    def _rates(self) -> list[float]:
        """[max_tokens]: the drafter's rate at each position; one that few drafts reached leans on the one before."""
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
    """How many tokens of a drafter's drafts are accepted for each that it expects to be."""

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
    """[count]: what is left of each of so many that came one after the other."""
    return np.power(decay, np.arange(count - 1, -1, -1), dtype=np.float64)
