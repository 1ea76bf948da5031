"""When a drafter that no plan asks is tried again, for how many rounds and for whom: at a bounded share of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from outrider.control.choose import Ints, Outlook, Plan, best_plan_of
from outrider.control.costs import RoundCosts

_ROUNDS = 5
"""A probe lasts so many rounds where rounds overlap: in the first three, drafters catch up with the text."""
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


class Probes:
    """The probes of a controller's drafters."""

    def __init__(self, drafters: int, costs: RoundCosts, widths: Seq[int]) -> None:
        """drafters: how many there are. widths: as of the controller."""
        self.costs, self.widths = costs, widths
        self.times = [0] * drafters
        """How often each drafter was tried."""
        self._rounds, self._rest = 0, _MIN_REST
        """Since the last one, and how many must pass before another is thought of."""
        self._lost = 0.0
        """What the last one lost, in rounds of plain decoding."""

    def count_rounds(self, rounds: int = 1) -> None:
        self._rounds += rounds

    def charge(self, lost: float) -> None:
        """Note what a round of a probe lost, in rounds of plain decoding: to begin costs more than it should lose."""
        self._lost += max(0.0, lost)

    def due(self, outlooks: Seq[Outlook], plan: Plan, drafts: Seq[int]) -> Plan | None:
        """The best plan of the drafter longest left out, where it is due to be tried; None: take the plan.

        drafts: how many of each are known.
        """
        used, new = set(plan.drafters), [self._is_new(i, known) for i, known in enumerate(drafts)]
        left_out = [i for i, each in enumerate(outlooks) if i not in used and each.budgets.any()]
        if not left_out:
            return None
        at = min(left_out, key=lambda i: self.times[i])
        starts, share = new[at], _SHARE if plan.asks else _RESTING_SHARE
        if not starts and self._rounds < max(self._rest, min(self._lost / share, _MAX_REST)):
            return None
        tried = replace(outlooks[at], budgets=self._budgets(outlooks[at], at))
        probe = best_plan_of([*outlooks[:at], tried, *outlooks[at + 1 :]], at, self.costs, self.widths)
        loss = max(0.0, 1 - probe.rate / plan.rate)
        rounds = self._length(probe, loss)
        self._rest = min(int(rounds * loss / share), _MAX_REST)
        if not starts and self._rounds < self._rest:
            return None
        self._rounds, self._rest, self._lost = 0, _MIN_REST, 0.0
        self.times[at] += 1
        return replace(probe, probe=True, rounds=rounds)

    def _is_new(self, member: int, drafts: int) -> bool:
        """Whether a drafter, of which so many drafts are known, has still to be tried before it is judged."""
        return self.times[member] < _AT_START and drafts < _DRAFTS_AT_START

    def _length(self, probe: Plan, loss: float) -> int:
        """In rounds. loss: the part of a round that each should lose."""
        if not self.widths:
            return 1
        if not self.costs.knows_asking(probe.kind):
            return _ROUNDS
        return max(_SHORT, int(min(_LONG, _LOSS / max(loss, 1e-9))))

    def _budgets(self, outlook: Outlook, member: int) -> Ints:
        """Those of the sequences that take part."""
        able = np.flatnonzero(outlook.budgets)
        most = _OVERLAPPED_SEQUENCES if self.widths else _SEQUENCES
        if not (outlook.runs_model or self.widths) or len(able) <= most:
            return outlook.budgets
        turn = np.roll(able, -most * self.times[member])[:most]
        chosen = np.zeros_like(outlook.budgets)
        chosen[turn] = outlook.budgets[turn]
        return chosen
