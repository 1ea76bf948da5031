"""Rounds in a row that are alike, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from outrider.control.plan import Plan
from outrider.control.prices import Price


@dataclass(slots=True)
class Streak:
    """Rounds of one plan and price, for the same sequences, with drafts of the same lengths."""

    plan: Plan
    seq_ids: Seq[int]
    rows: Seq[int]
    """The indices of the sequences that go on; the others have ended."""
    drafted: Seq[int]  # [sequences]: draft tokens that were scored
    price: Price
    limiting: frozenset[int] = frozenset()
    """Drafters that limit themselves: tokens that they do not draft count as rejected."""
    asking: float = 0.0
    """Seconds in which the drafter was asked whose drafts are seen first; the price does not include them."""
    shared: bool = False
    """Drafts shared rows: lengths are averages."""
    accepted: list[Seq[int]] = field(default_factory=list[Seq[int]])  # [rounds][sequences]
    decided: int = 0
    """The number of these rounds that are counted among the decisions."""
    judged: list[int] = field(init=False)
    """The rows that go on and have a draft to judge, if only an empty one of a drafter that limits itself."""
    asked: tuple[int, ...] = field(init=False)
    """The drafters that the plan asks."""
    drafts: bool = field(init=False)
    """Whether any draft was scored."""
    loss: float = field(init=False)
    """Tokens that plain decoding would have brought in the time that each round took beyond a plain one."""

    def __post_init__(self) -> None:
        lengths, drafted, plain = self.plan.lengths, self.drafted, self.price.plain
        by = self.plan.drafters
        self.judged = [row for row in self.rows if lengths[row] and (drafted[row] or by[row] in self.limiting)]
        self.asked = tuple({who for who, n in zip(self.plan.drafters, lengths, strict=True) if n})
        self.drafts = any(drafted)
        self.loss = len(self.seq_ids) * self.extra / plain if plain > 0 else 0.0

    @property
    def extra(self) -> float:
        """Seconds that each round took beyond one without drafts."""
        return self.price.extra + self.asking

    def is_like(self, seq_ids: Seq[int], rows: Seq[int], plan: Plan, drafted: Seq[int]) -> bool:
        """Whether a round is like these, whatever it costs."""
        return plan is self.plan and drafted == self.drafted and seq_ids == self.seq_ids and rows == self.rows

    def rows_of(self, drafter: int) -> list[int]:
        """The judged rows that this drafter was asked for."""
        return [row for row in self.judged if self.plan.drafters[row] == drafter]
