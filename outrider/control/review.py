"""Drafts that the host sees before they are scored, as on a CPU: who is asked, and which tokens a round scores.

The drafter that runs no model (the free drafter) is asked first, at next to no cost. A model or head is asked where
that still promises more, and of its draft those tokens are scored that pay for their rows, by its confidences. In mode
`seeded` no draft changes a text, so what was drawn may decide; a draft sampled from a stated distribution is scored
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from outrider.control.acceptance import Acceptance, Calibration, Floats
from outrider.control.choose import MIN_GAIN
from outrider.control.costs import RoundKind, size_of, within
from outrider.control.member import Member
from outrider.control.plan import Plan
from outrider.control.prices import Prices
from outrider.control.running_ratio import RunningRatio
from outrider.control.trials import TRIAL_ROUNDS, Trials

_PACE_ROUNDS = 128
"""The pace, tokens a second of late, is a mean over about this many rounds."""
_VAIN_ROUNDS, _MAX_STALL = 48, 1.5
"""What rounds take in which the free drafter finds nothing is a mean over about this many; a round counts as at most so
many times, and at least such a part of, what is expected of it."""
_BEYOND = 2
"""Tokens that a head is asked for beyond those planned: drafting many takes time, most of all if they are sampled."""


class Offer(NamedTuple):
    """A draft of one sequence, as the host sees it."""

    length: int = 0
    expected: float = 0.0
    """Tokens that its drafter expects to be accepted; 0: it does not say."""
    survival: Seq[float] = ()
    """How likely each token is accepted, by what its drafter states of this draft; empty: it does not say, and the
    draft is scored whole or not at all."""
    whole: bool = False
    """It is scored whole whatever it holds: to cut one sampled from a stated distribution would bias the text."""


class Promise(NamedTuple):
    """The tokens that a round should bring, and the seconds that it should take."""

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Scored(NamedTuple):
    """The tokens of drafts that a round scores."""

    lengths: list[int]  # [sequences]
    promise: Promise


class Review:
    """Decides once drafts are seen; a `Controller` decides before, by what earlier rounds told."""

    def __init__(
        self, members: Seq[Member], free: int | None, rates_of: Callable[[int], Acceptance], prices: Prices
    ) -> None:
        """free: the member that runs no model and is asked first, if any. rates_of: gives a drafter's acceptance."""
        self.members, self.free, self._rates_of, self.prices, self.costs = members, free, rates_of, prices, prices.costs
        self.trials = Trials()
        """When to ask the free drafter."""
        self.calibration = [Calibration() for _ in members]
        self._pace: dict[int, RunningRatio] = {}
        """By `size_of` a batch: tokens a second of late."""
        self._vain: dict[int, RunningRatio] = {}
        """By `size_of` a batch: seconds that a round in which the free drafter finds nothing takes beyond one in which
        it is not asked, and beyond asking it: deciding, and judging what it would have drafted."""

    def look(self, plan: Plan, seq_ids: Seq[int], budgets: Seq[int], now: int) -> Plan:
        """The plan, with the free drafter asked first where `trials` says so. budgets: its max tokens by sequence."""
        if self.free is None:
            return plan
        chosen = self.trials.choose(seq_ids, now)
        looks = [budget if ask else 0 for ask, budget in zip(chosen, budgets, strict=True)]
        if not any(looks):
            return plan
        rounds = 0 if self.trials.pays(len(looks)) else TRIAL_ROUNDS
        if plan.asks:  # a model is asked unless what is found promises more
            return replace(plan, looks=looks, rounds=rounds)
        return replace(self._free_plan(plan, looks), rounds=rounds)

    def asked(self, plan: Plan, member: int) -> list[int]:
        """For each sequence, max tokens to ask a drafter for. A head that drafts many at once is asked for some more
        than are planned: where it states confidences, those that pay are chosen from them."""
        if member == self.free:
            return [*plan.looks] if plan.looks else plan.lengths_of(member)
        lengths = self.members[member].lengths
        return [
            min(n + _BEYOND, next((each for each in lengths if each >= n), n)) if n else 0
            for n in plan.lengths_of(member)
        ]

    def _free_plan(self, plan: Plan, looks: list[int]) -> Plan:
        """The plan of a round in which only the free drafter drafts. looks: its max tokens for each sequence."""
        free = -1 if self.free is None else self.free
        who = [free if n else -1 for n in looks]
        kind = RoundKind(len(looks), 1, len(looks), (self.members[free].name,))
        return replace(plan, kind=kind, lengths=looks, drafters=who, looks=(), settled=True)

    def settle(self, plan: Plan, seq_ids: Seq[int], found: Seq[Offer], now: int) -> Plan:
        """The plan, once the free drafter's drafts are known: models are asked where that promises more."""
        free, seconds_of = self.free, partial(self.prices.seconds, now=now)
        if free is None or not plan.looks:
            return plan
        worth = [self._worth(free, seq_id, offer) for seq_id, offer in zip(seq_ids, found, strict=True)]
        if not any(worth):
            return replace(plan, looks=())
        planned = zip(plan.drafters, seq_ids, plan.lengths, strict=True)
        promised = [self._worth(who, seq_id, Offer(n)) if n else 0.0 for who, seq_id, n in planned]
        lumps = [offer._replace(expected=tokens) for offer, tokens in zip(found, worth, strict=True)]
        alone = choose_lengths(lumps, RoundKind(len(seq_ids), 1, len(seq_ids)), seconds_of)
        better = [own > other for own, other in zip(worth, promised, strict=True)]
        lengths = [offer.length if own else n for offer, n, own in zip(found, plan.lengths, better, strict=True)]
        who = [free if own else by for by, own in zip(plan.drafters, better, strict=True)]
        kind = plan.kind._replace(width=1 + max(lengths), rows=len(lengths) + sum(lengths))
        if not any(n and by != free for n, by in zip(lengths, who, strict=True)):
            return self._free_plan(plan, [*plan.looks])
        together = Promise(len(lengths) + sum(map(max, worth, promised)), seconds_of(kind))
        if not self.is_better(together, alone.promise, len(lengths)):
            return self._free_plan(plan, [*plan.looks])
        return replace(plan, kind=kind, lengths=lengths, drafters=who, looks=())

    def choose(self, seq_ids: Seq[int], plan: Plan, offers: Seq[Offer], now: int) -> list[int]:
        """The number of tokens of each draft to score, now that all are known. now: the round."""
        known = zip(plan.drafters, seq_ids, offers, strict=True)
        seen = [self._stated(who, seq_id, offer) if offer.length else offer for who, seq_id, offer in known]
        if not any(offer.length for offer in seen):
            return [0] * len(seen)
        free = plan.settled or not plan.kind.steps
        kind = self.prices.kind_of(plan, [offer.length for offer in seen])
        sunk = RoundKind(len(seen), 1, len(seen)) if free else plan.kind._replace(width=1, rows=len(seen))
        seconds_of = partial(self.prices.seconds, now=now)
        return choose_lengths(seen, kind, seconds_of, sunk, least=MIN_GAIN if free else 1.0).lengths

    def _stated(self, member: int, seq_id: int, offer: Offer) -> Offer:
        """The offer, with what it expects corrected by how earlier drafts of this drafter fared."""
        if offer.survival and not offer.whole:
            ratio = self.calibration[member].ratio(seq_id)
            return offer._replace(survival=[min(1.0, ratio * each) for each in offer.survival[: offer.length]])
        return offer._replace(expected=self._worth(member, seq_id, offer), whole=offer.whole or member != self.free)

    def _worth(self, member: int, seq_id: int, offer: Offer) -> float:
        """The number of tokens of a draft that should be accepted."""
        if not offer.length:
            return 0.0
        if offer.expected > 0:
            return min(offer.length, offer.expected * self.calibration[member].ratio(seq_id))
        return float(self._rates_of(member).survival([seq_id])[0, : offer.length].sum())

    def note(self, seq_ids: Seq[int], plan: Plan, accepted: Seq[int], extra: float, asking: float, now: int) -> None:
        """Note the accepted tokens of a round in which the free drafter was asked, and the time it took.

        extra: seconds beyond a round without drafts, asking included. asking: seconds for the free drafter.
        """
        batch, plain = len(seq_ids), self.prices.of(RoundKind(len(seq_ids), 1, len(seq_ids)), now).plain
        if plan.settled:
            self.trials.note(batch, sum(accepted) / batch - extra / plain)
        elif asking > 0 and self.free not in plan.drafters:  # it found nothing that was worth more than the model's
            self.trials.note(batch, -asking / plain)

    def is_better(self, one: Promise, other: Promise, batch: int) -> bool:
        """Whether round `one`, which takes longer, is worth it: its further tokens must come at least at the late pace.

        A higher rate of this round is not enough: what a model brings now, a lookup may bring for less in the next
        round.
        """
        known = self._pace.get(size_of(batch))
        pace = other.rate if known is None else max(known.value, other.rate)
        return one.tokens - other.tokens > pace * (one.seconds - other.seconds)

    def note_vain(self, batch: int, seconds: float, rounds: int) -> None:
        """Note rounds in which the free drafter found nothing. seconds: of each, without asking it."""
        plain = self.costs.seconds(RoundKind(batch, 1, batch))
        known = self._vain.setdefault(size_of(batch), RunningRatio())
        beyond = within(seconds, plain + known.value, _MAX_STALL) - plain
        known.add(rounds * beyond, rounds, (1 - 1 / _VAIN_ROUNDS) ** rounds)

    def vain_seconds(self, plan: Plan, drafted: Seq[int]) -> float:
        """Seconds that such rounds take, as `note_vain` was told; 0 for all others. drafted: tokens of each draft."""
        known = self._vain.get(size_of(len(drafted))) if plan.settled and not any(drafted) else None
        return 0.0 if known is None else max(0.0, known.value)

    def note_plain(self, batch: int, rounds: int) -> None:
        """Note rounds in which nobody was asked to draft."""
        self.note_round(batch, rounds * batch, rounds * self.costs.seconds(RoundKind(batch, 1, batch)), rounds)

    def note_round(self, batch: int, tokens: int, seconds: float, rounds: int = 1) -> None:
        """Note the tokens of rounds, and the seconds that such rounds take in all."""
        self._pace.setdefault(size_of(batch), RunningRatio()).add(tokens, seconds, (1 - 1 / _PACE_ROUNDS) ** rounds)

    def note_expected(self, member: int, seq_id: int, expected: float, accepted: int) -> None:
        """Note the number of tokens of a draft that should have been accepted, and of those that were."""
        if expected > 0:
            self.calibration[member].note(seq_id, expected, accepted)

    def forget(self, seq_id: int) -> None:
        self.trials.forget(seq_id)
        for each in self.calibration:
            each.forget(seq_id)


