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

_FIRST_ROUNDS = 4
"""After so many rounds of a plan with drafts, twice as many and so on, it is asked whether they were worth it."""

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
        self._tried, self._due = 0, _FIRST_ROUNDS
        """Rounds with drafts that went by it, or by one alike before it, and after how many they are judged."""
        self._gain = 0.0
        """The tokens that they brought, less those of plain decoding in the same time."""

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
            self._tried, self._due, self._gain = 0, _FIRST_ROUNDS, 0.0
        self.seq_ids, self.plan, self.asks = seq_ids, plan, plan.asks
        self.is_new, self._rounds = not plan.rounds, plan.rounds
        self._until = self._until_for_others = 0.0  # those of a plan before it do not count
        self._seconds = time.perf_counter() - began

    def move(self, seq_ids: list[int], plan: Plan) -> None:
        """The same plan for other sequences."""
        self.seq_ids, self.plan, self.asks = seq_ids, plan, plan.asks

    def note(self, plan: Plan, tokens: int, seconds: float, plain_rate: float) -> None:
        """Note what a round of this plan brought and took; 0 seconds: that says nothing, and it took what was expected.

        A plan with drafts ends where its rounds brought less than plain decoding would have at its rate, in tokens a
        second. What they told is known by then to whoever makes the next.
        """
        if not self.asks or plan.lengths != cast(Plan, self.plan).lengths:
            return
        self._tried += 1
        self._gain += tokens - plain_rate * (seconds or plan.seconds)
        if self._tried >= self._due:
            self._due *= 2
            if self._gain < 0:
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
