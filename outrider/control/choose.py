"""Which plan of a round promises most tokens per second.

A round yields one token for each sequence and every draft token that survives. So the plan to take is
argmax of (sequences + sum of the survival probabilities of the tokens it drafts) / (its seconds). Survival and
seconds come from earlier rounds alone: a choice never depends on what is sampled in the round it is made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from outrider.control.acceptance import Floats
from outrider.control.costs import RoundCosts, RoundKind

Ints = NDArray[np.int64]
MIN_GAIN = 1.02
"""A plan with drafts must promise this much more than one without: both are estimates."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one drafter could do in a round."""

    name: str
    survival: Floats  # [sequences, max_tokens]
    budgets: Ints  # [sequences]: max tokens that it may draft for each
    runs_model: bool = False
    """Every token of the longest draft takes a pass of its model."""
    lengths: tuple[int, ...] = ()
    """The lengths its model drafts, others being cut from the next longer; empty: any."""

    def steps(self, length: int) -> int:
        """Passes of its model for a draft of this length."""
        return next((each for each in self.lengths if each >= length), length) if self.runs_model else 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Who drafts for each sequence, and how far."""

    kind: RoundKind
    lengths: Ints  # [sequences]: tokens to draft
    drafters: Ints  # [sequences]: which of the outlooks drafts; -1: none
    tokens: float
    """Tokens expected of the round."""
    seconds: float
    probe: bool = False
    """Made to learn of a drafter, not for its promise."""
    rounds: int = 0
    """For so many rounds at least nobody is asked, not even to watch: made to learn what plain decoding takes."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def lengths_of(self, drafter: int) -> list[int]:
        """For each sequence the tokens that this drafter is asked for."""
        return [
            n if who == drafter else 0 for n, who in zip(self.lengths.tolist(), self.drafters.tolist(), strict=True)
        ]

    def within(self, budgets: Seq[int]) -> Plan:
        """The plan, no longer for any sequence than its budget."""
        if not (self.lengths > budgets).any():
            return self
        lengths = np.minimum(self.lengths, budgets)
        return replace(self, lengths=lengths, drafters=np.where(lengths > 0, self.drafters, -1))


def plain_plan(batch: int, costs: RoundCosts) -> Plan:
    kind = RoundKind(batch, 1, batch)
    none = np.zeros(batch, dtype=np.int64)
    return Plan(kind, none, none - 1, float(batch), costs.seconds(kind))


def choose_plan(outlooks: Seq[Outlook], costs: RoundCosts, widths: Seq[int] = ()) -> Plan:
    """The plan of the highest rate; the plain one unless another promises `MIN_GAIN` more.

    widths: those that passes are padded to, unless they are packed; empty: a pass costs by its rows. Then, and in a
    packed pass, each sequence gets a length of its own. Drafters that run no model come first in `outlooks`; of equal
    ones the first is asked.
    """
    batch = len(outlooks[0].budgets)
    best = plain = plain_plan(batch, costs)
    for group in _groups(outlooks):
        expected = {i: _expected(outlooks[i]) for i in group}
        most = batch + sum(float(each[:, -1].sum()) for each in expected.values())
        if most < MIN_GAIN * batch:  # not even if drafts took no time
            continue
        plans = [*_padded_plans(outlooks, expected, costs, widths)] if widths else []
        plans += _ragged_plans(outlooks, expected, costs, widths)
        best = max((best, *plans), key=lambda plan: plan.rate)
    return best if best.rate >= MIN_GAIN * plain.rate else plain


