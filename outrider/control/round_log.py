"""Collects what came of rounds, and notes many of them at once, which takes a fraction of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import groupby

from outrider.control.acceptance import Acceptance, DraftedRounds
from outrider.control.decisions import DecisionLog, Decisions
from outrider.control.plan import Plan
from outrider.control.prices import FREE, Prices
from outrider.control.sharing import Sharing
from outrider.control.streak import Streak

_ROUNDS = 16
"""After this many rounds they are noted at the latest, even if nobody needs to know."""


class RoundLog:
    """What came of rounds with drafts, kept until it is noted."""

    def __init__(
        self,
        acceptance: Seq[Acceptance],
        decisions: DecisionLog,
        prices: Prices,
        limiting: frozenset[int],
        sharing: Sharing,
        by_text: frozenset[int] = frozenset(),
    ) -> None:
        """acceptance: of each drafter. limiting: drafters that limit themselves. sharing: of those that share rows.

        by_text: drafters whose drafts the text judges, scored or not: their acceptance is noted elsewhere.
        """
        self._acceptance, self._decisions, self._prices, self._limiting = acceptance, decisions, prices, limiting
        self._sharing, self._by_text = sharing, by_text
        self._streaks: list[Streak] = []
        """The last streak stays when it is noted: more rounds like it may come."""
        self._rounds = 0
        """The number of rounds that are not noted yet."""
        self._ended: list[int] = []
        """Requests that ended, and may have drafts among those rounds."""

    def streak_of(
        self, seq_ids: Seq[int], rows: Seq[int], plan: Plan, drafted: Seq[int], asking: float, now: int
    ) -> Streak:
        """The last streak if the next round is like its rounds, else a new one. now: the number of the round."""
        if self._streaks:
            last = self._streaks[-1]
            alike = last.is_like(seq_ids, rows, plan, drafted) and asking == last.asking
            if alike and now < last.price.until:
                return last
        price = FREE
        if self._prices.widths or plan.kind.steps or any(drafted):  # else as without drafts
            price = self._prices.of(self._prices.kind_of(plan, drafted), now)
        self._streaks.append(Streak(plan, seq_ids, rows, drafted, price, self._limiting, asking))
        return self._streaks[-1]

    def add(self, accepted: Seq[Seq[int]]) -> None:
        """Add rounds to the last streak. accepted: [rounds][sequences] of draft tokens."""
        self._streaks[-1].accepted += accepted
        self._rounds += len(accepted)
        if self._rounds >= _ROUNDS:
            self.tell()

    def holds(self, drafter: int) -> bool:
        """Whether any round in which this drafter was asked is not noted yet."""
        return any(drafter in streak.asked for streak in self._streaks if streak.accepted)

    def tell(self) -> None:
        """Note all that is not noted yet."""
        if not self._rounds:
            return
        told = [streak for streak in self._streaks if streak.accepted]
        self._tell_decisions()
        keyed = groupby(told, lambda each: (each.seq_ids, each.judged, each.plan.drafters))
        groups = [[*alike] for _, alike in keyed]
        for drafter in range(len(self._acceptance)):
            if drafter not in self._by_text:
                self._note_drafts(drafter, groups)
        for seq_id in self._ended:
            self._drop(seq_id)
        self._ended.clear()
        del self._streaks[:-1]
        last = self._streaks[-1]
        last.accepted, last.decided, self._rounds = [], 0, 0

    def forget(self, seq_id: int) -> Decisions:
        """Drop a request that ended, and return what was decided for it.

        What is kept of its drafts is dropped once all rounds are noted: at other times there is less to do than where
        a text ends.
        """
        self._tell_decisions()
        if self._rounds:
            self._ended.append(seq_id)
        else:
            self._drop(seq_id)
        return self._decisions.forget(seq_id)

    def _tell_decisions(self) -> None:
        for streak in self._streaks:
            self._decisions.note(streak)

    def _drop(self, seq_id: int) -> None:
        for known in self._acceptance:
            known.forget(seq_id)

    def _note_drafts(self, drafter: int, groups: Seq[Seq[Streak]]) -> None:
        """Note the drafts of one drafter. groups: streaks for the same sequences, by the same drafters."""
        known, parts = self._acceptance[drafter], list[DraftedRounds]()
        shared: list[tuple[Streak, Seq[int]]] = []
        for streaks in groups:
            rows, seq_ids = streaks[0].rows_of(drafter), streaks[0].seq_ids
            ids = [seq_ids[row] for row in rows]
            if rows:
                accepted = [[each[row] for row in rows] for streak in streaks for each in streak.accepted]
                parts.append(DraftedRounds(ids, self._lengths(streaks, rows), accepted))
                shared += [(streak, rows) for streak in streaks if streak.shared]
            if known.states and len(ids) < len(seq_ids):
                known.forget_stated(seq_id for seq_id in seq_ids if seq_id not in ids)
        if shared:
            self._note_shared(drafter, *max(shared, key=lambda each: len(each[0].accepted)))
        known.note_rounds(parts)

    def _note_shared(self, drafter: int, streak: Streak, rows: Seq[int]) -> None:
        """Note what drafts gained by sharing rows; called before their acceptance is noted.

        rows: those of this drafter. One streak stands for all that are noted together.
        """
        lengths, rounds = [streak.drafted[row] for row in rows], len(streak.accepted)
        survival = self._acceptance[drafter].survival([streak.seq_ids[row] for row in rows])
        accepted = sum(each[row] for each in streak.accepted for row in rows)
        expected = rounds * survival.cumsum(1).sum(0)
        self._sharing.note(drafter, round(sum(lengths) / len(rows)), accepted, expected, rounds * len(rows))

    def _lengths(self, streaks: Seq[Streak], rows: Seq[int]) -> list[list[int]]:
        """[rounds][rows]: the lengths with which the drafts in these rows count.

        Where rounds overlap the planned length counts: beyond its end a shorter draft counts as rejected.
        """
        found: list[list[int]] = []
        for streak in streaks:
            lengths = streak.plan.lengths if self._prices.widths else streak.drafted
            found += [[lengths[row] for row in rows]] * len(streak.accepted)
        return found
