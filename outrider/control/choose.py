"""Which plan of a round promises most tokens per second.

A round yields one token for each sequence and every draft token that survives. So the plan to take is
argmax of (sequences + sum of the survival probabilities of the tokens it drafts) / (its seconds). Survival and
seconds come from earlier rounds alone: a choice never depends on what is sampled in the round it is made for.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import cast

import numpy as np

from outrider.control.acceptance import Floats
from outrider.control.costs import RoundCosts, RoundKind
from outrider.control.own_drafts import OwnDrafts
from outrider.control.plan import Ints, Outlook, Plan, plain_plan

MIN_GAIN = 1.02
"""A plan with drafts must promise this much more than one without: both are estimates."""
LEEWAY = 0.98
"""Of plans of the same drafters, the longest that promises as much of the best: only longer drafts tell what tokens far
in a draft are worth, and times of passes are known no better."""
OWN_LENGTHS_GAIN = 1.08
"""What a length for each sequence must promise over the same for all: the best of many guesses is partly luck, and who
comes next has another text."""


def choose_plan(outlooks: Seq[Outlook], costs: RoundCosts, widths: Seq[int] = (), least: float = MIN_GAIN) -> Plan:
    """The plan of the highest rate; the plain one unless another promises `least` times as much.

    widths: those that passes are padded to, unless they are packed; empty: a pass costs by its rows. Then, and in a
    packed pass, each sequence gets a length of its own. Drafters that run no model come first in `outlooks`; of equal
    ones the first is asked.
    """
    batch = len(outlooks[0].budgets)
    plain = plain_plan(batch, costs)
    best, weighted = replace(plain, tokens=least * plain.tokens), 1.0
    promises = [_Promise(i, outlook) for i, outlook in enumerate(outlooks) if outlook.budgets.any()]
    limiting = {(each.name,) for each in outlooks if each.own is not None}
    for drafters in _groups(promises):
        if widths and len(drafters) == 1 and drafters[0].outlook.own is not None:  # it is asked for all, below
            continue
        most = batch + sum([each.tokens[-1] for each in drafters])
        asking = min([costs.asking_seconds((each.name,), batch) for each in drafters])
        weight = min([each.outlook.weight for each in drafters])
        bar = _for_weight(best, weighted, weight)
        if most < bar.rate * (plain.seconds + asking):  # not even if drafts took no row more
            continue
        group = _Group(drafters, costs)
        if widths:
            even = _best_padded(group, widths, bar)
            own = _best_packed(group, widths, even)
            margin = OWN_LENGTHS_GAIN if own.kind.drafters == even.kind.drafters else 1.0
            found = own if own.rate > margin * even.rate else even
        else:
            found = _longest_paying(group, bar)
        if found is not bar and not (widths and found.kind.drafters in limiting):
            best, weighted = found, weight
    for drafter in promises if widths else ():
        weight = drafter.outlook.weight
        if drafter.outlook.own is not None:  # to ask it costs little more than not to, whatever others must promise
            floor = max(1.0, min(least, MIN_GAIN))
            bar = _for_weight(best if best.asks else replace(plain, tokens=floor * plain.tokens), weighted, weight)
            found = _best_own(_Group([drafter], costs), widths, bar)
            if found is not bar:
                best, weighted = found, weight
    return best if best.asks else plain


def _for_weight(plan: Plan, weighted: float, weight: float) -> Plan:
    """A plan of a drafter of this weight, as what one of a drafter of another weight must beat."""
    return plan if weight == weighted else replace(plan, tokens=plan.tokens * weighted / weight)


def best_plan_of(outlooks: Seq[Outlook], drafter: int, costs: RoundCosts, widths: Seq[int] = ()) -> Plan:
    """The plan of the highest rate in which this drafter drafts, and no other, whether that pays or not."""
    none = replace(plain_plan(len(outlooks[drafter].budgets), costs), tokens=0.0)
    group = _Group([_Promise(drafter, outlooks[drafter])], costs)
    if widths and outlooks[drafter].own is not None:
        return _best_own(group, widths, none)
    return _best_padded(group, widths, none) if widths else _longest_paying(group, none)


class _Promise:
    """What a drafter may bring."""

    def __init__(self, index: int, outlook: Outlook) -> None:
        """index: its place among the outlooks."""
        self.index, self.outlook, self.name = index, outlook, outlook.name
        self.budgets: list[int] = outlook.budgets.tolist()
        self.least, self.most = min(self.budgets), max(self.budgets)
        self.gains = outlook.survival  # of each token, none beyond the budget, [sequences, tokens]
        if self.least < self.gains.shape[1]:
            self.gains = np.where(np.arange(self.gains.shape[1]) < outlook.budgets[:, None], self.gains, 0.0)
        if outlook.sharing is not None:
            self.gains = np.diff(self.gains.cumsum(1) * outlook.sharing, prepend=0.0).clip(0.0)
        self.tokens = [*accumulate(self.gains.sum(0).tolist())]
        """Of drafts of 1, 2, ... tokens for each sequence, those accepted in all."""


class _Group:
    """Drafters that are tried together: each sequence takes the one that promises most."""

    def __init__(self, drafters: Seq[_Promise], costs: RoundCosts) -> None:
        self.drafters, self.costs, self.batch = drafters, costs, len(drafters[0].budgets)
        self.lengths = tuple([n for each in drafters for n in each.outlook.lengths])

    def best_of(self, lengths: Seq[int]) -> tuple[Ints, list[float]]:
        """For drafts of each length: who drafts [sequences, lengths], and the tokens accepted in all."""
        first, *others = self.drafters
        if not others:
            return np.zeros((self.batch, len(lengths)), np.int64), [first.tokens[n - 1] for n in lengths]
        by, top = np.int64(0), self._accepted(first, lengths)
        for i, each in enumerate(others, 1):
            promised = self._accepted(each, lengths)
            by, top = np.where(promised > top, i, by), np.maximum(promised, top)
        return np.asarray(by), top.sum(0).tolist()

    @staticmethod
    def _accepted(drafter: _Promise, lengths: Seq[int]) -> Floats:
        """Tokens of drafts of each length, [sequences, lengths]."""
        most = len(drafter.tokens)
        return drafter.gains.cumsum(1).take([min(n, most) - 1 for n in lengths], 1)

    def likeliest(self) -> tuple[list[int], Floats]:
        """The drafter that promises most of each sequence, and what tokens gain [sequences, tokens]."""
        first, most = self.drafters[0], max([len(each.tokens) for each in self.drafters])
        if len(self.drafters) == 1:
            return [0] * self.batch, first.gains
        by = self.best_of([most])[0][:, 0]
        gains = np.zeros((self.batch, most))
        for i, each in enumerate(self.drafters):
            gains[:, : len(each.tokens)] += np.where(by[:, None] == i, each.gains, 0.0)
        return by.tolist(), gains

    def only(self, by: Seq[int]) -> _Promise | None:
        """The drafter of all sequences, if it is one."""
        return self.drafters[by[0]] if by.count(by[0]) == len(by) else None

    def least_seconds(self, only: _Promise | None, width: int, rows: int) -> float:
        """What a round with drafts takes at least. only: who drafts; None: it is not known, nor what drafts take."""
        if only is None:
            return self.costs.pass_seconds(self.batch, width, rows)
        kind = RoundKind(self.batch, width, rows, (only.name,), only.outlook.steps(width - 1))
        return self.costs.shared_seconds(kind)

    def drafting(self, by: Seq[int], lengths: Seq[int]) -> tuple[tuple[str, ...], int]:
        """Who drafts, by name, and the passes of the model among them. by, lengths: of each sequence."""
        only = self.only(by)
        if only is not None:
            return (only.name,), only.outlook.steps(max(lengths))
        longest = dict.fromkeys(range(len(self.drafters)), 0)
        for i, n in {*zip(by, lengths, strict=True)}:
            longest[i] = max(longest[i], n)
        asked = [(self.drafters[i], n) for i, n in longest.items() if n]
        return tuple([each.name for each, _ in asked]), max([each.outlook.steps(n) for each, n in asked])

    def cut(self, by: Seq[int], length: int) -> list[int]:
        """The lengths of drafts of so many tokens, as far as each sequence has room."""
        if length <= min([each.least for each in self.drafters]):
            return [length] * self.batch
        return [min(length, self.drafters[i].budgets[row]) for row, i in enumerate(by)]

    def indices(self, by: Seq[int], lengths: Seq[int]) -> list[int]:
        """Of the drafters of a plan."""
        own = [each.index for each in self.drafters]
        return [own[i] if n else -1 for i, n in zip(by, lengths, strict=True)]


def _groups(promises: Seq[_Promise]) -> Iterator[list[_Promise]]:
    """Sets of drafters to try together: those without a model, each one that runs one, and that with the others.

    Alone, too: of drafters that are tried together, one that promises more and costs more hides another.
    """
    free = [each for each in promises if not each.outlook.runs_model]
    models = [each for each in promises if each.outlook.runs_model]
    if free:
        yield free
    for each in models:
        yield [each]
    for each in models if free else ():
        yield [*free, each]


def _best_own(group: _Group, widths: Seq[int], best: Plan) -> Plan:
    """The better of this plan and the one in which the drafter, which limits itself, may draft all it wants to."""
    drafter, batch = group.drafters[0], group.batch
    lengths = [min(n, widths[-1] - 1) for n in drafter.budgets]
    asked, own = sum(n > 0 for n in lengths), cast(OwnDrafts, drafter.outlook.own)
    kind, seconds = own.round(drafter.name, batch, asked, group.costs, widths)
    tokens = batch + asked * own.accepted
    if not asked or tokens <= best.rate * seconds:
        return best
    return Plan(kind, lengths, group.indices([0] * batch, lengths), tokens, seconds, own=True)


@lru_cache
def _lengths(widths: tuple[int, ...], most: int, drafted: tuple[int, ...]) -> dict[int, int]:
    """Draft lengths to try, no longer than `most`, and the width of the pass that takes each."""
    lengths = {min(width - 1, most) for width in widths[1:]} | {*drafted}
    return {n: next(w for w in widths if w > n) for n in sorted(lengths) if 0 < n <= most}


def _best_padded(group: _Group, widths: Seq[int], best: Plan) -> Plan:
    """The best of this plan and those of each length: every sequence has room for as many, and takes the best drafter.

    Nothing is done for each sequence where it is not known to matter: a batch may be large.
    """
    batch, costs, most = group.batch, group.costs, max([each.most for each in group.drafters])
    tried = _lengths(tuple(widths), min(most, widths[-1] - 1), group.lengths)
    by, accepted = group.best_of([*tried])
    found: tuple[list[int], list[int], RoundKind, float, float] | None = None
    top_rate = best.rate
    for at, (length, width) in enumerate(tried.items()):
        tokens = batch + accepted[at]
        if tokens <= LEEWAY * top_rate * costs.pass_seconds(batch, width, batch * width):  # whatever drafts take
            continue
        chosen: list[int] = by[:, at].tolist()
        lengths = group.cut(chosen, length)
        if max(lengths) < length:  # as a shorter plan, in a narrower pass
            continue
        kind = RoundKind(batch, width, batch * width, *group.drafting(chosen, lengths))
        seconds = costs.seconds(kind)
        least = LEEWAY * top_rate if found and kind.drafters == found[2].drafters else top_rate
        if tokens > least * seconds:
            found, top_rate = (chosen, lengths, kind, tokens, seconds), max(top_rate, tokens / seconds)
    if found is None:
        return best
    return Plan(found[2], found[1], group.indices(*found[:2]), *found[3:])


def _best_packed(group: _Group, widths: Seq[int], best: Plan) -> Plan:
    """The best of this plan and those of as many draft tokens as packed passes take, wherever they may survive.

    Also none longer than each length that a model drafts, since a step costs as much for few sequences.
    """
    batch, costs, packed = group.batch, group.costs, group.costs.target.packed_rows(group.batch)
    if not packed:
        return best
    by, gains = group.likeliest()
    most, before, only = min(gains.shape[1], widths[-1] - 1), 0, group.only(by)
    for longest in sorted({most, *(n for n in group.lengths if n < most)}):
        likeliest = gains[:, :longest].flatten()
        some = int(np.count_nonzero(likeliest))
        if some == before:  # no draft may be longer
            continue
        likeliest.sort()
        before, likeliest = some, likeliest[::-1]
        counts = sorted({min(rows - batch, some) for rows in packed})
        sums = likeliest.cumsum().take([count - 1 for count in counts]).tolist()
        for count, accepted in zip(counts, sums, strict=True):
            tokens, width = batch + accepted, 1 - -count // batch  # the widest sequence has as many rows at least
            if tokens <= best.rate * group.least_seconds(only, width, batch + count):
                continue
            lengths = _first(gains[:, :longest], count, float(likeliest[count - 1]))
            kind = RoundKind(batch, 1 + max(lengths), batch + count, *group.drafting(by, lengths))
            kind = costs.padded_kind(kind, widths)
            seconds = costs.seconds(kind)
            if tokens > best.rate * seconds:
                best = Plan(kind, lengths, group.indices(by, lengths), tokens, seconds)
    return best


def _first(gains: Floats, count: int, least: float) -> list[int]:
    """How many of the `count` tokens that gain most each sequence has. least: what the last of them gains.

    Of equal ones the first count.
    """
    lengths = (gains > least).sum(1)
    equal = np.flatnonzero(gains == least)[: count - int(lengths.sum())]
    return (lengths + np.bincount(equal // gains.shape[1], minlength=len(gains))).tolist()


def _longest_paying(group: _Group, best: Plan) -> Plan:
    """The best of this plan and those of 1, 2, ... draft tokens in all, wherever they are likeliest to survive.

    Ends where what is left could not make up for the rows so far, by what their passes were measured to take.
    """
    by, gains = group.likeliest()
    batch, costs, best_rate = group.batch, group.costs, best.rate
    order = np.argsort(-gains, axis=None, kind="stable")[: np.count_nonzero(gains)]
    likeliest, worth = (order // gains.shape[1]).tolist(), gains.flat[order].tolist()
    lengths = [0] * batch
    tokens, most = float(batch), batch + sum(worth)
    found: tuple[int, RoundKind, float, float] | None = None
    for count, (row, gain) in enumerate(zip(likeliest, worth, strict=True), 1):
        lengths[row] += 1
        tokens += gain
        kind = RoundKind(batch, 1 + max(lengths), batch + count, *group.drafting(by, lengths))
        shared, seconds = costs.shared_seconds(kind), costs.seconds(kind)
        if tokens / seconds > best_rate:
            best_rate, found = tokens / seconds, (count, kind, tokens, seconds)
        if most < best_rate * shared:
            break
    if found is None:
        return best
    own = [0] * batch
    for row in likeliest[: found[0]]:
        own[row] += 1
    return Plan(found[1], own, group.indices(by, own), *found[2:])
