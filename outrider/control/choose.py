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
"""A plan with drafts must promise this many times the rate of one without, since both are estimates."""
LEEWAY = 0.98
"""Of plans of the same drafters, the longest that promises this share of the best rate is taken: only long drafts tell
what late tokens of a draft are worth, and the times of passes are known no better."""
OWN_LENGTHS_GAIN = 1.08
"""A plan with a length for each sequence must promise this many times the rate of one length for all: the best of many
estimates is partly luck, and the sequences that come next have other texts."""


def choose_plan(outlooks: Seq[Outlook], costs: RoundCosts, widths: Seq[int] = (), least: float = MIN_GAIN) -> Plan:
    """The plan of the highest rate; the plain one unless another promises `least` times as much.

    widths: those that passes are padded to, unless they are packed; empty: a pass costs by its rows. Without widths,
    and in a packed pass, each sequence gets a length of its own. Drafters that run no model come first in `outlooks`;
    of drafters that promise the same, the first is asked.
    """
    batch = len(outlooks[0].budgets)
    plain = plain_plan(batch, costs)
    best, weighted = replace(plain, tokens=least * plain.tokens), 1.0
    promises = [_Promise(i, outlook) for i, outlook in enumerate(outlooks) if outlook.budgets.any()]
    limiting = {(each.name,) for each in outlooks if each.own is not None}
    for drafters in _groups(promises):
        if widths and len(drafters) == 1 and drafters[0].outlook.own is not None:  # asked for all sequences, below
            continue
        most = batch + sum([each.tokens[-1] for each in drafters])
        asking = min([costs.asking_seconds((each.name,), batch) for each in drafters])
        weight = min([each.outlook.weight for each in drafters])
        bar = _for_weight(best, weighted, weight)
        if most < bar.rate * (plain.seconds + asking):  # would not pay even if drafts took no rows
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
        if drafter.outlook.own is not None:  # asking costs little, so `least` need not apply
            floor = max(1.0, min(least, MIN_GAIN))
            bar = _for_weight(best if best.asks else replace(plain, tokens=floor * plain.tokens), weighted, weight)
            found = _best_own(_Group([drafter], costs), widths, bar)
            if found is not bar:
                best, weighted = found, weight
    return best if best.asks else plain


def _for_weight(plan: Plan, weighted: float, weight: float) -> Plan:
    """The plan, scaled so that a plan of weight `weight` has a higher rate if its weighted rate is higher than that of
    this plan, whose own weight is `weighted`."""
    return plan if weight == weighted else replace(plan, tokens=plan.tokens * weighted / weight)


def best_plan_of(outlooks: Seq[Outlook], drafter: int, costs: RoundCosts, widths: Seq[int] = ()) -> Plan:
    """The plan of the highest rate in which this drafter alone drafts, whether or not that pays."""
    none = replace(plain_plan(len(outlooks[drafter].budgets), costs), tokens=0.0)
    group = _Group([_Promise(drafter, outlooks[drafter])], costs)
    if widths and outlooks[drafter].own is not None:
        return _best_own(group, widths, none)
    return _best_padded(group, widths, none) if widths else _longest_paying(group, none)


class _Promise:
    """The tokens that a drafter should have accepted, by sequence and by length of draft."""

    def __init__(self, index: int, outlook: Outlook) -> None:
        """index: its place among the outlooks."""
        self.index, self.outlook, self.name = index, outlook, outlook.name
        self.budgets: list[int] = outlook.budgets.tolist()
        self.least, self.most = min(self.budgets), max(self.budgets)
        self.gains = outlook.survival  # [sequences, tokens]: of each draft token; 0 beyond the budget
        if self.least < self.gains.shape[1]:
            self.gains = np.where(np.arange(self.gains.shape[1]) < outlook.budgets[:, None], self.gains, 0.0)
        if outlook.sharing is not None:
            self.gains = np.diff(self.gains.cumsum(1) * outlook.sharing, prepend=0.0).clip(0.0)
        self.tokens = [*accumulate(self.gains.sum(0).tolist())]
        """The tokens accepted in all, for drafts of 1, 2, ... tokens for each sequence."""


