"""A CPU for replay.py: rounds do not overlap, passes cost by their rows, and drafts are seen before they are scored.

Times are those of SmolLM2-135M in 4 bits on two x86 cores with VNNI, with the block head that is shipped for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from replayed_head import TOKENS, Known, recorded_draft
from replayed_target import CLOCK, ReplayedTarget, Times

from outrider.control.controller import Controller
from outrider.control.costs import PassTable, RoundCosts
from outrider.core.device_row import ConfidenceRow
from outrider.core.draft import Draft
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence, Span
from outrider.drafters.base import Drafter, RoundView, Traits
from outrider.drafters.suffix import Suffix, SuffixConfig
from outrider.engine.adaptive import member_of

MIN_PROB = 0.25
"""As lookups have it on a CPU."""


@dataclass(frozen=True)
class CpuTimes:
    """Milliseconds."""

    rows: Mapping[int, float]
    """Of passes, by all their rows."""
    draft: float = 2.0
    draft_token: float = 0.1
    """Of a head's draft for each sequence, and of each token it is asked for."""
    read: float = 0.3
    read_token: float = 0.03
    """Where a head has missed more than MISSED tokens of a text: once, and for each of them."""
    lookup: float = 0.25
    """Of a lookup, for each sequence."""
    plan: float = 0.6
    review: float = 0.15
    """Of the host's deciding: a plan, and what is decided once drafts are seen, for each time."""
    host: float = 0.35
    ending: float = 0.5
    """Of the host's work in any round, and where a text ends."""
    prompt_token: float = 0.35
    stall: float = 12.0
    stalls: float = 0.01
    """A stall, and how many passes have one."""


CPU_TIMES = CpuTimes(
    {1: 6.2, 2: 6.9, 3: 7.6, 4: 8.3, 6: 9.3, 8: 10.3, 12: 13.0, 16: 15.6, 32: 26.0, 64: 48.0, 256: 190.0}
)
MISSED = 8


class CpuTarget(ReplayedTarget):
    """As `ReplayedTarget`, where the host waits for every pass."""

    asynchronous = joins = False

    def __init__(self, batch: int, vocab_size: int, noise: float, times: CpuTimes = CPU_TIMES) -> None:
        """noise: the standard deviation of the logarithm of a pass's time."""
        super().__init__(batch, vocab_size, Times({}, {}, launch=0.0))
        self.cpu, self.noise = times, noise
        self.disturbed = 0.0
        """Seconds that passes took longer than the table says."""

    def pass_seconds(self, rows: int) -> float:
        return float(np.interp(rows, [*self.cpu.rows], [*self.cpu.rows.values()])) / 1e3

    def _launch(self, spans: Seq[Span]) -> None:
        decoding = [span for span in spans if len(span.tokens) == 1]
        seconds = self.cpu.prompt_token / 1e3 * sum(len(span.tokens) for span in spans if len(span.tokens) > 1)
        if decoding:
            seconds += self.pass_seconds(sum(1 + len(span.draft) for span in decoding))
        stall = self.cpu.stall / 1e3 if self._noise.random() < self.cpu.stalls else 0.0
        excess = seconds * (self._noise.lognormvariate(0, self.noise) - 1) + stall
        CLOCK.now += seconds + excess
        self.disturbed += excess

    def pass_shapes(self, batch: int, width: int) -> list[tuple[int, int]]:
        return [(1, rows) for rows in (1, 2, 3, 4, 5, 6, 8, 12, 16)]

    def packed_shapes(self, batch: int, width: int) -> list[tuple[int, int, int]]:
        return []


class CpuHead(Drafter):
    """Drafts what a recorded head did, and takes the time of the table."""

    def __init__(self, target: CpuTarget, known: Mapping[int, Known], tokens: int = TOKENS) -> None:
        """known: by sequence. tokens: max tokens of a draft."""
        self.traits = Traits(name="block", max_tokens=tokens, runs_model=True)
        self.target, self.known, self.lengths = target, known, (tokens,)
        self._read: dict[int, int] = {}
        """By sequence: the tokens that the head has read."""

    def propose(self, view: RoundView) -> list[Draft]:
        times, longest = self.target.cpu, max(view.budgets)
        drafts: list[Draft] = []
        seconds = 0.0
        for seq, budget in zip(view.seqs, view.budgets, strict=True):
            length = len(seq.tokens)
            missed = length - self._read.get(seq.id, 0)
            seconds += times.draft + times.draft_token * longest
            seconds += times.read + times.read_token * missed if missed > MISSED else 0.0
            self._read[seq.id] = length
            tokens, chances = recorded_draft(self.known[seq.id], self.target.texts[seq.id], length)
            confidence = ConfidenceRow(HostCopy(torch.tensor([chances[:longest]], dtype=torch.float32)), 0)
            drafts.append(Draft(tuple(tokens[:budget]), source="block", confidence=confidence))
        CLOCK.now += seconds / 1e3
        return drafts

    def forget(self, seq: Sequence) -> None:
        self._read.pop(seq.id, None)


class CpuLookups(Suffix):
    """The real lookups, which take the time of the table."""

    def __init__(self, target: CpuTarget) -> None:
        super().__init__(SuffixConfig(), MIN_PROB)
        self._lookup = target.cpu.lookup / 1e3

    def propose(self, view: RoundView) -> list[Draft]:
        CLOCK.now += self._lookup * len(view.seqs)
        return super().propose(view)


def cpu_controller(target: CpuTarget, parts: Seq[Drafter]) -> Controller:
    """As `CostMeter` makes one, from the table."""
    passes = PassTable({(1, rows): target.pass_seconds(rows) for _, rows in target.pass_shapes(1, 16)})
    times = target.cpu
    draft = (times.draft + TOKENS * times.draft_token) / TOKENS / 1e3
    table = PassTable({(1, 1): draft, (8, 1): 8 * draft})
    steps = {each.traits.name: table for each in parts if each.traits.runs_model}
    controller = Controller([member_of(each, target, parts) for each in parts], RoundCosts(passes, steps))
    for name, seconds in (("plan", times.plan), ("settle", times.review), ("choose_drafts", times.review)):
        setattr(controller, name, _timed(getattr(controller, name), seconds / 1e3))
    return controller


def _timed(decide: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        CLOCK.now += seconds
        return decide(*args)

    return timed
