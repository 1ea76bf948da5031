"""How long a controller's plan holds: deciding takes a bounded share of the time, whatever it costs."""

from __future__ import annotations

from typing import cast

from outrider.control.costs import size_of
from outrider.control.plan import Plan
from outrider.engine.host_time import HostTime, rest_after

ASKING_SHARE = 0.01
"""The share of the time that planning may take where drafts are made."""
SETTLED_SHARE = 0.004
"""The same where a drafter is looked at before it is settled who drafts."""
RESTING_SHARE = 0.005
"""The share of all that was in vain where nobody drafts: planning, probes, and drafts that did not pay."""
NEWCOMER_SHARE = 0.003
"""The share of planning alone for others that come meanwhile, where drafts did pay of late, or one at a time comes."""
_WORTH_DECAY = 0.97
"""Of late: in about 33 rounds with drafts."""
_MAX_REST, _SHORT_REST = 512, 128
"""Rounds that nobody is asked for at most, whatever was in vain before; and where drafts did pay of late."""
_MOST_SHARE, _LONGER = 0.01, 4
"""Up to so many times as many where more of the time would be in vain: what is tried may take longer than many rounds.
"""

_FIRST_ROUNDS = 8
"""After so many rounds of a plan with drafts, twice as many and so on, it is asked whether they were worth it."""

_STOP = 5.0
"""Sooner where they lost so many tokens, times the root of the batch: more than bad luck."""

_PROBE_STOP = 2.5
"""A probe ends before its time where it lost as much as so many rounds of plain decoding bring."""

_BRIEF_ROUNDS = 4
"""A plan that holds for fewer rounds is brief."""


