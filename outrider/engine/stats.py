"""The statistics: what was drafted, what was accepted, what it cost, and what the numbers mean.

α  chance that a draft token is accepted, given that those before it were
γ  tokens drafted a round
τ  tokens emitted a target pass, the target's own included
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from outrider.control.decisions import Decisions
from outrider.control.limits import PassLimits
from outrider.engine.judged import JudgedDraft


@dataclass(slots=True)
class Tally:
    """Drafts and how many of their tokens were accepted, for one drafter or for all."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    """Rounds in which a draft token was rejected."""
    emitted: int = 0
    by_depth: list[int] = field(default_factory=list[int])
    """The number of drafts with exactly 0, 1, 2, ... levels."""
    by_accepted: list[int] = field(default_factory=list[int])
    """The number of drafts of which exactly 0, 1, 2, ... tokens were accepted."""

    def count(self, judged: JudgedDraft) -> None:
        """Add a round."""
        _, drafted, depth, accepted, emitted, rejected, _, _ = judged
        self.rounds += 1
        self.emitted += emitted
        if not drafted:
            return
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += rejected
        if depth >= len(self.by_depth):
            _extend(self.by_depth, depth + 1)
            _extend(self.by_accepted, depth + 1)
        self.by_depth[depth] += 1
        self.by_accepted[accepted] += 1

    def add(self, other: Tally) -> None:
        for name in ("rounds", "drafted", "accepted", "rejected", "emitted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("by_depth", "by_accepted"):
            ours, theirs = getattr(self, name), getattr(other, name)
            _extend(ours, len(theirs))
            for i, n in enumerate(theirs):
                ours[i] += n

    @property
    def drafted_at(self) -> list[int]:
        """Rounds whose draft reached each depth."""
        return _or_more(self.by_depth)

    @property
    def accepted_at(self) -> list[int]:
        """Rounds in which a token of each depth was accepted."""
        return _or_more(self.by_accepted)

    @property
    def alpha(self) -> float:
        return _ratio(self.accepted, self.accepted + self.rejected)

    @property
    def gamma(self) -> float:
        return _ratio(self.drafted, self.rounds)

    @property
    def tau(self) -> float:
        return _ratio(self.emitted, self.rounds)

    @property
    def tau_formula(self) -> float:
        """(1 - α^(γ+1)) / (1 - α), averaged over the draft lengths there were."""
        if not self.rounds:
            return 0.0
        return 1 + sum(self.alpha ** (i + 1) * n for i, n in enumerate(self.drafted_at)) / self.rounds

    @property
    def acceptance_by_position(self) -> list[float]:
        return [_ratio(a, d) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": _ratio(self.accepted, self.drafted),
            "acceptance_by_position": self.acceptance_by_position,
            "alpha": self.alpha,
            "gamma": self.gamma,
            "tau": self.tau,
            "tau_formula": self.tau_formula,
        }


@dataclass(slots=True)
class Times:
    """Seconds of the rounds a request took part in: those that read its prompt, and the parts of the others.

    What is done while the device is busy with another round takes no time of its own: `draft` and
    `host` count only where the device waits for them.
    """

    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0
    read: float = 0.0
    rounds: int = 0
    """The number of rounds that `draft`, `verify` and `host` are the time of."""

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.host + self.read

    def add(self, other: Times) -> None:
        self.read += other.read
        self.rounds += other.rounds
        self.draft += other.draft
        self.verify += other.verify
        self.host += other.host


_SUMS = ("prompt_tokens", "shared_tokens", "tokens", "passes", "preemptions", "draft_failures", "first_tokens", "rows")


@dataclass(slots=True, repr=False)
class Stats:
    """The figures of one request, or of all that have finished."""

    prompt_tokens: int = 0
    shared_tokens: int = 0
    """Prompt tokens found in the cache."""
    tokens: int = 0
    passes: int = 0
    """Target passes, prompt reading included."""
    preemptions: int = 0
    draft_failures: int = 0
    """How often the drafter raised, or returned what is no draft; the round is then without one."""
    plain: Tally = field(default_factory=Tally)
    """Rounds without a draft."""
    drafters: dict[str, Tally] = field(default_factory=dict[str, Tally])
    times: Times = field(default_factory=Times)
    started: float = 0.0
    first: float = 0.0
    first_tokens: int = 0
    """Tokens of the first round that had any."""
    ended: float = 0.0
    decisions: Decisions | None = None
    """What the controller decided; None without one."""
    rows: int = 0
    """Rows of the target passes of its decoding rounds, those of other requests in the same passes included."""
    limits: PassLimits | None = None
    """What passes are bound by, where a controller knows it."""

    def count(self, judged: JudgedDraft) -> None:
        """Add a round to its drafter's tally, or to those without a draft."""
        tally = self.drafters.get(judged.source) if judged.drafted else self.plain
        if tally is None:
            tally = self.drafters[judged.source] = Tally()
        tally.count(judged)

    def count_tokens(self, tokens: int, now: float) -> None:
        """Note the tokens of a round."""
        if self.tokens == 0:
            self.first, self.first_tokens = now, tokens
        self.tokens += tokens
        self.ended = now

    def add(self, other: Stats) -> None:
        """Sum up requests; clocks span from the first start to the last end."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.plain.add(other.plain)
        for name, tally in other.drafters.items():
            self.drafters.setdefault(name, Tally()).add(tally)
        self.times.add(other.times)
        if other.decisions is not None:
            self.decisions = self.decisions or Decisions()
            self.decisions.add(other.decisions)
        self.limits = self.limits or other.limits
        self.started = min(filter(None, (self.started, other.started)), default=0.0)
        self.first = min(filter(None, (self.first, other.first)), default=0.0)
        self.ended = max(self.ended, other.ended)

    @property
    def all(self) -> Tally:
        """All rounds, whoever drafted: summed when it is read, for that is seldom."""
        out = Tally()
        for tally in (self.plain, *self.drafters.values()):
            out.add(tally)
        return out

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def tokens_per_second(self) -> float:
        """All tokens over the whole time, prompt reading included."""
        return _ratio(self.tokens, self.seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first round that had any, over the time since."""
        return _ratio(self.tokens - self.first_tokens, self.ended - self.first)

    @property
    def alpha(self) -> float:
        """α of all drafters; see the top of this file, also for γ and τ."""
        return self.all.alpha

    @property
    def gamma(self) -> float:
        return self.all.gamma

    @property
    def tau(self) -> float:
        return self.all.tau

    def decisions_dict(self) -> dict[str, object] | None:
        """What was decided, and whether its passes were bound by memory or by arithmetic; None without a controller."""
        if self.decisions is None:
            return None
        mean = _ratio(self.rows, self.times.rounds)
        load = {} if self.limits is None or not mean else {"load": self.limits.describe(mean)}
        return {**self.decisions.as_dict(), **load}

    def summary(self) -> str:
        """The main figures in one line."""
        drafts = f"α {self.alpha:.2f}, γ {self.gamma:.1f}, τ {self.tau:.2f}"
        return f"{self.tokens} tokens, {self.passes} passes, {drafts}, {self.decode_tokens_per_second:.1f} tok/s"

    def __repr__(self) -> str:
        return f"<Stats: {self.summary()}>"

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "shared_tokens": self.shared_tokens,
            "tokens": self.tokens,
            "passes": self.passes,
            "preemptions": self.preemptions,
            "draft_failures": self.draft_failures,
            **self.all.as_dict(),
            "drafters": {name: tally.as_dict() for name, tally in self.drafters.items()},
            "seconds": self.seconds,
            "time_to_first_token": max(0.0, self.first - self.started),
            "draft_seconds": self.times.draft,
            "verify_seconds": self.times.verify,
            "host_seconds": self.times.host,
            "read_seconds": self.times.read,
            "tokens_per_second": self.tokens_per_second,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            **({} if (decisions := self.decisions_dict()) is None else {"decisions": decisions}),
        }


def total(parts: Iterable[Stats]) -> Stats:
    out = Stats()
    for part in parts:
        out.add(part)
    return out


ENOUGH = 20
"""Draft tokens that were accepted or rejected, below which an acceptance rate says little."""


def meaning(alpha: float, judged: int) -> str:
    """What an acceptance rate says about a drafter. judged: the number of accepted and rejected tokens it is from."""
    if judged < ENOUGH:
        return f"{judged} tokens are too few to say more" if judged != 1 else "one token is too few to say more"
    if alpha >= 0.7:
        return "excellent"
    return "worthwhile" if alpha >= 0.5 else "look for another drafter"


def _extend(counts: list[int], size: int) -> None:
    counts.extend([0] * (size - len(counts)))


def _or_more(counts: list[int]) -> list[int]:
    """From the numbers of those with exactly 0, 1, 2, ... to the numbers of those with at least 1, 2, ..."""
    return list(accumulate(reversed(counts[1:])))[::-1]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0
