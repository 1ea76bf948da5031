"""A round on its way: who takes part, what was guessed, and the logits that will decide."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence, Span
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.stats import Times
from outrider.runners.device_state import DeviceState


@dataclass(slots=True)
class InFlightRound:
    """A round that was launched and has not landed."""

    turns: list[ScheduledSequence]
    drafts: list[Draft]
    logits: Tensor
    scored: float
    """When scoring began."""
    times: Times
    decided: HostCopy | None = None
    """The target's choices, on their way; None where the verifier looks at the logits itself."""
    standing: DeviceState | None = None
    """Where the round leaves its texts, on the device; None where only the host can tell."""

    @property
    def judged(self) -> tuple[list[Sequence], list[Draft]]:
        """The sequences whose text goes on, and their drafts."""
        pairs = [(turn.seq, draft) for turn, draft in zip(self.turns, self.drafts, strict=True) if turn.complete]
        return [seq for seq, _ in pairs], [draft for _, draft in pairs]


def spans_of(turns: Seq[ScheduledSequence], drafts: Seq[Draft]) -> list[Span]:
    """What each turn reads and scores, its sequence standing where the round before left it."""
    return [_span(turn, draft) for turn, draft in zip(turns, drafts, strict=True)]


def _span(turn: ScheduledSequence, draft: Draft) -> Span:
    seq = turn.seq
    return Span(seq.id, seq.cached, tuple(seq.tokens[seq.cached : seq.cached + turn.chunk]), draft, turn.complete)
