"""When a drafter that no plan asks is tried again, for how many rounds and for whom: at a bounded share of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from outrider.control.choose import best_plan_of
from outrider.control.costs import RoundCosts
from outrider.control.plan import Ints, Outlook, Plan

_ROUNDS = 5
"""A probe lasts so many rounds where rounds overlap: in the first three, drafters catch up with the text."""
_SEEN_ROUNDS = 4
"""The same where they do not: in the first, a head reads what it has not."""
_SHORT, _LONG, _LOSS = 2, 16, 2.0
"""Where it is known what such rounds take, it lasts for so many, at most until it lost so much of a round: what costs
little tells more, and catching up costs the same."""
_SEQUENCES, _OVERLAPPED_SEQUENCES = 4, 16
"""A probe of a draft model, which may have much text to catch up with, is of so many sequences, in turn; where rounds
overlap every probe is of so many: fewer take no less where a pass is as wide for all."""
_SHARE, _RESTING_SHARE = 0.01, 0.004
"""The share of time that probing may cost, and where nobody drafts."""
_MIN_REST, _MAX_REST = 16, 4096
"""Rounds between two."""
_AT_START, _DRAFTS_AT_START = 3, 12
"""A drafter is tried so often before it is judged, or until so many of its drafts are known."""


@dataclass(slots=True)
class _Tried:
    """When a drafter was tried last, and what came of it."""

    times: int = 0
    round: int = 0
    rest: int = _MIN_REST
    """Rounds that must pass before another time is thought of."""
    lost: float = 0.0
    """In rounds of plain decoding; what the plan in use would have brought counts, drafts or none."""


class Probes:
    """The probes of a controller's drafters. Each has its part of the share: one that costs much keeps off no other."""

    def __init__(self, includes: Seq[frozenset[int]], costs: RoundCosts, widths: Seq[int]) -> None:
        """includes: of each drafter, others that take part in what it drafts. widths: as of the controller."""
        self.includes, self.costs, self.widths = includes, costs, widths
        self._tried = [_Tried() for _ in includes]
        self._last = _Tried()
        """The one of the last probe."""
        self._round = 0
        self.rate = 0.0
        """Tokens a second of the plan that the last probe took the place of."""

    def count_rounds(self, rounds: int = 1) -> None:
        self._round += rounds

    def charge(self, tokens: int, seconds: float, batch: int) -> None:
        """Note what a round of a probe brought and took: to begin costs more than it should lose.

        A round that brought more makes up for one that brought less: how many tokens come is partly luck.
        """
        self._last.lost += (self.rate * seconds - tokens) / batch

    def due(self, outlooks: Seq[Outlook], plan: Plan, drafts: Seq[int]) -> Plan | None:
        """The best plan of a drafter that is left out and due to be tried, who was least often; None: take the plan.

        drafts: how many of each are known.
        """
        used = set(plan.drafters)
        left_out = [i for i, each in enumerate(outlooks) if i not in used and each.budgets.any()]
        for at in sorted(left_out, key=lambda i: self._tried[i].times):
            probe = self._probe(at, outlooks, plan, new=self._is_new(at, drafts[at]))
            if probe is not None:
                return probe
        return None

    def _probe(self, at: int, outlooks: Seq[Outlook], plan: Plan, *, new: bool) -> Plan | None:
        """The best plan of one drafter, where it is due. new: it has still to be tried before it is judged."""
        tried = self._tried[at]
        share = (_SHARE if plan.asks else _RESTING_SHARE) / len(self._tried)
        rounds = self._round - tried.round
        if not new and rounds < max(tried.rest, min(tried.lost / share, _MAX_REST)):  # less than nothing: it gained
            return None
        asked = replace(outlooks[at], budgets=self._budgets(outlooks[at], tried.times))
        probe = best_plan_of([*outlooks[:at], asked, *outlooks[at + 1 :]], at, self.costs, self.widths)
        rate, used = _weighted_rate(plan, outlooks), {*plan.drafters} - {-1}
        whole = bool(used) and used <= self.includes[at]  # it drafts all that the plan does, and costs little
        part = any(at in self.includes[i] for i in used)  # it may be what brings the plan's tokens, and draft farther
        promised = max(probe.rate * asked.weight, rate * plan.seconds / probe.seconds if whole or part else 0.0)
        loss = max(0.0, 1 - promised / rate)
        length = self._length(probe, loss)
        tried.rest = min(int(length * loss / share), _MAX_REST)
        if not new and rounds < tried.rest:
            return None
        self._last, self.rate = _Tried(tried.times + 1, self._round), rate
        self._tried[at] = self._last
        return replace(probe, probe=True, rounds=length)

    def _is_new(self, member: int, drafts: int) -> bool:
        """Whether a drafter, of which so many drafts are known, has still to be tried before it is judged."""
        return self._tried[member].times < _AT_START and drafts < _DRAFTS_AT_START

    def _length(self, probe: Plan, loss: float) -> int:
        """In rounds. loss: the part of a round that each should lose."""
        if not self.widths:
            return _SEEN_ROUNDS
        if not self.costs.knows_asking(probe.kind):
            return _ROUNDS
        return max(_SHORT, int(min(_LONG, _LOSS / max(loss, 1e-9))))

    def _budgets(self, outlook: Outlook, times: int) -> Ints:
        """Those of the sequences that take part. times: how often it was tried before."""
        able = np.flatnonzero(outlook.budgets)
        most = _OVERLAPPED_SEQUENCES if self.widths else _SEQUENCES
        if not (outlook.runs_model or self.widths) or len(able) <= most:
            return outlook.budgets
        turn = np.roll(able, -most * times)[:most]
        chosen = np.zeros_like(outlook.budgets)
        chosen[turn] = outlook.budgets[turn]
        return chosen


def _weighted_rate(plan: Plan, outlooks: Seq[Outlook]) -> float:
    """The rate that a plan promises, by the weight of its drafters."""
    return plan.rate * min((outlooks[i].weight for i in {*plan.drafters} - {-1}), default=1.0)