class KeptPlan:
    """A controller's last plan, and for how long it holds."""

    def __init__(self, host: HostTime) -> None:
        self._host = host
        self.seq_ids: list[int] = []
        self.plan: Plan | None = None
        self.is_new = False
        """No round has gone by it yet."""
        self.asks = False
        """As `Plan.asks`."""
        self._rounds = 0
        """It holds for so many rounds more, however long they take."""
        self._until = self._repeated_until = 0.0
        """When it ends; and when it does where the next round would be repeated, and is launched anew for another."""
        self._rests: dict[int, float] = {}
        """By `size_of` a batch: until when newcomers are not asked for in one, where nobody drafts."""
        self._spent = 0.0
        """Seconds that were in vain since the last rest began."""
        self._others = False
        """There are sequences that it was not made for."""
        self._worth = 0.0
        """The tokens that drafts gained of late, probes left out."""
        self._seconds = 0.0
        """What it took to make."""
        self._in_vain = 0.0
        """The tokens that a probe brought less than plain decoding would have."""
        self.is_brief = True
        """It holds for a few rounds, so that what a drafter states of a draft counts for the next plan."""
        self._tried, self._due = 0, _FIRST_ROUNDS
        """Rounds with drafts that went by it, or by one alike before it, and after how many they are judged."""
        self._gain = 0.0
        """The tokens that they brought, less those of plain decoding in the same time."""

    @property
    def rests(self) -> bool:
        """Whether it is known that nobody is asked in the next round."""
        return not self.asks and self.goes_on

    @property
    def goes_on(self) -> bool:
        """Whether the next round, of the same sequences, goes by the plan of the last, and can be repeated."""
        if self.plan is None or self.is_new or self._others:
            return False
        return self._rounds > 0 or self._host.now() < self._repeated_until

    def rest_of(self, seq_ids: list[int]) -> Plan | None:
        """The plan for these sequences, nobody being asked; None where it was made for others, who are seen to soon."""
        self._others = self._others or seq_ids != self.seq_ids
        return None if self._others or self.asks else self.plan

    def holds_for(self, seq_ids: list[int]) -> bool:
        """Whether the next round, of these sequences, goes by it."""
        if self.plan is None:
            return False
        if self.is_new or self._rounds:
            return True
        until = self._until
        if not self.asks and seq_ids != self.seq_ids and not {*seq_ids} <= {*self.seq_ids}:
            until = self._rests.get(size_of(len(seq_ids)), 0.0)
        return self._host.now() < until

    def begin(self, seq_ids: list[int], plan: Plan, began: float) -> None:
        """A new plan for these sequences, begun at that time."""
        if self.plan is None or plan.kind.drafters != self.plan.kind.drafters:
            self._tried, self._due, self._gain = 0, _FIRST_ROUNDS, 0.0
        self.seq_ids, self.plan, self.asks, self._others = seq_ids, plan, plan.asks, False
        self.is_new, self._rounds = not plan.rounds, plan.rounds
        if plan.rounds:  # else it is known once the plan is used
            self.is_brief = plan.rounds < _BRIEF_ROUNDS
        self._hold(0.0)
        self._in_vain = 0.0  # that of a plan before it does not count
        self._seconds = self._host.charge(began)
        self._spent += self._seconds

    def move(self, seq_ids: list[int], plan: Plan) -> None:
        """The same plan for other sequences."""
        self.seq_ids, self.plan, self.asks, self._others = seq_ids, plan, plan.asks, False
        if not plan.asks:
            self._hold(self._rests.get(size_of(len(seq_ids)), self._until))

    def note(self, plan: Plan, tokens: int, seconds: float, rate: float, rounds: int = 1) -> None:
        """Note what rounds of this plan brought and took. rate: tokens a second that there would be else.

        That of plain decoding, or for a probe of the plan whose place it takes. A plan with drafts ends where its
        rounds brought less. What they told is known by then to whoever makes the next.
        """
        gain = tokens - rate * seconds
        if plan.probe:
            self._spent = max(0.0, self._spent - gain / rate)
            self._in_vain -= gain
            if self._in_vain > _PROBE_STOP * len(plan.lengths):
                self._rounds = 0
        else:
            self._worth = _WORTH_DECAY**rounds * self._worth + gain
        if not self.asks or plan.kind.drafters != cast(Plan, self.plan).kind.drafters:
            return
        self._tried += rounds
        self._gain += gain
        if self._tried >= self._due:
            self._due *= 2
        elif self._gain > -_STOP * len(plan.lengths) ** 0.5:
            return
        if self._gain < 0:
            self._hold(0.0)
            self._spent -= 0.0 if plan.probe else self._gain / rate
        else:
            self._spent = 0.0
        self._gain = 0.0

    def _hold(self, until: float, repeated_until: float | None = None) -> None:
        """It ends then. repeated_until: the same while rounds are repeated, if that is later."""
        self._until = until
        self._repeated_until = until if repeated_until is None else repeated_until

    def end_rest(self) -> None:
        """Nobody is asked, but somebody should be: the next round is planned."""
        if not self.asks:
            self._hold(0.0)
            self._rests.clear()

    @property
    def tells(self) -> bool:
        """Whether the next round is one to learn from, as `Plan.rounds` says."""
        return self._rounds > 0

    def use(self) -> None:
        """A round goes by the plan."""
        if not self.is_new:
            self._rounds = max(0, self._rounds - 1)
            return
        self.is_new = False
        plan, now = cast(Plan, self.plan), self._host.now()
        if plan.probe:
            self._hold(now)
        elif plan.asks:
            share = SETTLED_SHARE if plan.settled or plan.looks else ASKING_SHARE
            launched = self._seconds + self._host.launching
            self._hold(now + rest_after(self._seconds, share), now + rest_after(launched, share))
            self.is_brief = self._until - now < _BRIEF_ROUNDS * plan.seconds
        else:
            most = _SHORT_REST if self._worth > 0 else _MAX_REST
            rest = min(rest_after(self._spent, RESTING_SHARE), most * plan.seconds)
            rest = max(rest, min(rest_after(self._spent, _MOST_SHARE), _LONGER * most * plan.seconds))
            self._hold(now + rest)
            soon = self._worth > 0 or len(self.seq_ids) == 1  # a request alone: no others tell anything of its text
            others = min(rest, rest_after(self._seconds, NEWCOMER_SHARE)) if soon else rest
            self._rests[size_of(len(self.seq_ids))] = now + others
            self._spent = 0.0
