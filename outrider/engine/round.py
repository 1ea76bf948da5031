"""A round in flight: which sequences take part, what was drafted, and the pass that decides."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.core.draft import Draft
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence, Span
from outrider.engine.drafting import Proposal
from outrider.engine.logprobs import RoundLogprobs
from outrider.engine.scheduler import ScheduledSequence
from outrider.engine.stats import Times
from outrider.runners.base import Scores
from outrider.runners.device_state import DeviceState


@dataclass(slots=True)
class InFlightRound:
    """A round that was launched and has not completed."""

    scheduled: list[ScheduledSequence]
    proposal: Proposal
    spans: list[Span]
    """What is read and scored; behind another round, only widths and drafts are valid."""
    scores: Scores
    launched: float
    """When scoring began."""
    times: Times
    behind: bool = False
    """It was launched behind another, whose outcome the host did not know."""
    choices: HostCopy | None = None
    """The target's choice after each row, being copied; None where the verifier needs the logits on the host."""
    state: DeviceState | None = None
    """Where the round leaves its sequences, on the device; None where only the host can compute it."""
    logprobs: RoundLogprobs | None = None
    """Those of the choices, being copied; None where nobody asks for them, or the verifier chooses on the host."""
    processed: bool = False
    """Drafters that follow the target have been shown this round."""
    closed: bool = False
    """Nothing may be launched behind it: a launch behind it failed, and the device state may be beyond it."""
    repeats: int = 0
    """The number of rounds like it that may be launched behind it, one behind the other."""
    repeated: bool = False
    """It was launched as such a repetition."""
    disturbed: bool = False
    """The host launched the reading of newcomers' texts before it completed this round, so its time is not typical."""
    version: tuple[int, int] = (0, 0)
    """`Engine._version` when it was launched: once that has changed, the round is not repeated."""
    decoding: tuple[list[Sequence], list[Draft]] = field(init=False)
    """The sequences that get tokens in this round, and their drafts."""

    def __post_init__(self) -> None:
        pairs = [(each.seq, draft) for each, draft in zip(self.scheduled, self.drafts, strict=True) if each.complete]
        self.decoding = [seq for seq, _ in pairs], [draft for _, draft in pairs]

    @property
    def drafts(self) -> list[Draft]:
        """The drafts of all sequences."""
        return self.proposal.drafts

    def drafters_of(self, seq_ids: Seq[int]) -> list[int] | None:
        """The index of the drafter asked for each of these sequences; None without a plan, where there is only one."""
        if self.proposal.plan is None:
            return None
        if self.proposal.by is not None:
            return [self.proposal.by] * len(seq_ids)
        asked = dict(zip((each.seq.id for each in self.scheduled), self.proposal.plan.drafters, strict=True))
        return [asked[seq_id] for seq_id in seq_ids]

    def is_steady(self, behind: InFlightRound | None) -> bool:
        """Whether the host did no more for this round, and meanwhile for the one behind it, than for any of its kind.

        Where rounds of a kind are repeated, one that is launched anew takes longer; so does one that sequences join.
        """
        if self.disturbed or (self.repeats and not self.repeated):
            return False
        if behind is None or behind.repeated:
            return True
        return not (self.repeats or behind.scheduled[-1].joined)

    @property
    def can_be_followed(self) -> bool:
        """Whether the next round may be launched before the host knows this one's outcome.

        No option or constraint may look at the text.
        """
        return self.state is not None and not (self.closed or any(each.seq.reads_text for each in self.scheduled))


def spans_of(scheduled: Seq[ScheduledSequence], drafts: Seq[Draft]) -> list[Span]:
    """What each sequence reads and scores. Behind a round in flight, only widths and drafts are valid."""
    return [
        Span(seq.id, seq.cached, tuple(seq.tokens[seq.cached : seq.cached + each.chunk]), draft, each.complete)
        for each, draft in zip(scheduled, drafts, strict=True)
        for seq in (each.seq,)
    ]