class _Group:
    """Drafters that are tried together: each sequence takes the one that promises most."""

    def __init__(self, drafters: Seq[_Promise], costs: RoundCosts) -> None:
        self.drafters, self.costs, self.batch = drafters, costs, len(drafters[0].budgets)
        self.lengths = tuple([n for each in drafters for n in each.outlook.lengths])

    def best_of(self, lengths: Seq[int]) -> tuple[Ints, list[float]]:
        """For each draft length: who drafts, by index in the group [sequences, lengths]; the tokens accepted in all."""
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
        """[sequences, lengths]: the tokens accepted of drafts of each length."""
        most = len(drafter.tokens)
        return drafter.gains.cumsum(1).take([min(n, most) - 1 for n in lengths], 1)

    def likeliest(self) -> tuple[list[int], Floats]:
        """The drafter that promises most for each sequence, and the gains of its draft tokens [sequences, tokens]."""
        first, most = self.drafters[0], max([len(each.tokens) for each in self.drafters])
        if len(self.drafters) == 1:
            return [0] * self.batch, first.gains
        by = self.best_of([most])[0][:, 0]
        gains = np.zeros((self.batch, most))
        for i, each in enumerate(self.drafters):
            gains[:, : len(each.tokens)] += np.where(by[:, None] == i, each.gains, 0.0)
        return by.tolist(), gains

    def only(self, by: Seq[int]) -> _Promise | None:
        """The drafter of all sequences; None where there are several."""
        return self.drafters[by[0]] if by.count(by[0]) == len(by) else None

    def least_seconds(self, only: _Promise | None, width: int, rows: int) -> float:
        """A lower bound of the seconds of a round with drafts. only: who drafts; None: of the target's pass alone."""
        if only is None:
            return self.costs.pass_seconds(self.batch, width, rows)
        kind = RoundKind(self.batch, width, rows, (only.name,), only.outlook.steps(width - 1))
        return self.costs.shared_seconds(kind)

    def drafting(self, by: Seq[int], lengths: Seq[int]) -> tuple[tuple[str, ...], int]:
        """The names of those that draft, and the number of passes of the model among them. by, lengths: by sequence."""
        only = self.only(by)
        if only is not None:
            return (only.name,), only.outlook.steps(max(lengths))
        longest = dict.fromkeys(range(len(self.drafters)), 0)
        for i, n in {*zip(by, lengths, strict=True)}:
            longest[i] = max(longest[i], n)
        asked = [(self.drafters[i], n) for i, n in longest.items() if n]
        return tuple([each.name for each, _ in asked]), max([each.outlook.steps(n) for each, n in asked])

    def cut(self, by: Seq[int], length: int) -> list[int]:
        """The draft length of each sequence: `length`, cut to its budget."""
        if length <= min([each.least for each in self.drafters]):
            return [length] * self.batch
        return [min(length, self.drafters[i].budgets[row]) for row, i in enumerate(by)]

    def indices(self, by: Seq[int], lengths: Seq[int]) -> list[int]:
        """For each sequence the index of its drafter among the outlooks; -1 where it has no draft."""
        own = [each.index for each in self.drafters]
        return [own[i] if n else -1 for i, n in zip(by, lengths, strict=True)]


def _groups(promises: Seq[_Promise]) -> Iterator[list[_Promise]]:
    """Sets of drafters to try together: all without a model; each one with a model, alone and with all without.

    Within a set each sequence takes the drafter that promises most tokens, whatever it costs: so those without a model,
    and each model, are also tried by themselves.
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
    """The better of `best` and the plan in which the drafter, which limits itself, may draft as far as it wants."""
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
    """The best of `best` and the plans with one length for all sequences, each of which takes the best drafter.

    Work for each sequence is done only for lengths that may be the best: a batch may be large.
    """
    batch, costs, most = group.batch, group.costs, max([each.most for each in group.drafters])
    tried = _lengths(tuple(widths), min(most, widths[-1] - 1), group.lengths)
    by, accepted = group.best_of([*tried])
    found: tuple[list[int], list[int], RoundKind, float, float] | None = None
    top_rate = best.rate
    for at, (length, width) in enumerate(tried.items()):
        tokens = batch + accepted[at]
        if tokens <= LEEWAY * top_rate * costs.pass_seconds(batch, width, batch * width):  # even if drafting is free
            continue
        chosen: list[int] = by[:, at].tolist()
        lengths = group.cut(chosen, length)
        if max(lengths) < length:  # a shorter plan is the same in a narrower pass
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
    """The best of `best` and the plans that fill a packed pass with the likeliest draft tokens, of whichever sequences.

    Drafts limited to each length that a model drafts are tried, too, since a step costs as much for few sequences.
    """
    batch, costs, packed = group.batch, group.costs, group.costs.target.packed_rows(group.batch)
    if not packed:
        return best
    by, gains = group.likeliest()
    most, before, only = min(gains.shape[1], widths[-1] - 1), 0, group.only(by)
    for longest in sorted({most, *(n for n in group.lengths if n < most)}):
        likeliest = gains[:, :longest].flatten()
        some = int(np.count_nonzero(likeliest))
        if some == before:  # no draft gets longer by this
            continue
        likeliest.sort()
        before, likeliest = some, likeliest[::-1]
        counts = sorted({min(rows - batch, some) for rows in packed})
        sums = likeliest.cumsum().take([count - 1 for count in counts]).tolist()
        for count, accepted in zip(counts, sums, strict=True):
            tokens, width = batch + accepted, 1 - -count // batch  # the widest sequence has at least `width` rows
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
    """For each sequence, the number of its tokens among the `count` with the highest gains. least: the last one's gain.

    Of tokens of equal gain, the first ones count.
    """
    lengths = (gains > least).sum(1)
    equal = np.flatnonzero(gains == least)[: count - int(lengths.sum())]
    return (lengths + np.bincount(equal // gains.shape[1], minlength=len(gains))).tolist()


def _longest_paying(group: _Group, best: Plan) -> Plan:
    """The best of `best` and the plans of the 1, 2, ... likeliest draft tokens, of whichever sequences.

    Ends where even all tokens could not pay for the rows so far, by `shared_seconds`, which never falls with more rows.
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
