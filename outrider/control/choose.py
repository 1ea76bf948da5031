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
LEEWAY = 0.98
"""Of plans of the same drafters, the longest that promises as much of the best: only longer drafts tell what tokens far
in a draft are worth, and times of passes are known no better."""


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
    lengths: list[int]  # [sequences]: tokens to draft
    drafters: list[int]  # [sequences]: which of the outlooks drafts; -1: none
    tokens: float
    """Tokens expected of the round."""
    seconds: float
    probe: bool = False
    """Made to learn of a drafter, not for its promise."""
    rounds: int = 0
    """It holds for so many rounds at least, in which nobody else is asked, not even to watch: made to learn from."""
    settled: bool = False
    """Only a drafter whose drafts are seen before they are scored is asked: the plan need not be made anew so soon."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def asks(self) -> bool:
        """Whether anybody is asked to draft."""
        return any(self.lengths)

    def lengths_of(self, drafter: int) -> list[int]:
        """For each sequence the tokens that this drafter is asked for."""
        return [n if who == drafter else 0 for n, who in zip(self.lengths, self.drafters, strict=True)]

    def within(self, budgets: Seq[int]) -> Plan:
        """The plan, no longer for any sequence than its budget."""
        lengths = list(map(min, self.lengths, budgets))
        if lengths == self.lengths:
            return self
        who = [who if n else -1 for n, who in zip(lengths, self.drafters, strict=True)]
        return replace(self, lengths=lengths, drafters=who)


def plain_plan(batch: int, costs: RoundCosts) -> Plan:
    kind = RoundKind(batch, 1, batch)
    return Plan(kind, [0] * batch, [-1] * batch, float(batch), costs.seconds(kind))


def choose_plan(outlooks: Seq[Outlook], costs: RoundCosts, widths: Seq[int] = ()) -> Plan:
    """The plan of the highest rate; the plain one unless another promises `MIN_GAIN` more.

    widths: those that passes are padded to, unless they are packed; empty: a pass costs by its rows. Then, and in a
    packed pass, each sequence gets a length of its own. Drafters that run no model come first in `outlooks`; of equal
    ones the first is asked.
    """
    batch = len(outlooks[0].budgets)
    plain = plain_plan(batch, costs)
    best = replace(plain, tokens=MIN_GAIN * plain.tokens)
    all_expected = [_expected(outlook) for outlook in outlooks]
    for group in _groups(outlooks):
        expected = {i: all_expected[i] for i in group}
        most = batch + sum(float(each[:, -1].sum()) for each in expected.values())
        asking = min(costs.asking_seconds((outlooks[i].name,), batch) for i in group)
        if most < best.rate * (plain.seconds + asking):  # not even if drafts took no row more
            continue
        if widths:
            best = _best_padded(outlooks, expected, costs, widths, best)
            best = _best_packed(outlooks, expected, costs, widths, best)
        else:
            best = _longest_paying(outlooks, expected, costs, best)
    return best if best.asks else plain


def best_plan_of(outlooks: Seq[Outlook], drafter: int, costs: RoundCosts, widths: Seq[int] = ()) -> Plan:
    """The plan of the highest rate in which this drafter drafts, and no other, whether that pays or not."""
    none = replace(plain_plan(len(outlooks[drafter].budgets), costs), tokens=0.0)
    expected = {drafter: _expected(outlooks[drafter])}
    if widths:
        return _best_padded(outlooks, expected, costs, widths, none)
    return _longest_paying(outlooks, expected, costs, none)


def choose_drafts(expected: Seq[float], lengths: Seq[int], planned: RoundKind, costs: RoundCosts) -> list[bool]:
    """Which of these drafts, whose tokens are known, to score: those of most expected tokens a row first.

    planned: the round with all of them.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -expected[i] / lengths[i])
    rows, width, tokens = planned.batch, 1, float(planned.batch)
    best, best_rate = 0, MIN_GAIN * tokens / costs.seconds(RoundKind(rows, 1, rows))
    for count, i in enumerate(order, 1):
        rows, width, tokens = rows + lengths[i], max(width, 1 + lengths[i]), tokens + expected[i]
        rate = tokens / costs.seconds(RoundKind(planned.batch, width, rows, planned.drafters, planned.steps))
        if rate > best_rate:
            best, best_rate = count, rate
    chosen = order[:best]
    return [i in chosen for i in range(len(lengths))]


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


def _best_padded(
    outlooks: Seq[Outlook], expected: Mapping[int, Floats], costs: RoundCosts, widths: Seq[int], best: Plan
) -> Plan:
    """The best of this plan and those of each length: every sequence has room for as many, and takes the best drafter.

    In plain lists: a batch is small more often than not, and arrays of a few numbers take ten times as long.
    """
    group, tables = list(expected), [each.T.tolist() for each in expected.values()]  # [drafters][lengths][sequences]
    budgets = [outlooks[i].budgets.tolist() for i in group]
    most, batch = min(max(map(max, budgets)), widths[-1] - 1), len(budgets[0])
    lengths = {min(width - 1, most) for width in widths[1:]} | {n for i in group for n in outlooks[i].lengths}
    top_rate, found = best.rate, False
    for length in sorted(n for n in lengths if 0 < n <= most):
        worth = [table[min(length, len(table) - 1)] for table in tables]  # [drafters][sequences]
        top = worth[0] if len(worth) == 1 else list(map(max, *worth))
        tokens, width = batch + sum(top), next(w for w in widths if w > length)
        if tokens <= LEEWAY * top_rate * costs.pass_seconds(batch, width, batch * width):  # whatever drafts take
            continue
        by = [0] * batch if len(worth) == 1 else list(map(tuple.index, zip(*worth, strict=True), top))
        own = [min(length, budgets[i][row]) for row, i in enumerate(by)]
        who = [group[i] if n else -1 for i, n in zip(by, own, strict=True)]
        kind = RoundKind(batch, width, batch * width, *_drafting(outlooks, who, own))
        seconds = costs.seconds(kind)
        least = LEEWAY * top_rate if found and kind.drafters == best.kind.drafters else top_rate
        if tokens > least * seconds:
            best, found = Plan(kind, own, who, tokens, seconds), True
            top_rate = max(top_rate, best.rate)
    return best


