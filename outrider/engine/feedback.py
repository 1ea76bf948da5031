"""Reports what came of a round to the drafters and the controller."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from operator import mul
from typing import cast

from outrider.control.controller import Controller
from outrider.control.overheads import PLAIN
from outrider.control.plan import Plan
from outrider.control.review import Review
from outrider.core.device_row import ConfidenceRow
from outrider.core.draft import EMPTY, Draft, Verdict, accepted_by
from outrider.core.sequence import Sequence
from outrider.drafters import grammar
from outrider.drafters.base import Drafter
from outrider.drafters.guard import GuardedDrafter
from outrider.engine.host_time import HostTime
from outrider.engine.kept_plan import KeptPlan
from outrider.engine.proposal import Proposal

_CATCHING_UP = 3
"""Rounds in which a drafter catches up with texts that it was not asked for, and the host with the device."""
_RESTS = 8
"""The controller is told of alike rounds without drafts this many at a time: to tell it of each takes longer than the
host has."""
_ASKED = 4
"""The same for repeated rounds with drafts."""
_RECENT = 8
"""Where rounds do not overlap, drafters that were not asked for more rounds than this have to catch up."""
_MAX_STALL = 4.0
"""The seconds of a probe's rounds count as at most this many times the usual ones."""


class _AskedRounds:
    """Consecutive rounds of one plan with the same draft lengths, for the same sequences."""

    def __init__(self, proposal: Proposal, plan: Plan, seq_ids: Seq[int], rows: Seq[int]) -> None:
        """proposal, plan: of the first round. seq_ids: of all sequences. rows: the indices of those that go on."""
        self.proposal, self.plan, self.seq_ids, self.rows = proposal, plan, seq_ids, rows
        self.begun = proposal.asked > _CATCHING_UP
        """The drafter has caught up with the texts."""
        self.accepted: list[Seq[int]] = []  # [rounds][sequences]
        self.seconds = self.told = 0.0
        """The seconds of all these rounds; and of those whose time tells what a round of their kind takes."""
        self.telling = 0
        """The number of rounds whose time does."""

    def goes_on_with(self, proposal: Proposal, seq_ids: Seq[int], rows: Seq[int]) -> bool:
        """Whether a round is one more of these."""
        first = self.proposal
        alike = proposal.plan is self.plan and proposal.lengths is first.lengths and proposal.shared == first.shared
        begun = self.begun == (proposal.asked > _CATCHING_UP)
        return alike and begun and seq_ids == self.seq_ids and rows == self.rows

    def add(self, accepted: Seq[int], seconds: float, told: float) -> None:
        """Add a round. told: its seconds again; 0 where they say nothing of its kind."""
        self.accepted.append(accepted)
        self.seconds += seconds
        if told > 0:
            self.told, self.telling = self.told + told, self.telling + 1


