"""A round as it is planned: what each drafter could do in it, and who drafts how far. Data only."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.control.acceptance import Floats
from outrider.control.costs import RoundCosts, RoundKind
from outrider.control.own_drafts import OwnDrafts

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one drafter could do in a round."""

    name: str
    survival: Floats  # [sequences, max_tokens]
    budgets: Ints  # [sequences]: max tokens that it may draft for each
    runs_model: bool = False
    """Every token of the longest draft takes a pass of its model."""
    lengths: tuple[int, ...] = ()
    """The lengths its model drafts, others being cut from the next longer; empty: any. Drafts that are longer than all
    of these have their further tokens from drafters that run no model."""
    own: OwnDrafts | None = None
    """The running means of a drafter that limits itself; None: it drafts as many tokens as it is asked for."""
    sharing: Seq[float] | None = None
    """Where its drafts share rows: for drafts of 1, 2, ... tokens, a factor on the accepted tokens by survival."""
    weight: float = 1.0
    """A factor on the rates of its plans where they are compared with others."""

    def steps(self, length: int) -> int:
        """Passes of its model for a draft of this length."""
        if not self.runs_model:
            return 0
        if not self.lengths:
            return length
        return next((each for each in self.lengths if each >= length), self.lengths[-1])


@dataclass(frozen=True, slots=True)
class Plan:
    """Who drafts for each sequence, and how far."""

    kind: RoundKind
    lengths: list[int]  # [sequences]: tokens to draft
    drafters: list[int]  # [sequences]: which of the outlooks drafts; -1: none
    tokens: float
    """Tokens expected of the round."""
    seconds: float
    probe: bool = False
    """The plan is a probe: made to learn of a drafter, not for its promise."""
    rounds: int = 0
    """If not 0, the plan is made to learn from: it holds for this many rounds (fewer if it is a probe that loses much),
    in which nobody else is asked, not even to watch."""
    settled: bool = False
    """Only the drafter whose drafts are seen first is asked, which runs no model: the plan may hold for longer."""
    own: bool = False
    """The drafter limits itself: lengths are the most that it may draft, and tokens not drafted count as rejected."""
    looks: Seq[int] = ()  # [sequences]
    """Max tokens asked first of the drafter that runs no model: who drafts is settled once its drafts are known."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def asks(self) -> bool:
        """Whether anybody is asked to draft."""
        return any(self.lengths) or any(self.looks)

    @property
    def only_drafter(self) -> int | None:
        """The index of the one drafter that is asked; None: nobody is, or several are."""
        asked = {*self.drafters} - {-1}
        return asked.pop() if len(asked) == 1 else None

    def lengths_of(self, drafter: int) -> list[int]:
        """For each sequence the number of tokens that this drafter is asked for."""
        return [n if who == drafter else 0 for n, who in zip(self.lengths, self.drafters, strict=True)]

    def within(self, budgets: Seq[int]) -> Plan:
        """The plan, with the lengths of each sequence cut to its budget."""
        lengths, looks = list(map(min, self.lengths, budgets)), list(map(min, self.looks, budgets))
        if lengths == self.lengths and looks == [*self.looks]:
            return self
        who = [who if n else -1 for n, who in zip(lengths, self.drafters, strict=True)]
        return replace(self, lengths=lengths, drafters=who, looks=looks)


def plain_plan(batch: int, costs: RoundCosts) -> Plan:
    kind = RoundKind(batch, 1, batch)
    return Plan(kind, [0] * batch, [-1] * batch, float(batch), costs.seconds(kind))