def stated_survival(confidence: Floats) -> list[float]:
    """[tokens] -> [tokens]: survival, from confidences that each token is accepted if those before it are."""
    return confidence.cumprod().tolist()


def choose_lengths(
    offers: Seq[Offer],
    planned: RoundKind,
    seconds_of: Callable[[RoundKind], float],
    sunk: RoundKind | None = None,
    least: float = MIN_GAIN,
) -> Scored:
    """The number of tokens of each draft to score: those with most expected tokens a row first, as long as that pays.

    planned: the kind of round that scores all. seconds_of: what kinds take. sunk: the kind that scores none; a round
    without drafts if not given. least: what scoring any must promise, as a multiple of the rate of scoring none.
    """
    batch = len(offers)
    sunk = RoundKind(batch, 1, batch) if sunk is None else sunk
    lengths = [offer.length if offer.whole else 0 for offer in offers]
    tokens = batch + sum(offer.expected for offer in offers if offer.whole)
    rows, width = batch + sum(lengths), 1 + max(lengths)
    begun = planned._replace(width=width, rows=rows) if rows > batch else sunk
    promise = Promise(tokens, seconds_of(begun))
    best, best_rate = Scored([*lengths], promise), least * promise.rate
    pieces = sorted(_pieces(offers), key=lambda piece: -piece[0])
    for density, row, count in pieces:
        if density <= 0:
            break
        lengths[row] += count
        rows, width, tokens = rows + count, max(width, 1 + lengths[row]), tokens + density * count
        promise = Promise(tokens, seconds_of(planned._replace(width=width, rows=rows)))
        if promise.rate > best_rate:
            best, best_rate = Scored([*lengths], promise), promise.rate
    return best


def _pieces(offers: Seq[Offer]) -> Iterator[tuple[float, int, int]]:
    """What can be scored or left out: (expected tokens a row, sequence, rows). A draft that states the survival of its
    tokens comes token by token, any other as a whole."""
    for row, offer in enumerate(offers):
        if offer.whole or not offer.length:
            continue
        if not offer.survival:
            yield offer.expected / offer.length, row, offer.length
        for each in offer.survival[: offer.length]:
            yield each, row, 1