class Feedback:
    """Shows drafters and the controller what became of their drafts and plans."""

    def __init__(
        self,
        members: Seq[Drafter | GuardedDrafter],
        controller: Controller | None,
        kept: KeptPlan,
        host: HostTime,
        included: Seq[frozenset[int]] = (),
        *,
        overlaps: bool,
    ) -> None:
        """included: for each member, those that take part in its drafts; none if not given.

        overlaps: the host prepares one round while the device works on another.
        """
        self.members, self.controller, self.overlaps, self._included = members, controller, overlaps, included
        self._host, self._told = host, host.now()
        """The clock, and its time when the controller was last told of rounds."""
        self._kept = kept
        self.watchers = [i for i, member in enumerate(members) if member.traits.watches]
        """The members that watch where they are not asked."""
        self._observers = [i for i, member in enumerate(members) if member.traits.observes]
        self._open: dict[int, list[tuple[int, int, Draft]]] = {}
        """By sequence id: drafts that the text has still to judge, each with its member and where it starts."""
        self._resting: tuple[Plan, Seq[int]] | None = None
        """The plan and the sequences of the last rounds without drafts, until the controller is told."""
        self._rests: list[float] = []
        """The seconds of each; 0: they say nothing."""
        self._rested = False
        """Enough such rounds came before: the time that passed is theirs, not that of earlier rounds with drafts."""
        self._round = 0
        self._last: dict[tuple[str, ...], int] = {}
        """By names of drafters: the round in which they were last asked."""
        self._asked: _AskedRounds | None = None
        """The last rounds in which drafters had a part, until the controller is told."""

    def observe(
        self,
        seqs: Seq[Sequence],
        drafts: Seq[Draft],
        verdicts: Seq[Verdict],
        drafters: Seq[int] | None = None,
        members: Seq[int] | None = None,
    ) -> None:
        """Show drafters what became of their drafts, and what was committed where another drafted.

        drafters: which member drafted for each sequence; None: the only one. members: those that had a part in the
        round; None: all.
        """
        drafters = [0] * len(seqs) if drafters is None else drafters
        for i in self._observers:
            if members is not None and i not in members:
                continue
            own = [by == i and d.source != grammar.NAME for d, by in zip(drafts, drafters, strict=True)]
            if all(own):
                self.members[i].observe(seqs, drafts, verdicts)
                continue
            self.members[i].observe(
                seqs,
                [draft if mine else EMPTY for draft, mine in zip(drafts, own, strict=True)],
                [v if mine or not v.path else Verdict(v.tokens) for v, mine in zip(verdicts, own, strict=True)],
            )
        if self.controller is None:
            return
        if self.controller.review is not None:
            self._judge(self.controller, self.controller.review, seqs, drafts, verdicts, drafters)
        if any(draft.confidence is not None for draft in drafts) and any(drafts):
            self._judge_stated(self.controller, seqs, drafts, verdicts, drafters)

    def account(
        self,
        proposal: Proposal,
        verdicts: Mapping[int, Verdict],
        seq_ids: Seq[int],
        seconds: float,
        rest: int,
        *,
        steady: bool = True,
    ) -> None:
        """Tell the controller what came of a round.

        verdicts: of the live sequences, by id. seq_ids: of all sequences of the round. seconds: what the round took; 0
        where that says nothing, since prompts were read. rest: `Proposal.rest` of the last proposal. steady: the host
        did no more for the round, or meanwhile for the next one, than for any round of its kind.
        """
        controller, plan = self.controller, proposal.plan
        self._round += 1
        if controller is None or plan is None:
            return
        if not proposal.members:
            self.account_rest(proposal, [*verdicts], seconds, rest, steady=steady)
            return
        lengths = proposal.lengths
        rows, accepted = _accepted(seq_ids, [True] * len(lengths) if proposal.shared else lengths, verdicts)
        if self._asked is None or not self._asked.goes_on_with(proposal, seq_ids, rows):
            self.tell()
            self._asked = _AskedRounds(proposal, plan, seq_ids, rows)
        if proposal.shared:
            self._note_shared(controller, proposal, seq_ids, verdicts)
        self._asked.add(accepted, seconds, seconds if steady and self._tells(proposal, rest) else 0.0)
        at_once = plan.probe or plan.rounds or proposal.by is None or not (plan.asks and self.overlaps)
        watched = [i for i in self.watchers if i in proposal.members and i != proposal.by]  # that one is asked for all
        if at_once or len(self._asked.accepted) >= _ASKED:
            self.tell()
            included = {i for by in (proposal.members if self._included else ()) for i in self._included[by]}
            watched += [i for i in self.watchers if i in included and i not in watched]
        for i in watched:
            self._note_evidence(controller, i, plan, seq_ids, verdicts)

    def account_rest(
        self, proposal: Proposal, seq_ids: Seq[int], seconds: float, rest: int, *, steady: bool = True
    ) -> None:
        """As `account`, for a round in which no drafter had a part. seq_ids: of the live sequences."""
        if self.controller is None or proposal.plan is None:
            return
        told, rested = seconds if steady and self._tells(proposal, rest) else 0.0, rest > _CATCHING_UP + 1
        if (
            self._resting is None
            or proposal.plan is not self._resting[0]
            or seq_ids != self._resting[1]
            or rested != self._rested
        ):
            self.tell()
            self._resting, self._rested = (proposal.plan, seq_ids), rested
        self._rests.append(told)
        if len(self._rests) >= _RESTS:
            self.tell()

    def tell(self) -> None:
        """Tell the controller of all rounds that it was not told of. Required before it is asked for anything else."""
        if self.controller is None:
            return
        if self._asked is not None:
            self._tell_asked(self.controller, self._asked)
            self._asked = None
        if self._resting is not None:
            self.controller.note_plain(*self._resting, self._rests)
            (plan, seq_ids), rounds, passed = self._resting, len(self._rests), self._passed()
            if self.overlaps and seq_ids and self._rested:
                tokens = rounds * len(seq_ids)
                self.controller.overheads.note(PLAIN, len(seq_ids), tokens, rounds * plan.seconds, passed, rounds)
            self._resting, self._rests = None, []

    def _tell_asked(self, controller: Controller, told: _AskedRounds) -> None:
        """Tell the controller of rounds in which drafters had a part."""
        plan, proposal, batch, rounds = told.plan, told.proposal, len(told.seq_ids), len(told.accepted)
        lengths, asking = proposal.lengths, proposal.asking
        controller.note(told.seq_ids, told.rows, plan, lengths, told.accepted, asking, shared=proposal.shared)
        if told.telling:
            controller.note_seconds(plan, lengths, max(0.0, told.told / told.telling - asking), told.telling)
        usual = rounds * controller.usual_seconds(plan, lengths)
        took, tokens, passed = usual, rounds * batch + sum(map(sum, told.accepted)), self._passed()
        rate, by = controller.plain_rate(batch), plan.only_drafter if self.overlaps else None
        if controller.review is not None:
            controller.review.note_round(batch, tokens, usual + asking, rounds)
        if plan.probe:  # catching up is part of it
            took = min(told.seconds, _MAX_STALL * usual) or usual  # where its own time says nothing
            controller.probes.charge(tokens, took, batch)
            rate = max(rate, controller.probes.rate)
        elif by is not None:
            if told.begun:  # the time to catch up does not come again
                controller.overheads.note(by, batch, tokens, usual, passed, rounds)
            took = usual + tokens * controller.overheads.seconds(by, batch)
        self._kept.note(plan, tokens, took, rate, rounds)

    def _passed(self) -> float:
        """Seconds since the last call, without time in which there was nothing to do."""
        before, self._told = self._told, self._host.now()
        return self._told - before

    def _note_evidence(
        self,
        controller: Controller,
        member: int,
        plan: Plan,
        seq_ids: Seq[int],
        verdicts: Mapping[int, Verdict],
    ) -> None:
        """Tell the controller a drafter's evidence for sequences that it was not asked for, and end a rest if it pays.

        Where a drafter that limits itself was asked, it chose to draft nothing: the controller knows that already.
        seq_ids, verdicts: as in `account`.
        """
        told = self.members[member].take_evidence()
        if plan.asks and self.members[member].traits.limits_itself:
            asked = {seq_id for seq_id, n in zip(seq_ids, plan.lengths_of(member), strict=True) if n}
            told = [each for each in told if each.seq_id not in asked]
        evidence = [each for each in told if each.seq_id in verdicts]
        if not evidence:
            return
        accepted, rounds = [each.accepted for each in evidence], [each.rounds for each in evidence]
        controller.note_guesses(member, [e.seq_id for e in evidence], [e.length for e in evidence], accepted, rounds)
        mean = sum(map(mul, accepted, rounds)) / sum(rounds)
        if not self._kept.asks and controller.would_pay(member, len(seq_ids), mean):
            self._kept.end_rest()

    def leave_out(self, seq: Sequence, member: int, draft: Draft) -> None:
        """Keep a member's draft for the text as it is now, which is not scored, or in part: the text will judge it."""
        self._open.setdefault(seq.id, []).append((member, len(seq.tokens), draft))

    def forget(self, seq_id: int) -> None:
        self._open.pop(seq_id, None)

    def _tells(self, proposal: Proposal, rest: int) -> bool:
        """Whether the time of a round says what one of its kind takes.

        Where rounds overlap, the host works on the rounds before and after one meanwhile, and a drafter that was not
        asked for long has to catch up with the text. So only a round among others of its kind counts.
        """
        if not self.overlaps:
            if not proposal.members:
                return proposal.rest > 1
            if proposal.plan is None or not proposal.plan.kind.steps:
                return True
            drafters = proposal.plan.kind.drafters
            since, self._last[drafters] = self._round - self._last.get(drafters, -_RECENT), self._round
            return since <= _RECENT
        return 2 <= proposal.rest < rest or proposal.asked > _CATCHING_UP

    def _judge(
        self,
        controller: Controller,
        review: Review,
        seqs: Seq[Sequence],
        drafts: Seq[Draft],
        verdicts: Seq[Verdict],
        drafters: Seq[int],
    ) -> None:
        """Tell the controller how drafts fared that were seen before they were scored, those left out among them."""
        for seq, draft, verdict, by in zip(seqs, drafts, verdicts, drafters, strict=True):
            if by == review.free and draft and draft.source != grammar.NAME:
                review.note_expected(by, seq.id, draft.expected, verdict.accepted)
            undecided: list[tuple[int, int, Draft]] = []
            for each in self._open.pop(seq.id, ()):
                member, start, left_out = each
                accepted = accepted_by(left_out, seq.tokens[start:])
                if accepted is None:
                    undecided.append(each)
                    continue
                controller.note_guesses(member, [seq.id], [len(left_out)], [accepted])
                review.note_expected(member, seq.id, left_out.expected, accepted)
            if undecided:
                self._open[seq.id] = undecided

    def _judge_stated(
        self,
        controller: Controller,
        seqs: Seq[Sequence],
        drafts: Seq[Draft],
        verdicts: Seq[Verdict],
        by: Seq[int],
    ) -> None:
        """Tell the controller the confidences of drafts that have been judged."""
        if not self._kept.is_brief:  # too old when the next plan is made
            controller.forget_stated([seq.id for seq in seqs])
            return
        for member in range(len(self.members)):
            rows = [i for i, draft in enumerate(drafts) if by[i] == member and draft.confidence is not None and draft]
            if rows:
                stated = [cast(ConfidenceRow, drafts[i].confidence).read() for i in rows]
                lengths, accepted = [len(drafts[i]) for i in rows], [verdicts[i].accepted for i in rows]
                controller.note_stated(member, [seqs[i].id for i in rows], stated, lengths, accepted)

    @staticmethod
    def _note_shared(
        controller: Controller, proposal: Proposal, seq_ids: Seq[int], verdicts: Mapping[int, Verdict]
    ) -> None:
        """Tell the controller how sure a drafter was of drafts that shared rows, if it stated that. As `account`."""
        drafts, member = proposal.drafts, cast(Plan, proposal.plan).only_drafter
        stated = [draft.confidence.read() for draft in drafts if draft.confidence is not None]
        if member is None or len(verdicts) < len(drafts) or len(stated) < len(drafts):
            return
        accepted, length = [verdicts[i].accepted for i in seq_ids], round(sum(proposal.lengths) / len(drafts))
        controller.note_shared(member, seq_ids, stated, [*map(len, drafts)], length, accepted)


def _accepted(seq_ids: Seq[int], drafted: Seq[int], verdicts: Mapping[int, Verdict]) -> tuple[Seq[int], list[int]]:
    """The rows of sequences that go on, and the number of draft tokens accepted of each; forced ones do not count.

    drafted: for each sequence, 0 where no drafter drafted anything.
    """
    if all(drafted) and [*verdicts] == seq_ids:
        return range(len(seq_ids)), [len(verdict.path) for verdict in verdicts.values()]
    accepted = [len(verdicts[i].path) if i in verdicts and n else 0 for i, n in zip(seq_ids, drafted, strict=True)]
    return [row for row, seq_id in enumerate(seq_ids) if seq_id in verdicts], accepted
