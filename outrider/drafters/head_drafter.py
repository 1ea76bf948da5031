"""What drafters with a head over the target's hidden states share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar, cast

from outrider.core.device_row import ConfidenceRow, DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView
from outrider.drafters.mean_accepted import MeanAccepted
from outrider.runners.draft_batch import HeadDraft, Share
from outrider.runners.native import NativeRunner
from outrider.runners.text_runner import TextRunner

RunnerT = TypeVar("RunnerT", bound=TextRunner[Any])


class Overlay(NamedTuple):
    """Takes others in place of some drafts of a round, on the device, then cuts all to the rows that they share."""

    longest: int
    """Max tokens of a draft, whoever made it."""
    run: Callable[[HeadDraft, Share | None], HeadDraft]


class HeadDrafter(Drafter, Generic[RunnerT]):
    """Drafts on the device with a head. When asked, the head first reads what the target has read since."""

    runner: RunnerT
    overlay: Overlay | None = None
    """Set by a `Hybrid` for one round; only for heads that state confidences."""

    def __init__(self, levels: int) -> None:
        """levels: max tokens on one path of a draft."""
        self._accepted = MeanAccepted(levels / 2)
        self.rows = self.runner.rows

    @abstractmethod
    def make(self, view: RoundView) -> HeadDraft:
        """Draft for the sequences of the view, all of which are ready."""

    def sharing(self, view: RoundView) -> RoundView:
        """The round, without `room` unless drafts are to share the sum of the budgets: here they never do."""
        return view if view.room is None else replace(view, room=None)

    def expected(self, seqs: Seq[Sequence], *, ahead: bool) -> list[float]:
        """The expected number of accepted tokens of each sequence's next draft, by what is known before it is made.

        ahead: the host is a round behind.
        """
        return [self._accepted.value] * len(seqs)

    def rehearse(self, seqs: Seq[Sequence]) -> bool:
        self.runner.draft(seqs, None)
        return True

    def propose(self, view: RoundView) -> Seq[Draft]:
        return self.propose_for(view, self.drafted_rows(view))

    def propose_for(self, view: RoundView, rows: Seq[int]) -> Seq[Draft]:
        """As `propose`. rows: `drafted_rows` of the view."""
        drafts, ahead = [EMPTY] * len(view.seqs), view.state is not None
        if any(view.budgets[i] for i in rows):
            asked = self.sharing(view if len(rows) == len(view.seqs) else view.take(rows))
            expected = self.expected(asked.seqs, ahead=ahead)
            made = drafts_of(self.make(asked), asked, self.traits.name, expected, padded=self.overlay is not None)
            for i, draft in zip(rows, made, strict=True):
                drafts[i] = draft or EMPTY
        return drafts

    def drafted_rows(self, view: RoundView) -> list[int]:
        """The rows of a view that drafts are made for."""
        return [i for i in self.runner.ready(view.seqs, view.state) if self._drafts_for(view, i)]

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        made = None if view.state is None else self.runner.repeat(view.seqs, view.state)
        return copy_of_same(made, drafts)

    def _drafts_for(self, view: RoundView, row: int) -> bool:
        """Whether to draft for a sequence, even if its draft is not used.

        Without a budget, that is so behind a round with a draft for it, as before the end of a text: to take the other
        sequences out of the state takes several launches, and a further draft takes none.
        """
        return view.budgets[row] > 0 or (view.state is not None and self.runner.reads.is_drafted(view.seqs[row]))

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        self._accepted.note(drafts, verdicts)

    def forget(self, seq: Sequence) -> None:
        self.runner.forget(seq)


def copy_of_same(made: HeadDraft | None, drafts: Seq[Draft]) -> HostCopy | None:
    """A copy of a repeated draft, if it is where the last drafts are: their pass fetches it from there."""
    if made is None or made.tokens is not cast(DeviceRow, drafts[0].tokens).block.tokens:
        return None
    return HostCopy(made.tokens)


def drafts_of(
    made: HeadDraft, view: RoundView, name: str, expected: Seq[float], *, padded: bool = False
) -> list[Draft]:
    """A draft for each sequence of the view, cut to its budget, or to its room where budgets are shared. Never waits.

    name: the drafter's. expected: how many tokens of each draft should be accepted. padded: drafts may have fewer
    tokens than there is room for.
    """
    tokens, nodes, probs = HostCopy(made.tokens), made.tokens.shape[1], made.probs
    parents = None if made.parents is None else HostCopy(made.parents)
    confidence = None if made.confidence is None else HostCopy(made.confidence)
    drafts: list[Draft] = []
    shares, room = view.room is not None, view.room or view.budgets
    for at, budget in enumerate(view.budgets):
        count = min(nodes, room[at])
        drafts.append(
            Draft(
                DeviceRow(tokens, at, count, padded=padded or shares),
                None if parents is None else DeviceRow(parents, at, count),
                None if probs is None or view.seqs[at].params.greedy else probs[at, :count],
                name,
                min(expected[at], float(nodes)),
                True,
                None if confidence is None else ConfidenceRow(confidence, at),
                min(budget, count) if shares else None,
            )
        )
    return drafts


def native_target(name: str, context: DrafterContext) -> NativeRunner:
    """The target of the drafter `name`. ConfigError where its layers cannot be read."""
    if not isinstance(context.target, NativeRunner):
        raise ConfigError(
            f"{name} reads the layers of its target, which only models of a native family show; choose another "
            "drafter, for example suffix"
        )
    return context.target
