"""What is scored in a round, and why."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.control.plan import Plan
from outrider.control.review import Offer, stated_survival
from outrider.core.draft import Draft
from outrider.drafters import grammar

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is scored in a round."""

    drafts: list[Draft]
    plan: Plan | None = None
    """As the controller decided it, in the order of the drafts; None without one."""
    members: tuple[int, ...] = ()
    """The drafters that had a part in it: they see what became of the round."""
    rest: int = 0
    """The number of rounds in a row in which no drafter had a part, this one included."""
    asked: int = 0
    """The number of rounds in a row in which a drafter was asked, this one included."""
    asking: float = 0.0
    """Seconds that it took to ask the drafter that is asked first, before it is settled who drafts."""
    by: int | None = None
    """The drafter that made all of these drafts, in one block of the device; NOBODY: none is asked; None: any other
    case."""

    lengths: list[int] = field(default_factory=list[int])
    """For each sequence the number of draft tokens that are scored; forced ones do not count. Empty without a plan."""
    shared: bool = False
    """Drafts share rows: lengths are averages."""


def scored_lengths(drafts: Seq[Draft]) -> list[int]:
    """As `Proposal.lengths`."""
    return [0 if draft.source == grammar.NAME else draft.scored for draft in drafts]


def offer_of(draft: Draft, planned: int) -> Offer:
    """A draft as the controller sees it. planned: the max tokens to score where no confidences choose among them."""
    sampled, told = draft.probs is not None, draft.confidence
    if told is None or sampled or draft.parents is not None:
        return Offer(min(len(draft), planned), draft.expected, whole=sampled)
    return Offer(len(draft), draft.expected, stated_survival(told.read()[: len(draft)]))
