"""Where drafts come in: forced tokens, then the drafters', as far as the controller allows and the target scores."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import cast

from outrider.control.choose import Plan, plain_plan
from outrider.control.controller import Controller
from outrider.control.decisions import Decisions
from outrider.core.device_row import ConfidenceRow
from outrider.core.draft import EMPTY, Draft, Verdict, accepted_by
from outrider.core.sequence import Sequence
from outrider.drafters import grammar
from outrider.drafters.base import Drafter, RoundView, TargetPass
from outrider.drafters.guard import GuardedDrafter, legal_nodes
from outrider.engine.host_time import Allowance, HostTime
from outrider.engine.kept_plan import KeptPlan
from outrider.runners.base import Runner

_CATCHING_UP = 3
"""Rounds in which a drafter catches up with texts that it was not asked for before, and the host with the device."""
_MAX_STALL = 4.0
"""A round of a probe that took longer than usual by more than this counts as by this."""
_WATCHING_SHARE, _BESIDE_SHARE = 0.002, 0.01
"""The share of the time that watching may take where nobody drafts, and beside others that do."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What is scored in a round."""

    drafts: list[Draft]
    plan: Plan | None = None
    """As the controller decided it, in the order of the drafts; None without one."""
    members: tuple[int, ...] = ()
    """The drafters that had a part in it: they see what became of the round."""
    rest: int = 0
    """How many rounds in a row no drafter had anything to do with, this one included."""
    asked: int = 0
    """How many in a row somebody was asked to draft for."""
    asking: float = 0.0
    """Seconds that it took to ask drafters whose drafts are seen first, and nobody else."""

    @property
    def lengths(self) -> list[int]:
        """How many tokens drafters drafted for each sequence; forced ones do not count."""
        return [0 if draft.source == grammar.NAME else len(draft) for draft in self.drafts]


