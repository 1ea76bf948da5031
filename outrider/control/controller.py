"""Decides for every round which sequences are drafted for, by which drafter and how far; zero is a length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from outrider.control.acceptance import Acceptance, Floats
from outrider.control.choose import MIN_GAIN, best_plan_of, choose_plan
from outrider.control.costs import RoundCosts, RoundKind, size_of
from outrider.control.decisions import DecisionLog, Decisions
from outrider.control.fading import FADE_SHARE, Fading
from outrider.control.member import Member
from outrider.control.overheads import Overheads
from outrider.control.own_drafts import OwnFigures
from outrider.control.plan import Ints, Outlook, Plan, plain_plan
from outrider.control.prices import Price, Prices
from outrider.control.probes import Probes
from outrider.control.review import Offer, Promise, Review
from outrider.control.round_log import RoundLog
from outrider.control.sharing import Sharing

_STARTING_GAIN, _STAYING_GAIN, _PATIENCE = 1.05, 0.97, 8.0
"""Where rounds overlap, drafting begins if it promises `_STARTING_GAIN` times the rate of plain decoding: to begin
takes several rounds. It goes on at `_STAYING_GAIN`, until drafts have lost `_PATIENCE` tokens, times the square root of
the batch, since they last paid: a good drafter has bad luck now and then."""
_CHANGE, _CHANGE_TO_PART = 1.1, 1.03
"""Where rounds overlap and drafts are made, another drafter must promise this many times the rate of the one in use;
one that takes part in what that one drafts, and so has nothing to catch up with, only the second."""
_PLAIN_ROUNDS = 512
"""After this many rounds with drafts come some without, to measure what drafts save."""
_PLAIN_SPELL = 5
"""The number of those: the first are slower than others, and where rounds overlap so is the last."""
_ACTIVE_ROUNDS = 64
"""A drafter that no plan asked for this many rounds need not keep up with the text."""


class Controller:
    """Chooses the plan of each round, from the costs and the acceptance of earlier rounds.

    A drafter that does not pay is asked for nothing, which costs what plain decoding costs. Now and then it is tried
    again, for a share of the time that is bounded; where it can guess without the target's help (`Drafter.watch`), what
    came of those guesses is noted too, at no cost.
    """

    def __init__(self, members: Seq[Member], costs: RoundCosts, widths: Seq[int] = ()) -> None:
        """widths: those that passes are padded to; empty where a pass costs by its rows."""
        self.members, self.costs, self.widths = members, costs, widths
        self._acceptance = [Acceptance(member.max_tokens) for member in members]
        self._decisions = DecisionLog([member.name for member in members])
        self.prices = Prices(costs, widths)
        limiting = frozenset(i for i, each in enumerate(members) if each.limits_itself and widths)
        self._sharing = Sharing(frozenset(i for i, each in enumerate(members) if each.shares), costs, widths)
        free = [i for i, m in enumerate(members) if not (m.runs_model or m.pays_budget)]
        self.review = None if widths else Review(members, free[0] if free else None, self._rates_of, self.prices)
        """Decides once drafts are seen; None where rounds overlap, and drafts are scored before the host sees them."""
        by_text = frozenset(i for i in range(len(members)) if not widths and i not in free)
        self._log = RoundLog(self._acceptance, self._decisions, self.prices, limiting, self._sharing, by_text)
        self._round = self._since_plain = 0
        self.probes = Probes([member.includes for member in members], costs, widths)
        self.overheads = Overheads()
        self._asked: frozenset[int] = frozenset()
        """The drafters that the last plan asks, probes left out."""
        self._under_way = False
        """The last plan asks a drafter, probes left out."""
        self._lost = 0.0
        """The tokens that drafts have lost, compared with plain decoding, since they last gained."""
        self._sizes: set[int] = set()
        """By `size_of`: batches whose first rounds were without drafts, to measure what such rounds take."""
        self._own = OwnFigures(limiting)
        self._fading = Fading(len(members))

    @property
    def acceptance(self) -> list[Acceptance]:
        """The acceptance of each drafter, by all rounds so far."""
        self._log.tell()
        return self._acceptance

    def _rates_of(self, member: int) -> Acceptance:
        """The acceptance of one drafter. Rounds that did not ask it may be missing: only confidences depend on them."""
        if self._log.holds(member):
            self._log.tell()
        return self._acceptance[member]

    def plan(self, seq_ids: Seq[int], budgets: Seq[int]) -> Plan:
        """Who drafts how far in the next round; no sequence gets more than its budget."""
        batch = len(seq_ids)
        if not any(budgets):
            return plain_plan(batch, self.costs)
        if self._since_plain >= _PLAIN_ROUNDS or self._is_new_size(batch):
            self._since_plain = 0
            return replace(plain_plan(batch, self.costs), rounds=_PLAIN_SPELL)
        most, review = np.asarray(budgets, dtype=np.int64), self.review
        free = None if review is None else review.free
        self._log.tell()
        least = self._least_gain(batch)
        outlooks = [
            self._outlook(i, seq_ids, np.minimum(most, 0 if i == free else each.max_tokens))
            for i, each in enumerate(self.members)
        ]  # the free drafter has no budget here: its drafts are seen before the others are asked
        plan = choose_plan(outlooks, self.costs, self.widths, least)
        if review is not None and not self._is_worth_its_time(review, plan, least):
            plan = plain_plan(batch, self.costs)
        self._under_way, self._asked = plan.asks, frozenset(plan.drafters) - {-1}
        if review is not None:
            plan = review.look(plan, seq_ids, self._looks(budgets), self._round)
        return self.probes.due(outlooks, plan, [each.drafts for each in self.acceptance]) or plan

    def _is_worth_its_time(self, review: Review, plan: Plan, least: float) -> bool:
        """Whether a model's drafts bring tokens about as fast as tokens came of late. least: as in `choose_plan`."""
        model, plain = plan.only_drafter, plain_plan(len(plan.lengths), self.costs)
        if model is None:
            return not plan.asks
        promise = Promise(plan.tokens / least, plan.seconds)
        return review.is_better(promise, Promise(plain.tokens, plain.seconds), len(plan.lengths))

    def _looks(self, budgets: Seq[int]) -> list[int]:
        """For each sequence, the max tokens of the free drafter, which is asked first."""
        free = None if self.review is None else self.review.free
        return [0 if free is None else min(n, self.members[free].max_tokens) for n in budgets]

    def _outlook(self, member: int, seq_ids: Seq[int], budgets: Ints) -> Outlook:
        """What a drafter could do for these sequences, with these budgets."""
        known, survival = self.members[member], self._rates_of(member).survival(seq_ids)
        sharing = self._sharing.factors(member, len(seq_ids), known.max_tokens)
        own = self._own.of(member)
        beside = self.overheads.seconds(member, len(seq_ids)) * plain_plan(len(seq_ids), self.costs).rate
        weight = 1 / (1 + beside) / self._margin(member)
        return Outlook(known.name, survival, budgets, known.runs_model, known.lengths, own, sharing, weight)

    def _margin(self, member: int) -> float:
        """The factor by which a drafter must promise more than the drafters that the last plan asks, since a change
        costs time; 1 for one of those, and for one that includes all of them."""
        asked = self._asked
        if not self.widths or member in asked or asked <= self.members[member].includes:
            return 1.0
        return _CHANGE_TO_PART if any(member in self.members[i].includes for i in asked) else _CHANGE

    def _least_gain(self, batch: int) -> float:
        """The rate that a plan with drafts must promise, as a multiple of plain decoding's.

        Where drafts have lost too much, what is known of them comes from other texts, and only the last few rounds
        count. Where drafting begins anew, what earlier drafts lost no longer counts.
        """
        patient = self._lost < _PATIENCE * batch**0.5
        if self._under_way and patient:
            return _STAYING_GAIN
        for i in () if patient else self._asked:
            self._own.forget_before_late(i)
        self._lost = 0.0
        return _STARTING_GAIN if self.widths else MIN_GAIN

    def _is_new_size(self, batch: int) -> bool:
        """Whether rounds without drafts must first be timed at this size of batch; asked only once for each size.

        The times of another size mislead: the host's work grows with the sequences, so drafts would be misjudged.
        """
        size = size_of(batch)
        if size in self._sizes or not self.costs.borrows_level(batch):
            return False
        self._sizes.add(size)
        return True

    def move(self, plan: Plan, before: Seq[int], seq_ids: Seq[int]) -> Plan:
        """A plan for the sequences `before`, changed to one for `seq_ids`: newcomers get the most frequent draft.

        The others keep drafter and length. In a batch of another size the drafter's best length is found anew.
        """
        if not plan.asks:
            same = plan.kind.batch == len(seq_ids) and not plan.rounds
            return plan if same else plain_plan(len(seq_ids), self.costs)
        if len(seq_ids) == len(before) and len({*plan.lengths}) == len({*plan.drafters}) == 1:
            return plan
        if plan.own or (self.widths and size_of(len(seq_ids)) != size_of(len(before)) and not plan.probe):
            return self._resized(plan, seq_ids)
        drafts = list(zip(plan.drafters, plan.lengths, strict=True))
        known, usual = dict(zip(before, drafts, strict=True)), Counter(drafts).most_common(1)[0][0]
        who, lengths = (list(each) for each in zip(*(known.get(i, usual) for i in seq_ids), strict=True))
        kind = RoundKind(len(who), 1 + max(lengths), len(who) + sum(lengths), plan.kind.drafters, plan.kind.steps)
        kind = self.costs.padded_kind(kind, self.widths)
        tokens, seconds = plan.tokens * len(who) / len(before), self.costs.seconds(kind)
        looks = [max(plan.looks)] * len(who) if plan.looks else ()
        return replace(plan, kind=kind, lengths=lengths, drafters=who, tokens=tokens, seconds=seconds, looks=looks)

    def _resized(self, plan: Plan, seq_ids: Seq[int]) -> Plan:
        """The best plan for these sequences of the drafter that most sequences of `plan` have; where that does not pay,
        a plan without drafts."""
        plain = plain_plan(len(seq_ids), self.costs)
        member = Counter(who for who in plan.drafters if who >= 0).most_common(1)[0][0]
        known = self.members[member]
        budgets = np.full(len(seq_ids), min(known.max_tokens, self.widths[-1] - 1), dtype=np.int64)
        outlook = self._outlook(member, seq_ids, budgets)
        found = best_plan_of([outlook], 0, self.costs, self.widths)
        if found.rate * outlook.weight < _STAYING_GAIN * plain.rate:
            return plain
        return replace(found, drafters=[member] * len(seq_ids))

    def settle(self, plan: Plan, seq_ids: Seq[int], found: Seq[Offer]) -> Plan:
        """The plan with who drafts, decided once the drafts of the free drafter are known. found: those drafts."""
        return plan if self.review is None else self.review.settle(plan, seq_ids, found, self._round)

    def choose_drafts(self, seq_ids: Seq[int], plan: Plan, offers: Seq[Offer]) -> list[int]:
        """The number of tokens of each draft to score, where drafts are seen before they are scored."""
        if self.review is None:
            return [offer.length for offer in offers]
        return self.review.choose(seq_ids, plan, offers, self._round)

    def note(
        self,
        seq_ids: Seq[int],
        rows: Seq[int],
        plan: Plan,
        drafted: Seq[int],
        accepted: Seq[Seq[int]],
        asking: float = 0.0,
        *,
        shared: bool = False,
    ) -> None:
        """Note rounds of a plan: the number of draft tokens that were scored and accepted for each sequence.

        drafted: [sequences]; a draft that only the device knows counts with the length that was asked for. accepted:
        [rounds][sequences]. rows: the indices of the sequences that go on; the others have ended. asking: the seconds
        in which the free drafter was asked. shared: drafts shared rows, and their lengths are averages.
        """
        if not plan.asks:
            self.note_plain(plan, [seq_ids[row] for row in rows], [0.0] * len(accepted))
            return
        self._decisions.end_rest()
        asking += self._vain_seconds(plan, drafted)
        streak = self._log.streak_of(seq_ids, rows, plan, drafted, asking, self._round)
        streak.shared = shared
        if plan.own:
            self._own.note_rounds(streak.asked[0], drafted, accepted)
        if self.review is not None:
            for each in accepted:
                self.review.note(seq_ids, plan, each, streak.extra, asking, self._round)
        self._count_rounds(streak.drafts, len(accepted))
        if streak.price.plain > 0:
            self._lost = max(0.0, self._lost - sum(map(sum, accepted)) + len(accepted) * streak.loss)
        note_known = self._fading.note_judged if plan.probe else self._fading.note_asked
        for i in streak.asked:
            note_known(i, self._round)
        self._log.add(accepted)

    def plain_rate(self, batch: int) -> float:
        """Tokens a second of plain decoding."""
        return batch / self._price(RoundKind(batch, 1, batch)).plain

    def usual_seconds(self, plan: Plan, drafted: Seq[int]) -> float:
        """The expected seconds of a round of this plan, from rounds of its kind: a single one may be a stall."""
        price = self._price(self.prices.kind_of(plan, drafted))
        return price.plain + price.extra + self._vain_seconds(plan, drafted)

    def _vain_seconds(self, plan: Plan, drafted: Seq[int]) -> float:
        return 0.0 if self.review is None else self.review.vain_seconds(plan, drafted)

    def _price(self, kind: RoundKind) -> Price:
        return self.prices.of(kind, self._round)

    def note_plain(self, plan: Plan, seq_ids: Seq[int], seconds: Seq[float]) -> None:
        """Note rounds in which nobody was asked to draft, and the seconds of each; 0 where its time says nothing."""
        new = self._decisions.note_rest(seq_ids, len(seconds))
        if self.review is not None and seq_ids:
            self.review.note_plain(len(seq_ids), len(seconds))
        if new:
            self.forget_stated(new)
        self._count_rounds(False, len(seconds))
        telling = [each for each in seconds if each > 0]
        if telling:
            self.costs.observe(plan.kind, sum(telling) / len(telling), len(telling))

    def _count_rounds(self, drafted: bool, rounds: int = 1) -> None:
        """Count rounds, and let figures fade that are due. drafted: drafts were scored. rounds: as in `Fading.due`."""
        self.probes.count_rounds(rounds)
        self._since_plain += rounds if drafted else 0
        self._round += rounds
        judged, asked = self._fading.due(self._round, rounds)
        for i in judged:
            self._rates_of(i).fade(FADE_SHARE)
            self._own.fade(i, FADE_SHARE)
        for i in asked:
            self.overheads.fade(i, FADE_SHARE)

    def is_active(self, member: int) -> bool:
        """Whether a plan asked the drafter in the last `_ACTIVE_ROUNDS`, probes left out; True in the first rounds."""
        return self._round - self._fading.asked[member] < _ACTIVE_ROUNDS

    def note_guesses(
        self, member: int, seq_ids: Seq[int], lengths: Seq[int], accepted: Seq[int], rounds: Seq[float] = ()
    ) -> None:
        """Note drafts that were not scored, and how many of their tokens agree with the text that came.

        rounds: for each, how many rounds it stands for; empty: all for as many.
        """
        if not seq_ids:
            return
        known = self._rates_of(member)
        self._fading.note_judged(member, self._round)
        watched = not any(member in self.members[i].includes for i in self._asked)
        self._own.note_guesses(member, lengths, accepted, rounds, rare=watched)
        known.note(seq_ids, [known.max_tokens] * len(lengths) if self.widths else lengths, accepted)

    def would_pay(self, member: int, batch: int, accepted: float) -> bool:
        """Whether this drafter's drafts would pay in a batch of this size, with `accepted` tokens accepted of each."""
        name, plain, own = self.members[member].name, plain_plan(batch, self.costs).rate, self._own.of(member)
        if own is not None:
            return batch * (1 + accepted) > MIN_GAIN * plain * own.round(name, batch, batch, self.costs, self.widths)[1]
        kinds = [RoundKind(batch, width, batch * width, (name,)) for width in self.widths[1:]]
        return any(
            batch * (1 + min(accepted, kind.width - 1)) > MIN_GAIN * plain * self.costs.seconds(kind) for kind in kinds
        )

    def note_stated(
        self, member: int, seq_ids: Seq[int], stated: Seq[Floats], lengths: Seq[int], accepted: Seq[int]
    ) -> None:
        """Note the confidences of drafts that have been judged. Called before `note` of their round.

        They count for later rounds alone. stated: the confidences of each draft, by position.
        """
        known = self.acceptance[member]
        rows = np.full((len(seq_ids), known.max_tokens), np.nan)
        for row, told in zip(rows, stated, strict=True):
            row[: len(told)] = told[: known.max_tokens]
        known.note_stated(seq_ids, rows, lengths, accepted)

    def note_shared(
        self, member: int, seq_ids: Seq[int], stated: Seq[Floats], room: Seq[int], length: int, accepted: Seq[int]
    ) -> None:
        """Note the drafts of a round that shared rows, by what their drafter stated. Called before `note` of the round.

        room: max tokens of each draft. length: their mean length, as planned.
        """
        survival = self._acceptance[member].survival(seq_ids)
        self._sharing.note_stated(member, length, np.stack(stated), room, accepted, survival.cumsum(1).sum(0))

    def forget_stated(self, seq_ids: Seq[int]) -> None:
        """Drop the confidences of these requests' last drafts: the next draft is at another place in the text."""
        for acceptance in self._acceptance:
            acceptance.forget_stated(seq_ids)

    def note_seconds(self, plan: Plan, drafted: Seq[int], seconds: float, rounds: int = 1) -> None:
        """Note the mean seconds of rounds of a plan in which every sequence decodes, less `asking` of `note`."""
        kind = self.prices.kind_of(plan, drafted)
        if self.review is not None and kind.plain and plan.asks:  # it takes longer than a round that nobody is asked in
            self.review.note_vain(kind.batch, seconds, rounds)
        else:
            self.costs.observe(kind, seconds, rounds)

    def forget(self, seq_id: int) -> Decisions:
        """Drop what is kept of a request; returns what was decided for it."""
        if self.review is not None:
            self.review.forget(seq_id)
        return self._log.forget(seq_id)
