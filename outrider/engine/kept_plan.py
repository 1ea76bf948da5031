"""How long a controller's plan holds: deciding takes a bounded share of the time, whatever it costs."""

from __future__ import annotations

from typing import cast

from outrider.control.costs import size_of
from outrider.control.plan import Plan
from outrider.control.trials import REST_ROUNDS
from outrider.engine.host_time import HostTime, rest_after

ASKING_SHARE = 0.01
"""The share of the time that planning may take where drafts are made."""
SETTLED_SHARE = 0.004
"""The same where the drafter that runs no model is asked first, and then it is settled who drafts."""
RESTING_SHARE = 0.005
"""Where nobody drafts, the share of the time that wasted work may take: plans, probes, and drafts that did not pay."""
NEWCOMER_SHARE = 0.003
"""The share that plans for newcomers may take during a rest, where drafts paid of late or the request is alone."""
_WORTH_DECAY = 0.97
"""Decay for each round with drafts of what they gained: about the last 33 count."""
_MAX_REST, _SHORT_REST = 512, 128
"""The max rounds of a rest, however much was wasted before it; and the same where drafts paid of late."""
_MOST_SHARE, _LONGER = 0.01, 4
"""Where more than this share of the time would be wasted, a rest may last this many times as long: what is tried may
take longer than many rounds."""

_FIRST_ROUNDS = 8
"""After this many rounds of a plan with drafts, then twice as many and so on, it is checked whether the drafts paid."""

_STOP = 5.0
"""They are checked sooner if they lost this many tokens, times the square root of the batch: more than bad luck."""

_PROBE_STOP = 2.5
"""A probe ends before its time if it lost as many tokens as this many rounds of plain decoding bring."""

_BRIEF_ROUNDS = 4
"""A plan that holds for fewer rounds is brief."""


class KeptPlan:
    """A controller's last plan, and for how long it holds."""

    def __init__(self, host: HostTime, trials: bool = False) -> None:
        """trials: plans without drafts are made anew every few rounds, whatever was wasted: the drafter that is asked
        first is tried then, at next to no cost."""
        self._host, self._trials = host, trials
        self.seq_ids: list[int] = []
        self.plan: Plan | None = None
        self.is_new = False
        """No round has used the plan yet; False at once for a plan with `Plan.rounds`."""
        self.asks = False
        """As `Plan.asks`."""
        self._rounds = 0
        """The number of further rounds for which the plan holds, however long they take."""
        self._until = self._repeated_until = 0.0
        """When the plan ends; and when it ends while rounds are repeated, which a new plan would interrupt."""
        self._rests: dict[int, float] = {}
        """By `size_of` the batch: until when a rest goes on though newcomers have come."""
        self._spent = 0.0
        """The seconds wasted since the last rest began: by plans, probes, and drafts that did not pay."""
        self._others = False
        """There are sequences that the plan was not made for."""
        self._worth = 0.0
        """The tokens that drafts gained of late over plain decoding, probes left out."""
        self._seconds = 0.0
        """The seconds that it took to make the plan."""
        self._in_vain = 0.0
        """The tokens that a probe lost, compared with the plan whose place it takes."""
        self.is_brief = True
        """The plan holds for few rounds, so that the confidences of its drafts are of use for the next plan."""
        self._tried, self._due = 0, _FIRST_ROUNDS
        """The number of rounds of this plan and of those before it with the same drafters; when they are checked."""
        self._gain = 0.0
        """The tokens that these rounds gained since they were last checked, compared with `rate` of `note`."""

    @property
    def rests(self) -> bool:
        """Whether it is known that nobody is asked in the next round."""
        return not self.asks and self.goes_on

    @property
    def goes_on(self) -> bool:
        """Whether the next round, of the same sequences, uses the same plan, so that the last one can be repeated."""
        if self.plan is None or self.is_new or self._others:
            return False
        return self._rounds > 0 or self._host.now() < self._repeated_until

    def rest_of(self, seq_ids: list[int]) -> Plan | None:
        """The plan, if it asks nobody and was made for these sequences; else None. Notes whether there are others."""
        self._others = self._others or seq_ids != self.seq_ids
        return None if self._others or self.asks else self.plan

    def holds_for(self, seq_ids: list[int]) -> bool:
        """Whether the plan holds for the next round, of these sequences."""
        if self.plan is None:
            return False
        if self.is_new or self._rounds:
            return True
        until = self._until
        if not self.asks and seq_ids != self.seq_ids and not {*seq_ids} <= {*self.seq_ids}:
            until = self._rests.get(size_of(len(seq_ids)), 0.0)
        return self._host.now() < until

    def begin(self, seq_ids: list[int], plan: Plan, began: float) -> None:
        """Take a new plan for these sequences. began: when the host began to make it."""
        if self.plan is None or plan.kind.drafters != self.plan.kind.drafters:
            self._tried, self._due, self._gain = 0, _FIRST_ROUNDS, 0.0
        self.seq_ids, self.plan, self.asks, self._others = seq_ids, plan, plan.asks, False
        self.is_new, self._rounds = not plan.rounds, plan.rounds
        if plan.rounds:  # else it is known once the plan is used
            self.is_brief = plan.rounds < _BRIEF_ROUNDS
        self._hold(0.0)
        self._in_vain = 0.0  # a loss of the plan before does not count
        self._seconds = self._host.charge(began)
        self._spent += self._seconds

    def move(self, seq_ids: list[int], plan: Plan) -> None:
        """Take the same plan, moved to other sequences."""
        self.seq_ids, self.plan, self.asks, self._others = seq_ids, plan, plan.asks, False
        if not plan.asks:
            self._hold(self._rests.get(size_of(len(seq_ids)), self._until))

    def note(self, plan: Plan, tokens: int, seconds: float, rate: float, rounds: int = 1) -> None:
        """Note the tokens and the seconds of rounds of this plan, and end a plan with drafts if they brought less.

        rate: the tokens a second that there would be without it: of plain decoding, or for a probe, of the plan whose
        place it takes if that is higher. The controller must know of these rounds already, for the next plan.
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
        """Let the plan end at `until`, and while rounds are repeated at `repeated_until`, or `until` if not given."""
        self._until = until
        self._repeated_until = until if repeated_until is None else repeated_until

    def end_rest(self) -> None:
        """End a rest, if there is one: a drafter should be asked, so the next round is planned."""
        if not self.asks:
            self._hold(0.0)
            self._rests.clear()

    @property
    def tells(self) -> bool:
        """Whether the next round is one to learn from, as `Plan.rounds` says."""
        return self._rounds > 0

    def use(self) -> None:
        """Note that a round uses the plan; with the first, it is known for how long the plan holds."""
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
            if self._trials:
                rest = min(rest, max(REST_ROUNDS * plan.seconds, rest_after(self._seconds, RESTING_SHARE)))
            self._hold(now + rest)
            soon = self._worth > 0 or len(self.seq_ids) == 1  # a single request: no other tells anything of its text
            others = min(rest, rest_after(self._seconds, NEWCOMER_SHARE)) if soon else rest
            self._rests[size_of(len(self.seq_ids))] = now + others
            self._spent = 0.0
