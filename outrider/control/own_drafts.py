"""Drafters that decide for each text how far they draft: what they do on average, and what asking them takes."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from math import ceil
from typing import NamedTuple

from outrider.control.costs import RoundCosts, RoundKind

_ROUND_PART = 0.02
"""How much the last round counts. A drafter that is judged by few of them is asked when it had luck, and brings less
than its figures say: then no plan of it is trusted, and drafters take turns for nothing."""
_LATE_PART = 0.12
"""The same where drafts have lost so much that what was known is of other texts: about the last eight rounds count."""
_GUESSES_PART, _BEYOND = 0.05, 2
"""The same of guesses that the text judged: they are few, and tell of many rounds. And how many tokens of a guess count
beyond those that came."""
_GUESSED = 0.8
"""What a guess brings counts as so much: rooms limit drafts that are scored, not guesses."""


class OwnDrafts(NamedTuple):
    """What a drafter that limits itself does for a sequence that it is asked for, on average."""

    share: float
    """The part of the rounds in which it drafts anything."""
    drafted: float
    accepted: float
    """Tokens, those rounds included in which there are none."""

    def nearer(self, other: OwnDrafts, part: float) -> OwnDrafts:
        """These figures, moved towards others by so great a part of the distance."""
        return OwnDrafts(*(mine + part * (its - mine) for mine, its in zip(self, other, strict=True)))

    def round(self, name: str, batch: int, asked: int, costs: RoundCosts, widths: Seq[int]) -> tuple[RoundKind, float]:
        """The round in which it drafts, asked for so many of the sequences; and what one in which it is asked takes."""
        idle = (1 - self.share) ** asked
        nothing = RoundKind(batch, 1, batch, (name,))
        if idle == 1:
            return nothing, costs.seconds(nothing)
        width = min(1 + max(1, ceil(self.drafted / self.share)), widths[-1])
        rows = batch + max(1, ceil(asked * self.drafted / (1 - idle)))
        kind = costs.padded_kind(RoundKind(batch, width, min(rows, batch * width), (name,)), widths)
        return kind, idle * costs.seconds(nothing) + (1 - idle) * costs.seconds(kind)


_FIRST = OwnDrafts(0.5, 2.0, 0.5)
"""What is assumed at first, and again of one that is not asked for long: as much as may be worth a try."""


class OwnFigures:
    """How the drafts of each drafter that limits itself are of late."""

    def __init__(self, limiting: frozenset[int]) -> None:
        """limiting: those drafters, by index."""
        self._known = dict.fromkeys(limiting, _FIRST)
        self._late = dict.fromkeys(limiting, _FIRST)
        """Of the last few rounds in which it was asked."""

    def of(self, drafter: int) -> OwnDrafts | None:
        """None: it does not limit itself."""
        return self._known.get(drafter)

    def note_rounds(self, drafter: int, drafted: Seq[int], accepted: Seq[Seq[int]]) -> None:
        """Note rounds in which it was asked. drafted: tokens of each sequence; accepted: [rounds][sequences]."""
        rounds = len(accepted)
        mean = sum(map(sum, accepted)) / rounds
        self._note(drafter, drafted, mean, 1 - (1 - _ROUND_PART) ** rounds)
        self._note(drafter, drafted, mean, 1 - (1 - _LATE_PART) ** rounds, self._late)

    def note_guesses(self, drafter: int, lengths: Seq[int], accepted: Seq[int]) -> None:
        """Note what it would have drafted, as the text judges it.

        One of one token that did not come may be that nothing was found. Where it is asked it learns how far its drafts
        come true, so that of longer ones no more count than some tokens beyond those that came.
        """
        found = [min(n, right + _BEYOND) if n > 1 or right else 0 for n, right in zip(lengths, accepted, strict=True)]
        self._note(drafter, found, _GUESSED * sum(accepted), _GUESSES_PART)

    def fade(self, drafter: int, part: float) -> None:
        """Forget so much of what is known, so that one that was bad is asked again."""
        if drafter in self._known:
            self._known[drafter] = self._known[drafter].nearer(_FIRST, part)

    def forget_before_late(self, drafter: int) -> None:
        """Go by the last few rounds alone: drafts have lost too much for bad luck."""
        if drafter in self._known:
            self._known[drafter] = self._late[drafter]

    def _note(
        self,
        drafter: int,
        drafted: Seq[int],
        accepted: float,
        part: float,
        known: dict[int, OwnDrafts] | None = None,
    ) -> None:
        """accepted: of all drafts of a round."""
        known, count = self._known if known is None else known, len(drafted)
        if drafter in known and count:
            means = OwnDrafts(sum(n > 0 for n in drafted) / count, sum(drafted) / count, accepted / count)
            known[drafter] = known[drafter].nearer(means, part)