def choose_drafts(expected: Seq[float], lengths: Seq[int], planned: RoundKind, costs: RoundCosts) -> list[bool]:
    """Which of these drafts, whose tokens are known, to score: those of most expected tokens a row first.

    planned: the round with all of them.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -expected[i] / lengths[i])
    rows, width, tokens = planned.batch, 1, float(planned.batch)
    best, best_rate = 0, MIN_GAIN * tokens / costs.seconds(plain_plan(rows, costs).kind)
    for count, i in enumerate(order, 1):
        rows, width, tokens = rows + lengths[i], max(width, 1 + lengths[i]), tokens + expected[i]
        rate = tokens / costs.seconds(replace(planned, width=width, rows=rows))
        if rate > best_rate:
            best, best_rate = count, rate
    return [i in order[:best] for i in range(len(lengths))]


def _groups(outlooks: Seq[Outlook]) -> Iterator[list[int]]:
    """Sets of drafters to try together: those without a model, and with each one that runs one."""
    free = [i for i, each in enumerate(outlooks) if not each.runs_model]
    if free:
        yield free
    for i, each in enumerate(outlooks):
        if each.runs_model:
            yield [*free, i]


def _expected(outlook: Outlook) -> Floats:
    """[sequences, max_tokens + 1]: tokens accepted of drafts of 0, 1, ... tokens, no longer than the budget."""
    place = np.arange(outlook.survival.shape[1])
    survival = np.where(place < outlook.budgets[:, None], outlook.survival, 0.0)
    expected = np.zeros((len(survival), survival.shape[1] + 1))
    survival.cumsum(1, out=expected[:, 1:])
    return expected


def _padded_plans(
    outlooks: Seq[Outlook], expected: Mapping[int, Floats], costs: RoundCosts, widths: Seq[int]
) -> Iterator[Plan]:
    """A plan for each length: every sequence has room for as many tokens, so each takes the best drafter for them."""
    budgets = np.stack([outlooks[i].budgets for i in expected])  # [drafters, sequences]
    most, batch = min(int(budgets.max(initial=0)), widths[-1] - 1), budgets.shape[1]
    lengths = {min(width - 1, most) for width in widths[1:]} | {n for i in expected for n in outlooks[i].lengths}
    for length in sorted(n for n in lengths if 0 < n <= most):
        table = np.stack([e[:, min(length, e.shape[1] - 1)] for e in expected.values()])  # [drafters, sequences]
        best = table.argmax(0)
        own = np.minimum(length, budgets[best, np.arange(batch)])
        who = np.where(own > 0, np.array(list(expected))[best], -1)
        width = next(w for w in widths if w > length)
        kind = RoundKind(batch, width, batch * width, *_drafting(outlooks, who, own))
        yield Plan(kind, own, who, batch + float(table.max(0).sum()), costs.seconds(kind))


def _ragged_plans(
    outlooks: Seq[Outlook], expected: Mapping[int, Floats], costs: RoundCosts, widths: Seq[int]
) -> Iterator[Plan]:
    """Plans of 1, 2, ... draft tokens in all, or as many as packed passes take, wherever they are likeliest to survive.

    Packed passes: also none longer than each length that a model drafts, since a step costs as much for few sequences.
    """
    batch = len(outlooks[0].budgets)
    whole = np.stack([e[:, -1] for e in expected.values()])  # [drafters, sequences]
    who = np.array(list(expected))[whole.argmax(0)]
    gains = np.stack([np.diff(_padded(e, outlooks)) for e in expected.values()])[whole.argmax(0), np.arange(batch)]
    room = [rows - batch for rows in costs.target.packed_rows(batch)]
    most = min(gains.shape[1], widths[-1] - 1) if widths else gains.shape[1]
    for longest in sorted({most, *(n for i in expected for n in outlooks[i].lengths if widths and n < most)}):
        likeliest = np.argsort(-gains[:, :longest], axis=None, kind="stable")
        worth = gains[:, :longest].flat[likeliest]
        likeliest = likeliest[: int((worth > 0).sum())]
        tokens = batch + worth.cumsum()
        for count in sorted({min(n, len(likeliest)) for n in room}) if widths else range(1, len(likeliest) + 1):
            if count:
                lengths = np.bincount(likeliest[:count] // longest, minlength=batch)
                asked = np.where(lengths > 0, who, -1)
                drafting = _drafting(outlooks, asked, lengths)
                kind = costs.padded_kind(RoundKind(batch, 1 + int(lengths.max()), batch + count, *drafting), widths)
                yield Plan(kind, lengths, asked, float(tokens[count - 1]), costs.seconds(kind))


def _padded(expected: Floats, outlooks: Seq[Outlook]) -> Floats:
    """The same with as many columns as the longest draft of any drafter needs."""
    most = max(each.survival.shape[1] for each in outlooks) + 1
    if expected.shape[1] == most:
        return expected
    return np.pad(expected, ((0, 0), (0, most - expected.shape[1])), mode="edge")


def _drafting(outlooks: Seq[Outlook], who: Ints, lengths: Ints) -> tuple[tuple[str, ...], int]:
    """The drafters of a plan by name, and the passes that the one with a model takes."""
    asked = sorted(set(who.tolist()) - {-1})
    steps = [outlooks[i].steps(int(lengths[who == i].max())) for i in asked]
    return tuple(outlooks[i].name for i in asked), max(steps, default=0)
