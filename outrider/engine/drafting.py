"""Makes the drafts of a round: forced tokens, else those of drafters, as far as controller and target allow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import cast

from outrider.control.controller import Controller
from outrider.control.decisions import Decisions
from outrider.control.plan import Plan, plain_plan
from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sequence import Sequence
from outrider.drafters import grammar
from outrider.drafters.base import Drafter, RoundView, TargetPass, included_in
from outrider.drafters.guard import GuardedDrafter, legal_nodes
from outrider.engine.feedback import Feedback
from outrider.engine.host_time import Allowance, HostTime
from outrider.engine.kept_plan import KeptPlan
from outrider.engine.proposal import NOBODY, Proposal, offer_of, scored_lengths
from outrider.runners.base import Runner

_WATCHING_SHARE, _BESIDE_SHARE = 0.005, 0.005
"""The share of the time that watching may take where nobody drafts, and beside others that do."""
_MAX_ENDED = 8
"""Max sequences that have ended and that drafters still hold."""
_LOOKING_ROUNDS = 4
"""Where rounds without drafts are repeated, one in this many checks whether a plan or watching is due."""


class Drafting:
    """The engine's drafter. What a drafter does wrong costs time, never an answer: see `GuardedDrafter`.

    Where a constraint forces tokens they are the draft, and the drafter is not asked; it observes an empty
    draft and all the tokens committed, as a member of a `mix` does. Whether tokens are forced depends
    on the text alone, so no draft is dropped for what it holds.

    A controller decides who is asked, for which sequences and how far; without one the drafter is asked for all that
    a round has room for.
    """

    def __init__(self, drafter: Drafter, runner: Runner, controller: Controller | None = None) -> None:
        """controller: its members are the drafter's parts, in their order, or the drafter itself."""
        self.runner, self.traits, self.controller = runner, drafter.traits, controller
        parts = (drafter.parts if controller is not None else ()) or (drafter,)
        self.members = [
            part if part.traits.guards_itself else GuardedDrafter(part, runner.vocab_size) for part in parts
        ]
        self._included = [included_in(part, parts) for part in parts]
        """For each member, those that take part in its drafts: in a round that it drafts for, they do not watch."""
        self._compares = drafter.compares
        review = None if controller is None else controller.review
        self._reviews, self._free = review is not None, None if review is None else review.free
        """Whether drafts are seen before they are scored, and the member that is asked first then, if any."""
        self._shares = runner.asynchronous and not self.reads_scores
        """Whether drafts may share budgets: only the target's choices are read of its rows."""
        self.rows = max(part.rows for part in parts)
        """The number of slots in the target's pages that a draft writes, from the text's last token on."""
        self.host = HostTime()
        self._watching, self._kept = Allowance(self.host), KeptPlan(self.host, trials=self._free is not None)
        self._rest = self._asked = 0
        """As in the last proposal."""
        self._ended: deque[Sequence] = deque()
        """Sequences that have ended, and that drafters have still to drop."""
        self._put_off = False
        """In the last round a plan was due and put off: the device would have had nothing to do while it was made."""
        self.feedback = Feedback(
            self.members, controller, self._kept, self.host, self._included, overlaps=runner.asynchronous
        )

    @property
    def reads_scores(self) -> bool:
        """Whether a drafter reads more of the target's scores than its choices."""
        return self.traits.follows_target and not self.traits.ignores_scores

    @property
    def _uses_stated(self) -> bool:
        """Whether what drafts state decides about the next round: it is read in every round then."""
        return self._reviews or self._kept.is_brief

    @property
    def plans_ahead(self) -> bool:
        """Whether a round, if only one without drafts, can be launched behind one in flight."""
        return self.traits.drafts_ahead or self.controller is not None

    @property
    def max_draft(self) -> int:
        """Max tokens drafted in the round behind one in flight; 0 where it is known that nobody is asked."""
        return 0 if self._kept.rests else self.traits.max_tokens

    def propose(self, view: RoundView) -> Proposal | None:
        """A draft for each sequence. None, only where `view.state` is given: the round in flight must come first."""
        forced: list[Draft] | None = None
        if any(seq.constraint is not None for seq in view.seqs):  # with a state there is none
            forced = [self._forced(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]
            budgets = [0 if draft else budget for draft, budget in zip(forced, view.budgets, strict=True)]
            view = replace(view, budgets=budgets)
        self.host.hidden = view.state is not None
        plan = self._plan(view)
        if plan is not None and not (plan.asks or self._kept.is_new or self._watches(view)):
            self._kept.use()
            self._rest, self._asked = self._rest + 1, 0
            count = len(view.seqs)
            return Proposal(forced or [EMPTY] * count, plan, rest=self._rest, by=NOBODY, lengths=[0] * count)
        asked = self._ask(view, plan)
        if asked is None:
            return None
        drafts, members, plan, asking = asked
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
        by, lengths = self._only_drafter(drafts, plan), [] if plan is None else scored_lengths(drafts)
        shared = any(draft.share is not None for draft in drafts)
        return Proposal(drafts, plan, members, 0, self._asked, asking, by, lengths, shared)

    def repeat(self, last: Proposal, view: RoundView) -> Proposal | None:
        """The last proposal again, for the round behind its own; None where that round must be decided anew.

        view: the same sequences, with the lengths of their last drafts.
        """
        if last.by is None:
            return None
        plan, rests = last.plan, last.by == NOBODY and last.rest > 1
        if rests and self._rest % _LOOKING_ROUNDS and not self._kept.tells:
            self._rest += 1
            return last
        if plan is not None and (plan.settled or not self._kept.goes_on or self._watches(view, last.by)):
            return None
        if plan is not None and rests:
            self._kept.use()
            self._rest += 1
            return last
        drafts = last.drafts
        if last.by != NOBODY:
            block = self.members[last.by].repeat(view, drafts)
            if block is None:
                return None
            drafts = [draft.again(block) for draft in drafts]
        if plan is not None:
            self._kept.use()
            self._rest, self._asked = (0, self._asked + 1) if plan.asks else (self._rest + 1, 0)
        members = last.members if plan is None or last.by == NOBODY else (last.by,)
        return Proposal(
            drafts, plan, members, self._rest, self._asked, by=last.by, lengths=last.lengths, shared=last.shared
        )

    def _only_drafter(self, drafts: Seq[Draft], plan: Plan | None) -> int | None:
        """Who made all of these drafts, as `Proposal.by`."""
        if not self.traits.max_tokens:
            return NOBODY
        if (plan is None or self._uses_stated) and any(draft.confidence is not None for draft in drafts):
            return None  # a repeated draft states nothing
        own = {*range(len(self.members))} if plan is None else {*plan.drafters}
        blocks = {draft.tokens.block for draft in drafts if isinstance(draft.tokens, DeviceRow) and draft.is_fetched}
        return own.pop() if len(own) == len(blocks) == 1 and all(draft.is_fetched for draft in drafts) else None

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
        """As `Feedback.observe`."""
        self.feedback.observe(seqs, drafts, verdicts, drafters, members)

    def account(
        self,
        proposal: Proposal,
        verdicts: Mapping[int, Verdict],
        seq_ids: Seq[int],
        seconds: float,
        *,
        steady: bool = True,
    ) -> None:
        """As `Feedback.account`."""
        if steady and self._ended:
            self._drop_ended(len(self._ended) - 1)
        self.feedback.account(proposal, verdicts, seq_ids, seconds, self._rest, steady=steady)

    def account_rest(self, proposal: Proposal, seq_ids: Seq[int], seconds: float, *, steady: bool) -> None:
        """As `Feedback.account_rest`."""
        if steady and self._ended:
            self._drop_ended(len(self._ended) - 1)
        self.feedback.account_rest(proposal, seq_ids, seconds, self._rest, steady=steady)

    def forget(self, seq: Sequence) -> Decisions | None:
        """Let drafters drop a finished sequence; returns what was decided for it. `take_failures` comes after.

        Where rounds overlap, drafters drop it later, when the host has less to do than at the end of a text.
        """
        self.feedback.tell()
        self.feedback.forget(seq.id)
        if self.controller is not None and self.runner.asynchronous:
            self._ended.append(seq)
            self._drop_ended(_MAX_ENDED)
        else:
            for member in self.members:
                member.forget(seq)
        return None if self.controller is None else self.controller.forget(seq.id)

    def _drop_ended(self, most: int = 0) -> None:
        """Let drafters drop sequences that have ended, the oldest first, until at most `most` are left."""
        while len(self._ended) > most:
            seq = self._ended.popleft()
            for member in self.members:
                member.forget(seq)
                member.take_failures(seq.id)  # nobody reads these any more

    def rest(self) -> None:
        """No sequence is left: drafters drop those that have ended, and the host's clock stops."""
        self._drop_ended()
        self.host.stop()

    def take_failures(self, seq_id: int) -> int:
        """The number of failures of drafters for a sequence; the call resets it."""
        return sum(member.take_failures(seq_id) for member in self.members)

    def _plan(self, view: RoundView) -> Plan | None:
        """The controller's plan, or the last one while it holds."""
        if self.controller is None:
            return None
        ids, kept = [seq.id for seq in view.seqs], self._kept
        if not any(view.budgets):  # nobody is asked, or prompts are read
            if kept.plan is not None and ids != kept.seq_ids and kept.rests and kept.holds_for(ids):
                kept.move(ids, self.controller.move(kept.plan, kept.seq_ids, ids))
            return kept.rest_of(ids) or plain_plan(len(ids), self.controller.costs)
        if not kept.holds_for(ids):
            if self._puts_off(view):
                plan = self._last_plan(ids)
                return plan.within(self._asked_budgets(view, plan))
            began = self.host.now()
            self.feedback.tell()
            kept.begin(ids, self.controller.plan(ids, self._room(view)), began)
        elif ids != kept.seq_ids:
            kept.move(ids, self.controller.move(cast(Plan, kept.plan), kept.seq_ids, ids))
        plan = cast(Plan, kept.plan)
        return plan.within(self._asked_budgets(view, plan)) if kept.asks else plan

    def _asked_budgets(self, view: RoundView, plan: Plan) -> Seq[int]:
        """Max tokens of a plan for each sequence; 0 for newcomers whose drafter cannot draft for newcomers."""
        known = len(view.seqs) - view.newcomers
        able = [member.traits.drafts_newcomers for member in self.members]
        new = zip(view.budgets[known:], plan.drafters[known:], strict=True)
        return [*view.budgets[:known], *(budget if who >= 0 and able[who] else 0 for budget, who in new)]

    def _room(self, view: RoundView) -> Seq[int]:
        """Max tokens to plan for each sequence.

        Where rounds overlap, the end of a text does not count: the plan is cut to it, and holds for texts that come.
        """
        if not self.runner.asynchronous:
            return view.budgets
        most = min(self.traits.max_tokens, self.runner.max_width - 1)
        asked = (most if seq.max_draft is None else min(most, seq.max_draft) for seq in view.seqs)
        return [n if budget else 0 for n, budget in zip(asked, view.budgets, strict=True)]

    def _puts_off(self, view: RoundView) -> bool:
        """Whether to put a plan off to the next round: the device works while it is made there, and would not now.

        Never twice in a row: it may be that no round can be launched behind another.
        """
        self._put_off = not (self._put_off or self._is_hidden(view) or self._kept.plan is None)
        return self._put_off

    def _last_plan(self, seq_ids: list[int]) -> Plan:
        """The last plan, moved to these sequences; a plan without drafts if it was a probe."""
        controller, kept = cast(Controller, self.controller), self._kept
        plan = cast(Plan, kept.plan)
        return (
            plain_plan(len(seq_ids), controller.costs) if plan.probe else controller.move(plan, kept.seq_ids, seq_ids)
        )

    def _settled(self, seqs: Seq[Sequence], plan: Plan, drafts: list[Draft]) -> Plan:
        """The plan, now that the free drafter's drafts are known; those for sequences that others get are left out."""
        if self.controller is None or self._free is None or not plan.looks:
            return plan
        found = [offer_of(draft, len(draft)) for draft in drafts]
        plan = self.controller.settle(plan, [seq.id for seq in seqs], found)
        for row, (seq, draft) in enumerate(zip(seqs, drafts, strict=True)):
            if draft and plan.drafters[row] != self._free:
                self.feedback.leave_out(seq, self._free, draft)
                drafts[row] = EMPTY
        return plan

    def _review(self, seqs: Seq[Sequence], plan: Plan, drafts: list[Draft]) -> list[Draft]:
        """These drafts, cut to what is worth scoring; those of models are judged by the text, scored or not."""
        if self.controller is None or not self._reviews:
            return drafts
        offers = [offer_of(draft, n) for draft, n in zip(drafts, plan.lengths, strict=True)]
        lengths = self.controller.choose_drafts([seq.id for seq in seqs], plan, offers)
        for row, (seq, draft, offer, n) in enumerate(zip(seqs, drafts, offers, lengths, strict=True)):
            by = plan.drafters[row]
            if draft and (n < len(draft) or by != self._free):
                expected = sum(offer.survival) if by != self._free else draft.expected
                self.feedback.leave_out(
                    seq, by, Draft(tuple(draft.tokens), draft.parents, source=draft.source, expected=expected)
                )
            drafts[row] = draft.first_nodes(n) if n else EMPTY
        return drafts

    def _ask(
        self, view: RoundView, plan: Plan | None
    ) -> tuple[list[Draft], tuple[int, ...], Plan | None, float] | None:
        """The drafts; the members that had a part; the plan, with who drafts settled; the free member's seconds.

        None where a member needs the round in flight to complete first. Members that watch may do so where they are
        not asked, as often as their share of the time allows. Without a controller, others see every round.
        """
        drafts, members, asking = [EMPTY] * len(view.seqs), list[int](), 0.0
        included = () if plan is None else {j for i in {*plan.drafters} - {-1} for j in self._included[i]}
        whole, known = view, view.take(range(len(view.seqs) - view.newcomers)) if view.newcomers else view
        for i, member in enumerate(self.members):
            view = whole if member.traits.drafts_newcomers else known
            looked = plan is not None and i == self._free
            budgets = self._budgets_of(i, view, plan)
            rows = [row for row, budget in enumerate(budgets) if budget > 0]
            if not rows:
                if i in included:
                    continue
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
            compared = self._compares if plan is None else self._uses_stated or member.traits.shares
            asked = RoundView(view.seqs, budgets, view.state, compared, view.budgets if self._shares else None)
            if member.traits.watches or view.state is not None:  # taking rows of tensors costs more than all
                rows = list(range(len(budgets)))
            began = time.perf_counter()
            made = member.propose(asked if len(rows) == len(budgets) else asked.take(rows))
            if made is None:
                return None if view.state is not None else (drafts, tuple(members), plan, asking)
            for row, draft in zip(rows, made, strict=True):
                drafts[row] = draft or drafts[row]
            if plan is not None and looked:
                asking, plan = time.perf_counter() - began, self._settled(view.seqs, plan, drafts)
        return drafts, tuple(members), plan, asking

    def _budgets_of(self, member: int, view: RoundView, plan: Plan | None) -> list[int]:
        """For each sequence, max tokens to ask a member for."""
        if plan is None:
            return list(view.budgets)
        if self.controller is not None and self.controller.review is not None:
            return list(map(min, self.controller.review.asked(plan, member), view.budgets))
        return plan.lengths_of(member)[: len(view.seqs)]

    def _watches(self, view: RoundView, by: int = NOBODY) -> bool:
        """Whether members that can watch do so in this round. by: the member that is asked for every sequence."""
        beside = self._included[by] if by != NOBODY else ()
        able = any(i != by and i not in beside for i in self.feedback.watchers)
        return able and self._is_hidden(view) and not self._kept.tells and self._watching.due

    def _is_hidden(self, view: RoundView) -> bool:
        """Whether no device is idle while the host prepares this round: one is in flight, or rounds do not overlap."""
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
