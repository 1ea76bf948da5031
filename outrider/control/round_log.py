"""Keeps what came of rounds, and notes it in one go: that takes a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import groupby

from outrider.control.acceptance import Acceptance
from outrider.control.choose import Plan
from outrider.control.decisions import DecisionLog
from outrider.control.prices import FREE, Prices
from outrider.control.sharing import Sharing
from outrider.control.streak import Streak

_ROUNDS = 16
"""So many are noted at the latest, whether anybody asks or not."""


class RoundLog:
    """What came of rounds with drafts, until it is noted."""

    def __init__(
        self,
        acceptance: Seq[Acceptance],
        decisions: DecisionLog,
        prices: Prices,
        limiting: frozenset[int],
        sharing: Sharing,
    ) -> None:
        """acceptance: of each drafter. limiting: those that limit themselves. sharing: of those that share rows."""
        self._acceptance, self._decisions, self._prices, self._limiting = acceptance, decisions, prices, limiting
        self._sharing = sharing
        self._streaks: list[Streak] = []
        """The last one stays, noted or not: more of the same may come."""
        self._rounds = 0
        """How many are not noted yet."""

    def streak_of(
        self, seq_ids: Seq[int], rows: Seq[int], plan: Plan, drafted: Seq[int], asking: float, now: int
    ) -> Streak:
        """The last rounds, where the next one is like them; else it begins others. now: which round it is."""
        if self._streaks:
            last = self._streaks[-1]
            alike = last.is_like(seq_ids, rows, plan, drafted) and asking == last.asking
            if alike and now < last.price.until:
                return last
        price = FREE
        if self._prices.widths or any(drafted):  # else a round without drafts
            price = self._prices.of(self._prices.kind_of(plan, drafted), now)
        self._streaks.append(Streak(plan, seq_ids, rows, drafted, price, self._limiting, asking))
        return self._streaks[-1]

    def add(self, accepted: Seq[int]) -> None:
        """A round more of the last streak. accepted: draft tokens of each sequence."""
        self._streaks[-1].accepted.append(accepted)
        self._rounds += 1
        if self._rounds >= _ROUNDS:
            self.tell()

    def holds(self, drafter: int) -> bool:
        """Whether rounds are not noted yet that this drafter was asked for."""
        return any(drafter in streak.asked for streak in self._streaks if streak.accepted)

    def tell(self) -> None:
        """Note all that is not noted yet."""
        if not self._rounds:
            return
        told = [streak for streak in self._streaks if streak.accepted]
        for streak in told:
            self._decisions.note(streak)
        for _, alike in groupby(told, lambda each: (each.seq_ids, each.judged, each.plan.drafters)):
            self._note_drafts([*alike])
        del self._streaks[:-1]
        self._streaks[-1].accepted = []
        self._rounds = 0

    def _note_drafts(self, streaks: Seq[Streak]) -> None:
        """Note drafts for the same sequences, of the same drafters."""
        seq_ids = streaks[0].seq_ids
        for i, known in enumerate(self._acceptance):
            rows = streaks[0].rows_of(i)
            ids = [seq_ids[row] for row in rows]
            if rows:
                self._note_shared(i, ids, rows, [each for each in streaks if each.shared])
                accepted = [[each[row] for row in rows] for streak in streaks for each in streak.accepted]
                known.note_rounds(ids, self._lengths(streaks, rows), accepted)
            if known.states and len(ids) < len(seq_ids):
                known.forget_stated(seq_id for seq_id in seq_ids if seq_id not in ids)

    def _note_shared(self, drafter: int, ids: Seq[int], rows: Seq[int], streaks: Seq[Streak]) -> None:
        """Note what drafts that shared rows gained by that: before their acceptance is noted."""
        if not streaks:
            return
        known = self._acceptance[drafter]
        by_length = known.survival(ids).cumsum(1)
        for streak in streaks:
            lengths = [streak.drafted[row] for row in rows]
            expected = sum(float(by_length[i, n - 1]) for i, n in enumerate(lengths) if n)
            accepted = sum(each[row] for each in streak.accepted for row in rows)
            share, rounds = sum(lengths) / len(rows) / known.max_tokens, len(streak.accepted)
            self._sharing.note(drafter, share, accepted, rounds * expected, rounds * len(rows))

    def _lengths(self, streaks: Seq[Streak], rows: Seq[int]) -> list[list[int]]:
        """[rounds][rows]: how long the drafts in these rows count as.

        One shorter than asked for is not accepted beyond its end either, unless it was seen before it was scored.
        """
        found: list[list[int]] = []
        for streak in streaks:
            lengths = streak.plan.lengths if self._prices.widths else streak.drafted
            found += [[lengths[row] for row in rows]] * len(streak.accepted)
        return found
