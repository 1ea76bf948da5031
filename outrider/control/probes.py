"""When a drafter that no plan asks is tried again, for which sequences and rounds: at a bounded share of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from outrider.control.choose import best_plan_of
from outrider.control.costs import RoundCosts
from outrider.control.plan import Ints, Outlook, Plan

_ROUNDS = 5
"""The rounds of a probe where rounds overlap: in the first three, drafters catch up with the text."""
_SEEN_ROUNDS = 4
"""The same where rounds do not overlap: in the first, a head reads what it missed of the text."""
_SHORT, _LONG, _LOSS = 2, 16, 2.0
"""Where it is known what such rounds take, a probe lasts `_SHORT` to `_LONG` rounds, in which it should lose what
`_LOSS` rounds bring: a cheap probe is longer and tells more, since catching up costs the same."""
_DRAFTS = 64
"""A probe for many sequences is shorter: this many drafts tell enough."""
_SEQUENCES, _OVERLAPPED_SEQUENCES = 4, 16
"""Max sequences of a probe of a draft model, which may have much text to catch up with; and of every probe where rounds
overlap: fewer take no less there, since a pass is as wide for all. The sequences take turns."""
_SHARE, _RESTING_SHARE = 0.01, 0.004
"""The share of the time that probes may cost where others draft, and where nobody does."""
_INCLUDING = 4
"""A drafter that drafts all that the plan's drafters do may lose this many times its share: where they have become
better, so has it, but nothing tells before it is asked."""
_MIN_REST, _MAX_REST = 16, 4096
"""The fewest and the most rounds between two probes of a drafter."""
_AT_START, _DRAFTS_AT_START = 3, 12
"""A drafter is probed whatever it may lose until it had this many probes, or this many of its drafts are known."""


@dataclass(slots=True)
class _Tried:
    """When a drafter was tried last, and what came of it."""

    times: int = 0
    round: int = 0
    rest: int = _MIN_REST
    """Rounds that must pass before its next probe is considered."""
    lost: float = 0.0
    """What the last probe lost against the plan it replaced, in tokens for each sequence: one is a plain round."""


class Probes:
    """Decides on the probes of a controller's drafters. Each has an equal part of the share: none delays another."""

    def __init__(self, includes: Seq[frozenset[int]], costs: RoundCosts, widths: Seq[int]) -> None:
        """includes: for each drafter, the others that take part in its drafts. widths: as in `Controller`."""
        self.includes, self.costs, self.widths = includes, costs, widths
        self._tried = [_Tried() for _ in includes]
        self._last = _Tried()
        """The entry of the drafter that was probed last."""
        self._round = 0
        self.rate = 0.0
        """Tokens a second of the plan that the last probe took the place of."""

    def count_rounds(self, rounds: int = 1) -> None:
        self._round += rounds

    def charge(self, tokens: int, seconds: float, batch: int) -> None:
        """Note what a probe brought and took: with catching up, it loses more than was expected of its rounds.

        A round that gained makes up for one that lost: the number of accepted tokens is partly luck.
        """
        self._last.lost += (self.rate * seconds - tokens) / batch

    def due(self, outlooks: Seq[Outlook], plan: Plan, drafts: Seq[int]) -> Plan | None:
        """The best plan of a drafter that `plan` leaves out and that is due, the least tried one first; None: none is.

        drafts: for each drafter, the number of its drafts that are known.
        """
        used = set(plan.drafters)
        left_out = [i for i, each in enumerate(outlooks) if i not in used and each.budgets.any()]
        for at in sorted(left_out, key=lambda i: self._tried[i].times):
            probe = self._probe(at, outlooks, plan, new=self._is_new(at, drafts[at]))
            if probe is not None:
                return probe
        return None

    def _probe(self, at: int, outlooks: Seq[Outlook], plan: Plan, *, new: bool) -> Plan | None:
        """The best plan of one drafter, if a probe of it is due. new: as `_is_new` says."""
        tried, used = self._tried[at], {*plan.drafters} - {-1}
        whole = bool(used) and used <= self.includes[at]  # it drafts all that the plan does, and costs little
        share = (_SHARE if plan.asks else _RESTING_SHARE) / len(self._tried) * (_INCLUDING if whole else 1)
        part = any(at in self.includes[i] for i in used)  # it may be what brings the plan's tokens, and draft farther
        rounds, wait = self._round - tried.round, tried.lost / share  # a wait below 0: it gained
        wait = max(_MIN_REST if whole else tried.rest, wait)
        if not new and rounds < min(wait, _MAX_REST):
            return None
        asked = replace(outlooks[at], budgets=self._budgets(outlooks[at], tried.times))
        probe = best_plan_of([*outlooks[:at], asked, *outlooks[at + 1 :]], at, self.costs, self.widths)
        rate = _weighted_rate(plan, outlooks)
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
        """Whether a drafter, of which this many drafts are known, is to be probed whatever it may lose."""
        return self._tried[member].times < _AT_START and drafts < _DRAFTS_AT_START

    def _length(self, probe: Plan, loss: float) -> int:
        """The number of rounds of a probe. loss: the part of a round that each of them should lose."""
        if not self.widths:
            return _SEEN_ROUNDS
        if not self.costs.knows_asking(probe.kind):
            return _ROUNDS
        return max(_SHORT, int(min(_LONG, _LOSS / max(loss, 1e-9), _DRAFTS / probe.kind.batch)))

    def _budgets(self, outlook: Outlook, times: int) -> Ints:
        """The budgets of the sequences that take part, 0 for others. times: how often the drafter was probed before."""
        able = np.flatnonzero(outlook.budgets)
        most = _OVERLAPPED_SEQUENCES if self.widths else _SEQUENCES
        if not (outlook.runs_model or self.widths) or len(able) <= most:
            return outlook.budgets
        turn = np.roll(able, -most * times)[:most]
        chosen = np.zeros_like(outlook.budgets)
        chosen[turn] = outlook.budgets[turn]
        return chosen


def _weighted_rate(plan: Plan, outlooks: Seq[Outlook]) -> float:
    """The rate that a plan promises, times the least weight of its drafters."""
    return plan.rate * min((outlooks[i].weight for i in {*plan.drafters} - {-1}), default=1.0)