def _gains(outlooks: Seq[Outlook], expected: Mapping[int, Floats]) -> tuple[Ints, Floats]:
    """The drafter that expects most of each sequence, [sequences], and what each token gains, [sequences, tokens]."""
    whole = np.stack([e[:, -1] for e in expected.values()])  # [drafters, sequences]
    who = whole.argmax(0)
    gains = np.stack([np.diff(_padded(e, outlooks)) for e in expected.values()])[who, np.arange(len(who))]
    return np.array(list(expected))[who], gains


def _likeliest(gains: Floats) -> tuple[Ints, Floats]:
    """The sequence of each token that gains anything, the likeliest first, and what it gains."""
    order = np.argsort(-gains, axis=None, kind="stable")
    worth = gains.flat[order]
    count = int((worth > 0).sum())
    return order[:count] // gains.shape[1], worth[:count]


def _longest_paying(outlooks: Seq[Outlook], expected: Mapping[int, Floats], costs: RoundCosts, best: Plan) -> Plan:
    """The best of this plan and those of 1, 2, ... draft tokens in all, wherever they are likeliest to survive.

    Ends where what is left could not make up for the rows so far, by what their passes were measured to take.
    """
    who, gains = _gains(outlooks, expected)
    drafters, batch, best_rate = who.tolist(), len(who), best.rate
    likeliest, worth = (each.tolist() for each in _likeliest(gains))
    lengths, asked, steps = [0] * batch, list[int](), 0
    tokens, most = float(batch), batch + sum(worth)
    found: tuple[int, RoundKind, float, float] | None = None
    for count, (row, gain) in enumerate(zip(likeliest, worth, strict=True), 1):
        lengths[row] += 1
        tokens += gain
        by = drafters[row]
        if by not in asked:
            asked = sorted((*asked, by))
        steps = max(steps, outlooks[by].steps(lengths[row]))
        names = tuple(outlooks[i].name for i in asked)
        kind = RoundKind(batch, 1 + max(lengths), batch + count, names, steps)
        shared, seconds = costs.shared_seconds(kind), costs.seconds(kind)
        if tokens / seconds > best_rate:
            best_rate, found = tokens / seconds, (count, kind, tokens, seconds)
        if most < best_rate * shared:
            break
    if found is None:
        return best
    chosen = likeliest[: found[0]]
    own = [chosen.count(row) for row in range(batch)]
    return Plan(found[1], own, [by if n else -1 for by, n in zip(drafters, own, strict=True)], *found[2:])


def _best_packed(
    outlooks: Seq[Outlook], expected: Mapping[int, Floats], costs: RoundCosts, widths: Seq[int], best: Plan
) -> Plan:
    """The best of this plan and those of as many draft tokens as packed passes take, wherever they may survive.

    Also none longer than each length that a model drafts, since a step costs as much for few sequences.
    """
    batch = len(outlooks[0].budgets)
    room = [rows - batch for rows in costs.target.packed_rows(batch)]
    if not room:
        return best
    who, gains = _gains(outlooks, expected)
    drafters = who.tolist()
    most = min(gains.shape[1], widths[-1] - 1)
    for longest in sorted({most, *(n for i in expected for n in outlooks[i].lengths if n < most)}):
        likeliest, worth = _likeliest(gains[:, :longest])
        sums = worth.cumsum().tolist()
        for count in sorted({min(n, len(sums)) for n in room} - {0}):
            tokens = batch + sums[count - 1]
            if tokens <= best.rate * costs.pass_seconds(batch, 1, batch + count):  # whatever drafts take
                continue
            lengths = np.bincount(likeliest[:count], minlength=batch).tolist()
            asked = [i if n else -1 for i, n in zip(drafters, lengths, strict=True)]
            drafting = _drafting(outlooks, asked, lengths)
            kind = costs.padded_kind(RoundKind(batch, 1 + max(lengths), batch + count, *drafting), widths)
            seconds = costs.seconds(kind)
            if tokens > best.rate * seconds:
                best = Plan(kind, lengths, asked, tokens, seconds)
    return best


def _padded(expected: Floats, outlooks: Seq[Outlook]) -> Floats:
    """The same with as many columns as the longest draft of any drafter needs."""
    most = max(each.survival.shape[1] for each in outlooks) + 1
    if expected.shape[1] == most:
        return expected
    return np.concatenate((expected, np.repeat(expected[:, -1:], most - expected.shape[1], axis=1)), axis=1)


def _drafting(outlooks: Seq[Outlook], who: Seq[int], lengths: Seq[int]) -> tuple[tuple[str, ...], int]:
    """The drafters of a plan by name, and the passes that the one with a model takes."""
    asked = sorted({*who} - {-1})
    longest = [max(n for by, n in zip(who, lengths, strict=True) if by == i) for i in asked]
    steps = (outlooks[i].steps(n) for i, n in zip(asked, longest, strict=True))
    return tuple(outlooks[i].name for i in asked), max(steps, default=0)