class Drafting:
    """The engine's drafter. What a drafter does wrong costs time, never an answer: see `GuardedDrafter`.

    Where a constraint forces tokens they are the draft, and the drafter is not asked; it observes an empty
    draft and all the tokens committed, as a member of a `mix` does. Whether tokens are forced depends
    on the text alone, so no draft is dropped for what it holds.

    A controller decides who is asked, for which sequences and how far; without one the drafter is asked for all that
    a round has room for.
    """

    def __init__(self, drafter: Drafter, runner: Runner, controller: Controller | None = None) -> None:
        """controller: of the drafter's parts, in their order, or of the drafter itself."""
        self.runner, self.traits, self.controller = runner, drafter.traits, controller
        parts = (drafter.parts if controller is not None else ()) or (drafter,)
        self.members = [
            part if part.traits.guards_itself else GuardedDrafter(part, runner.vocab_size) for part in parts
        ]
        self._compares = drafter.compares
        self.host = HostTime()
        self._watching, self._kept = Allowance(self.host), KeptPlan(self.host)
        self._rest = self._asked = 0
        """As in the last proposal."""
        self._put_off = False
        """The last round went by no plan that was due: the device had nothing to do while one would be made."""
        self._unscored: dict[int, tuple[int, int, Draft]] = {}
        """By sequence: a draft that was left out, until the text judges it; whose it is, and where it starts."""

    @property
    def plans_ahead(self) -> bool:
        """Whether a round can be launched behind another, were it only one without drafts."""
        return self.traits.drafts_ahead or self.controller is not None

    @property
    def max_draft(self) -> int:
        """Max tokens drafted in the round behind one in flight; 0 where it is known that nobody is asked."""
        return 0 if self._kept.rests else self.traits.max_tokens

    def propose(self, view: RoundView) -> Proposal | None:
        """A draft for each sequence; None, only where `view.state` is given: the round in flight comes first."""
        forced: list[Draft] | None = None
        if any(seq.constraint is not None for seq in view.seqs):  # with a state there is none
            forced = [self._forced(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]
            budgets = [0 if draft else budget for draft, budget in zip(forced, view.budgets, strict=True)]
            view = replace(view, budgets=budgets)
        self.host.hidden = view.state is not None
        plan = self._plan(view)
        planned = time.perf_counter()
        if plan is not None and not (plan.asks or self._kept.is_new or self._watches(view)):
            self._kept.use()
            self._rest, self._asked = self._rest + 1, 0
            return Proposal(forced or [EMPTY] * len(view.seqs), plan, rest=self._rest)
        asked = self._ask(view, plan)
        if asked is None:
            return None
        drafts, members = asked
        if any(drafts):
            drafts = [self._scorable(draft) for draft in drafts]
            drafts = drafts if plan is None else self._review(view.seqs, plan, drafts)
        if plan is not None:
            self._kept.use()
        if forced is not None:
            drafts = [first or draft for first, draft in zip(forced, drafts, strict=True)]
        if view.state is None and len(drafts) == 1 and drafts[0]:
            drafts = [self._trimmed(drafts[0])]
        self._rest, self._asked = 0, self._asked + 1 if plan is not None and plan.asks else 0
        asking = time.perf_counter() - planned if plan is not None and plan.settled else 0.0
        return Proposal(drafts, plan, members, asked=self._asked, asking=asking)

    def process(self, work: TargetPass) -> None:
        """Show drafters that follow the target what it has read."""
        for i, member in enumerate(self.members):
            # one that taps layers sees every pass, since their outputs do not last
            if member.traits.follows_target and (member.traits.taps or self._is_active(i)):
                member.process(work)

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
        for i, member in enumerate(self.members):
            if not member.traits.observes or (members is not None and i not in members):
                continue
            own = [d.source != grammar.NAME and by == i for d, by in zip(drafts, drafters, strict=True)]
            member.observe(
                seqs,
                [draft if mine else EMPTY for draft, mine in zip(drafts, own, strict=True)],
                [v if mine or not v.path else Verdict(v.tokens) for v, mine in zip(verdicts, own, strict=True)],
            )
        if self.controller is not None and (self._unscored or any(drafts)):
            self._judge(seqs, drafts, verdicts, drafters)

    def account(self, proposal: Proposal, verdicts: Mapping[int, Verdict], seq_ids: Seq[int], seconds: float) -> None:
        """Tell the controller what came of a round.

        verdicts: of the live sequences, by id. seq_ids: all of the round. seconds: what it took; 0 where it says
        nothing, since prompts were read in it.
        """
        if self.controller is None or proposal.plan is None:
            return
        told = seconds if self._tells(proposal) else 0.0
        if not proposal.members:
            self.controller.note_plain(proposal.plan, verdicts, told)
            return
        drafted = proposal.lengths
        accepted = [verdicts[i].accepted if i in verdicts and n else 0 for i, n in zip(seq_ids, drafted, strict=True)]
        rows = [row for row, seq_id in enumerate(seq_ids) if seq_id in verdicts]
        self.controller.note(seq_ids, rows, proposal.plan, drafted, accepted, proposal.asking)
        self.controller.note_seconds(proposal.plan, drafted, max(0.0, told - proposal.asking))
        tokens, plain_rate = len(seq_ids) + sum(accepted), self.controller.plain_rate(len(seq_ids))
        usual = self.controller.usual_seconds(proposal.plan, drafted)
        took = min(seconds, _MAX_STALL * usual) if proposal.plan.probe else usual  # catching up is part of a probe
        self._kept.note(proposal.plan, tokens, took or usual, plain_rate)
        for i, member in enumerate(self.members):
            if not member.traits.watches or i not in proposal.members:
                continue
            evidence = [each for each in member.take_evidence() if each.seq_id in verdicts]
            accepted = [e.accepted for e in evidence]
            self.controller.note_guesses(i, [e.seq_id for e in evidence], [e.length for e in evidence], accepted)
            if accepted and self.controller.would_pay(i, len(seq_ids), sum(accepted) / len(accepted)):
                self._kept.end_rest()

    def forget(self, seq: Sequence) -> Decisions | None:
        """Let drafters drop a finished sequence; returns what was decided for it. `take_failures` comes after."""
        self._unscored.pop(seq.id, None)
        for member in self.members:
            member.forget(seq)
        return None if self.controller is None else self.controller.forget(seq.id)

    def take_failures(self, seq_id: int) -> int:
        """How often drafters failed for a sequence; the count is dropped with that."""
        return sum(member.take_failures(seq_id) for member in self.members)

    def _tells(self, proposal: Proposal) -> bool:
        """Whether the time of a round says what one of its kind takes.

        Where rounds overlap, the host works on the rounds before and after one meanwhile, and a drafter that was not
        asked for long has to catch up with the text. So only a round among others of its kind counts.
        """
        if not self.runner.asynchronous:
            return True
        return 2 <= proposal.rest < self._rest or proposal.asked > _CATCHING_UP

    def _plan(self, view: RoundView) -> Plan | None:
        """The controller's plan, or the last one while it holds."""
        if self.controller is None:
            return None
        ids, kept = [seq.id for seq in view.seqs], self._kept
        if not any(view.budgets):  # nobody is asked, or prompts are read
            return kept.rest_of(ids) or plain_plan(len(ids), self.controller.costs)
        if not kept.holds_for(ids):
            if self._puts_off(view):
                return self._last_plan(ids).within(view.budgets)
            began = self.host.now()
            kept.begin(ids, self.controller.plan(ids, self._room(view)), began)
        elif ids != kept.seq_ids:
            kept.move(ids, self.controller.move(cast(Plan, kept.plan), kept.seq_ids, ids))
        plan = cast(Plan, kept.plan)
        return plan.within(view.budgets) if kept.asks else plan

    def _room(self, view: RoundView) -> Seq[int]:
        """Max tokens to plan for each sequence.

        Where rounds overlap, a text's end does not count: the plan is cut to it, and holds for the texts that come.
        """
        if not self.runner.asynchronous:
            return view.budgets
        most = min(self.traits.max_tokens, self.runner.max_width - 1)
        asked = (most if seq.max_draft is None else min(most, seq.max_draft) for seq in view.seqs)
        return [n if budget else 0 for n, budget in zip(asked, view.budgets, strict=True)]

    def _puts_off(self, view: RoundView) -> bool:
        """Whether a plan is made in the next round: the device works meanwhile there, but not before this one.

        Never twice in a row: no round may be launched behind another.
        """
        self._put_off = not (self._put_off or self._is_hidden(view) or self._kept.plan is None)
        return self._put_off

    def _last_plan(self, seq_ids: list[int]) -> Plan:
        """The last plan, for these sequences; one without drafts where it was but a probe."""
        controller, kept = cast(Controller, self.controller), self._kept
        plan = cast(Plan, kept.plan)
        return (
            plain_plan(len(seq_ids), controller.costs) if plan.probe else controller.move(plan, kept.seq_ids, seq_ids)
        )

    def _review(self, seqs: Seq[Sequence], plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """The drafts that are worth scoring. One that was sampled always is: leaving it out would bias the text."""
        if self.controller is None or not self.controller.reviews:
            return drafts
        ids, lengths = [seq.id for seq in seqs], list(map(len, drafts))
        kept = self.controller.review(ids, plan, lengths, [draft.expected for draft in drafts])
        for row, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
            if draft and not kept[row] and draft.probs is None:
                self._unscored.setdefault(seq.id, (plan.drafters[row], len(seq.tokens), draft))
                drafts[row] = EMPTY
        return drafts

    def _judge(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], drafters: Seq[int]) -> None:
        """Tell the controller how drafts fared that state what they expect, and those that were left out."""
        controller = cast(Controller, self.controller)
        if any(draft.confidence is not None for draft in drafts):
            if self._kept.is_brief:
                self._note_stated(controller, seqs, drafts, verdicts, drafters)
            else:
                controller.forget_stated([seq.id for seq in seqs])
        for seq, draft, verdict, by in zip(seqs, drafts, verdicts, drafters, strict=True):
            if by >= 0 and draft.expected > 0 and draft.source != grammar.NAME:
                controller.note_expected(by, seq.id, draft.expected, verdict.accepted)
            if seq.id not in self._unscored:
                continue
            member, start, left_out = self._unscored[seq.id]
            accepted = accepted_by(left_out, seq.tokens[start:])
            if accepted is not None:
                del self._unscored[seq.id]
                controller.note_guesses(member, [seq.id], [len(left_out)], [accepted])
                controller.note_expected(member, seq.id, left_out.expected, accepted)

    def _note_stated(
        self, controller: Controller, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], by: Seq[int]
    ) -> None:
        """Tell the controller how sure drafters were of drafts that are judged by now."""
        for member in range(len(self.members)):
            rows = [i for i, draft in enumerate(drafts) if by[i] == member and draft.confidence is not None and draft]
            if rows:
                stated = [cast(ConfidenceRow, drafts[i].confidence).read() for i in rows]
                lengths, accepted = [len(drafts[i]) for i in rows], [verdicts[i].accepted for i in rows]
                controller.note_stated(member, [seqs[i].id for i in rows], stated, lengths, accepted)

    def _ask(self, view: RoundView, plan: Plan | None) -> tuple[list[Draft], tuple[int, ...]] | None:
        """The members' drafts, and who had a part in them; None where one needs the round in flight to complete first.

        Those that are not asked may watch, where they can, as often as time allows. Without a controller, others see
        every round.
        """
        drafts, members = [EMPTY] * len(view.seqs), list[int]()
        for i, member in enumerate(self.members):
            budgets = list(view.budgets) if plan is None else plan.lengths_of(i)
            rows = [row for row, budget in enumerate(budgets) if budget > 0]
            if not rows:
                if member.traits.watches and self._watches(view):
                    began = self.host.now()
                    member.watch(view)
                    beside = plan is not None and plan.asks
                    self._watching.spend(began, _BESIDE_SHARE if beside else _WATCHING_SHARE)
                    members.append(i)
                elif plan is None and member.traits.observes and not member.traits.watches:
                    members.append(i)
                continue
            if plan is not None or member.traits.observes:
                members.append(i)
            if view.state is not None and plan is not None and not member.traits.drafts_ahead:
                return None
            compared = self._compares if plan is None else self._kept.is_brief
            asked = RoundView(view.seqs, budgets, view.state, compared)
            if member.traits.watches or view.state is not None:  # to take some out of tensors costs more than all
                rows = list(range(len(budgets)))
            made = member.propose(asked if len(rows) == len(budgets) else asked.take(rows))
            if made is None:
                return None if view.state is not None else (drafts, tuple(members))
            for row, draft in zip(rows, made, strict=True):
                drafts[row] = draft or drafts[row]
        return drafts, tuple(members)

    def _watches(self, view: RoundView) -> bool:
        """Whether those watch who can, and are not asked."""
        return self.traits.watches and self._is_hidden(view) and not self._kept.tells and self._watching.due

    def _is_hidden(self, view: RoundView) -> bool:
        """Whether the device works while the host does something else before this round."""
        return view.state is not None or not self.runner.asynchronous

    def _is_active(self, member: int) -> bool:
        return self.controller is None or self.controller.is_active(member)

    def _forced(self, seq: Sequence, budget: int) -> Draft:
        draft = grammar.forced_tokens(seq, budget)
        return draft.first_nodes(legal_nodes(draft, budget, self.runner.vocab_size))

    def _scorable(self, draft: Draft) -> Draft:
        return draft if self.runner.scores_trees else draft.first_chain()

    def _trimmed(self, draft: Draft) -> Draft:
        """Leave out a last token that alone would begin a new block of rows: it costs more than it can gain.

        Never one that was sampled: where a drafter stopped because of the token it drew, leaving
        that token out would bias the text.
        """
        spills = self.runner.row_block > 1 and len(draft) > 1 and len(draft) % self.runner.row_block == 0
        return draft.first_nodes(len(draft) - 1) if spills and draft.probs is None else draft
