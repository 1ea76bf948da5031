"""How long a controller's plan holds: deciding takes a bounded share of the time, whatever it costs."""

from __future__ import annotations

import time
from typing import cast

from outrider.control.choose import Plan

ASKING_SHARE = 0.02
"""The share of the time that planning may take where drafts are made."""
SETTLED_SHARE = 0.004
"""The same where only a drafter is asked whose drafts are seen before they are scored."""
RESTING_SHARE, NEWCOMER_SHARE = 0.0025, 0.005
"""The share of planning and asking where nobody drafts: for the same sequences, and for others."""

_FIRST_ROUNDS, _MAX_SLOWER = 4, 1.1
"""A plan with drafts whose first rounds take so much longer than it expects is made anew."""

_BRIEF_ROUNDS = 4
"""A plan that holds for fewer rounds is brief."""


class Allowance:
    """Work that may take a share of the time."""

    def __init__(self, share: float) -> None:
        self._share, self._next = share, 0.0

    @property
    def due(self) -> bool:
        return time.perf_counter() >= self._next

    def spend(self, began: float) -> None:
        """Note work that began at this time and ends now."""
        now = time.perf_counter()
        self._next = now + _rest(now - began, self._share)


class KeptPlan:
    """A controller's last plan, and for how long it holds."""

    def __init__(self) -> None:
        self.seq_ids: list[int] = []
        self.plan: Plan | None = None
        self.is_new = False
        """No round has gone by it yet."""
        self.asks = False
        """As `Plan.asks`."""
        self._rounds = 0
        """It holds for so many rounds more, however long they take."""
        self._until = self._until_for_others = 0.0
        """When it ends: for the same sequences, and where there are others."""
        self._seconds = 0.0
        """What it took to make."""
        self.is_brief = True
        """It holds for a few rounds, so that what a drafter states of a draft counts for the next plan."""
        self._told: list[float] = []
        """What the first rounds took that went by it, or by one alike before it, over what it expects."""

    def holds_for(self, seq_ids: list[int]) -> bool:
        """Whether the next round, of these sequences, goes by it."""
        if self.plan is None:
            return False
        if self.is_new or self._rounds:
            return True
        return time.perf_counter() < (self._until if seq_ids == self.seq_ids else self._until_for_others)

    def begin(self, seq_ids: list[int], plan: Plan, began: float) -> None:
        """A new plan for these sequences, begun at that time."""
        if self.plan is None or plan.lengths != self.plan.lengths:
            self._told = []
        self.seq_ids, self.plan, self.asks = seq_ids, plan, plan.asks
        self.is_new, self._rounds = not plan.rounds, plan.rounds
        self._until = self._until_for_others = 0.0  # those of a plan before it do not count
        self._seconds = time.perf_counter() - began

    def move(self, seq_ids: list[int], plan: Plan) -> None:
        """The same plan for other sequences."""
        self.seq_ids, self.plan, self.asks = seq_ids, plan, plan.asks

    def note_seconds(self, plan: Plan, seconds: float) -> None:
        """Note what a round of this plan took; 0 says nothing. A plan with drafts ends if its first rounds take longer.

        What they took is known by then to whoever makes the next.
        """
        if seconds and self.asks and len(self._told) < _FIRST_ROUNDS and plan.lengths == cast(Plan, self.plan).lengths:
            self._told.append(seconds / plan.seconds)
            if len(self._told) == _FIRST_ROUNDS and sum(self._told) > _MAX_SLOWER * _FIRST_ROUNDS:
                self._until = self._until_for_others = 0.0

    def use(self, began: float) -> None:
        """A round goes by the plan; that was begun at this time, and whoever was to be asked is asked."""
        if not self.is_new:
            self._rounds = max(0, self._rounds - 1)
            return
        self.is_new = False
        plan, now = cast(Plan, self.plan), time.perf_counter()
        if plan.probe:
            self._until = self._until_for_others = now
        elif plan.asks:
            share = SETTLED_SHARE if plan.settled else ASKING_SHARE
            self._until = self._until_for_others = now + _rest(self._seconds, share)
            self.is_brief = self._until - now < _BRIEF_ROUNDS * plan.seconds
        else:
            self._until = now + _rest(now - began, RESTING_SHARE)
            self._until_for_others = now + _rest(now - began, NEWCOMER_SHARE)


def _rest(seconds: float, share: float) -> float:
    """How long to rest after work of so long, for it to take this share of the time."""
    return seconds / share - seconds
