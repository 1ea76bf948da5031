"""What kind of round a plan became, and what such a round takes beyond one without drafts."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from typing import NamedTuple

from outrider.control.costs import RoundCosts, RoundKind
from outrider.control.plan import Plan

_PRICE_ROUNDS, _MAX_PRICES = 16, 256
"""The number of rounds after which a price is computed anew, and the max number of prices that are kept."""


class Price(NamedTuple):
    """What a kind of round takes."""

    until: int
    """The round from which on the price must be computed anew."""
    plain: float
    """Seconds of a round without drafts."""
    extra: float
    """Seconds that this kind of round takes beyond `plain`."""


FREE = Price(sys.maxsize, 0.0, 0.0)
"""The price of a round in which drafters were asked at no cost and found nothing."""


class Prices:
    """The prices of kinds of rounds by `RoundCosts`, kept for some rounds so that not every round computes them."""

    def __init__(self, costs: RoundCosts, widths: Seq[int]) -> None:
        """widths: as of the controller."""
        self.costs, self.widths = costs, widths
        self._known: dict[RoundKind, Price] = {}
        self._seconds: dict[RoundKind, float] = {}
        """A cache of `seconds`, and the round from which on it is computed anew."""
        self._until = 0
        self._last: tuple[RoundKind, Seq[int], RoundKind] | None = None
        """A cache of `kind_of`: the kind of the last plan, what was drafted, and what kind of round it became."""

    def of(self, kind: RoundKind, now: int) -> Price:
        """The price of such a round. now: the number of the current round."""
        known = self._known.get(kind)
        if known is None or now >= known.until:
            plain = self.costs.seconds(RoundKind(kind.batch, 1, kind.batch))
            if len(self._known) >= _MAX_PRICES:
                self._known.clear()
            known = self._known[kind] = Price(now + _PRICE_ROUNDS, plain, self.costs.seconds(kind) - plain)
        return known

    def seconds(self, kind: RoundKind, now: int) -> float:
        """As `RoundCosts.shared_seconds`, kept for some rounds."""
        if now >= self._until:
            self._seconds.clear()
            self._until = now + _PRICE_ROUNDS
        known = self._seconds.get(kind)
        if known is None:
            known = self._seconds[kind] = self.costs.shared_seconds(kind)
        return known

    def kind_of(self, plan: Plan, drafted: Seq[int]) -> RoundKind:
        """What kind of round a plan became: its pass is no wider than what was drafted."""
        if self._last is None or self._last[0] is not plan.kind or self._last[1] != drafted:
            self._last = plan.kind, drafted, self._made_kind(plan, drafted)
        return self._last[2]

    def _made_kind(self, plan: Plan, drafted: Seq[int]) -> RoundKind:
        width, rows = 1 + max(drafted, default=0), len(drafted) + sum(drafted)
        if width == 1 and not (plan.asks and (self.widths or plan.kind.steps)):
            return RoundKind(rows, 1, rows)
        # a model, or any drafter where rounds overlap, has cost time though nothing is scored
        kind = RoundKind(len(drafted), width, rows, plan.kind.drafters, plan.kind.steps)
        return kind if width == 1 else self.costs.padded_kind(kind, self.widths)
