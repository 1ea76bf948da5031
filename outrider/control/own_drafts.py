"""Drafters that decide for each text how far they draft: what they do on average, and what asking them takes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

import numpy as np

from outrider.control.costs import RoundCosts, RoundKind

_ROUND_PART = 0.02
"""The weight of the last round in the running means. If few rounds counted, a drafter would be asked after good luck
and bring less than its figures say: no plan of it would be trusted, and drafters would take turns without gain."""
_LATE_PART = 0.12
"""The same for the figures that replace those where drafts have lost too much, and older ones are of other texts: about
the last eight rounds count."""
_GUESS_PART, _RARE_PART, _BEYOND = 0.015, 0.05, 2
"""The weight of each of the guesses that the text judged; the least weight of those told together where guesses are
rare, and stand for many rounds. And the number of tokens of a guess that count as drafted beyond those that came."""


class OwnDrafts(NamedTuple):
    """What a drafter that limits itself does on average, in a round, for a sequence that it is asked for."""

    share: float
    """The part of the rounds in which it drafts anything."""
    drafted: float
    accepted: float
    """Tokens drafted, and tokens accepted; rounds in which it drafts nothing are included."""

    def nearer(self, other: OwnDrafts, part: float) -> OwnDrafts:
        """These figures, moved towards `other` by this part of the distance."""
        return OwnDrafts(*(mine + part * (its - mine) for mine, its in zip(self, other, strict=True)))

    def round(self, name: str, batch: int, asked: int, costs: RoundCosts, widths: Seq[int]) -> tuple[RoundKind, float]:
        """The kind of a round in which it drafts, asked for `asked` sequences; the mean seconds of one that asks it."""
        idle = (1 - self.share) ** asked
        nothing = RoundKind(batch, 1, batch, (name,))
        if idle == 1:
            return nothing, costs.seconds(nothing)
        width = min(1 + max(1, ceil(self.drafted / self.share)), widths[-1])
        rows = batch + max(1, ceil(asked * self.drafted / (1 - idle)))
        kind = costs.padded_kind(RoundKind(batch, width, min(rows, batch * width), (name,)), widths)
        return kind, idle * costs.seconds(nothing) + (1 - idle) * costs.seconds(kind)


_FIRST = OwnDrafts(0.5, 2.0, 0.5)
"""The prior, to which a drafter that is not asked for long returns: good enough to be worth a try."""


class OwnFigures:
    """Running means of the drafts of each drafter that limits itself."""

    def __init__(self, limiting: frozenset[int]) -> None:
        """limiting: those drafters, by index."""
        self._known = dict.fromkeys(limiting, _FIRST)
        self._late = dict.fromkeys(limiting, _FIRST)
        """The same over the last few rounds in which each was asked."""

    def of(self, drafter: int) -> OwnDrafts | None:
        """A drafter's figures; None: it does not limit itself."""
        return self._known.get(drafter)

    def note_rounds(self, drafter: int, drafted: Seq[int], accepted: Seq[Seq[int]]) -> None:
        """Note rounds in which it was asked. drafted: tokens of each sequence; accepted: [rounds][sequences]."""
        rounds = len(accepted)
        mean = sum(map(sum, accepted)) / rounds
        count = len(drafted)
        if drafter in self._known and count:
            means = OwnDrafts(sum(n > 0 for n in drafted) / count, sum(drafted) / count, mean / count)
            self._move(self._known, drafter, means, 1 - (1 - _ROUND_PART) ** rounds)
            self._move(self._late, drafter, means, 1 - (1 - _LATE_PART) ** rounds)

    def note_guesses(
        self, drafter: int, lengths: Seq[int], accepted: Seq[int], rounds: Seq[float] = (), *, rare: bool = False
    ) -> None:
        """Note what the drafter would have drafted, as judged by the text that came. rounds: as of the controller.

        A guess of one token that did not come counts as none: it may mean that nothing was found. A drafter that is
        asked learns how far its drafts are right, so of long guesses only `_BEYOND` tokens count beyond the right ones.
        """
        if drafter not in self._known:
            return
        found = [min(n, right + _BEYOND) if n > 1 or right else 0 for n, right in zip(lengths, accepted, strict=True)]
        weights = np.array(rounds or [1.0] * len(found))
        means = np.array([np.sign(found), found, accepted]) @ (weights / weights.sum())  # [3]
        part = max(_RARE_PART if rare else 0.0, 1 - (1 - _GUESS_PART) ** len(found))
        self._move(self._known, drafter, OwnDrafts(*means.tolist()), part)

    def fade(self, drafter: int, part: float) -> None:
        """Forget this part of what is known of a drafter, so that one that was bad is asked again."""
        if drafter in self._known:
            self._known[drafter] = self._known[drafter].nearer(_FIRST, part)

    def forget_before_late(self, drafter: int) -> None:
        """Replace a drafter's figures by those of its last few rounds: drafts have lost more than by bad luck."""
        if drafter in self._known:
            self._known[drafter] = self._late[drafter]

    @staticmethod
    def _move(known: dict[int, OwnDrafts], drafter: int, means: OwnDrafts, part: float) -> None:
        known[drafter] = known[drafter].nearer(means, part)
