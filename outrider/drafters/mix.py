"""Several drafters: for each round and sequence, the draft that expects the most accepted tokens wins."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.core.draft import EMPTY, Draft, Verdict, accepted_by
from outrider.core.errors import ConfigError
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Sequence
from outrider.drafters.base import (
    Drafter,
    DrafterConfig,
    DrafterContext,
    Evidence,
    RoundView,
    TargetPass,
    Traits,
    for_target,
)
from outrider.drafters.guard import GuardedDrafter
from outrider.drafters.hybrid import with_hybrid
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.prompt_lookup import PromptLookupConfig
from outrider.drafters.suffix import SuffixConfig

_START_ACCEPTED = 8.0
"""A member's ratio of tokens accepted to tokens expected starts at 1, with this weight."""
_RECENT_DRAFTS = 64
"""Running figures remember about this many drafts."""
_DRAFT_DECAY = 1 - 1 / _RECENT_DRAFTS


def _default_members() -> tuple[DrafterConfig, ...]:
    return (SuffixConfig(), PromptLookupConfig(), PredictionConfig())


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig:
    """Ask several drafters and take the draft that expects most tokens to be accepted."""

    of: tuple[DrafterConfig, ...] = field(default_factory=_default_members)
    """The members: `mix:of=suffix+prediction`, or just `suffix+prediction`."""

    def __post_init__(self) -> None:
        if not self.of:
            raise ConfigError("mix: of names no drafter; for example mix:of=suffix+prediction")
        _check_taps([each.traits for each in self.of])

    @property
    def traits(self) -> Traits:
        return _traits_of([each.traits for each in self.of])

    def for_target(self, folder: Path) -> MixConfig:
        return replace(self, of=tuple(for_target(each, folder) for each in self.of))

    def joins(self, context: DrafterContext) -> bool:
        """Whether lookups and a head are combined into a `Hybrid` where they can be."""
        return True

    def build(self, context: DrafterContext) -> Mix:
        joins = self.joins(context)
        context = replace(context, longest_draft=self.traits.max_tokens) if joins else context
        members: Seq[Drafter] = [config.build(context) for config in self.of]
        members = with_hybrid(members, context.max_batch) if joins else members
        return Mix(members, context.vocab_size, self.traits.name)


def _check_taps(members: Seq[Traits]) -> None:
    """ConfigError where members read different layers of the target."""
    tapping = [each for each in members if each.taps or each.kept_taps]
    if len({each.taps or each.kept_taps for each in tapping}) > 1:
        names = " and ".join(each.name for each in tapping)
        raise ConfigError(f"mix: {names} read different layers of the target; leave all but one of them out")


def _traits_of(members: Seq[Traits]) -> Traits:
    _check_taps(members)
    return Traits(
        name="+".join(each.name for each in members),
        max_tokens=max(each.max_tokens for each in members),
        aliases=("mix",),
        runs_model=all(each.runs_model for each in members),
        drafts_ahead=all(each.drafts_ahead for each in members),
        drafts_newcomers=all(each.drafts_newcomers for each in members),
        pays_budget=any(each.pays_budget for each in members),
        limits_itself=all(each.limits_itself for each in members),
        watches=any(each.watches for each in members),
        follows_target=any(each.follows_target for each in members),
        ignores_scores=all(each.ignores_scores for each in members if each.follows_target),
        taps=next((each.taps for each in members if each.taps), ()),
        kept_taps=next((each.kept_taps for each in members if each.kept_taps), ()),
        uses_prediction=any(each.uses_prediction for each in members),
        needs_prediction=all(each.needs_prediction for each in members),
        states_probs=any(each.states_probs for each in members),
        guards_itself=True,
        loads=tuple(model for each in members for model in each.loads),
    )


@dataclass(slots=True, eq=False)
class _Member:
    """A drafter, and how its drafts have fared. Drafts that did not win are compared with the text, too."""

    drafter: GuardedDrafter
    mean_accepted: float
    """Running mean of the tokens accepted of each draft; starts at the member's max tokens."""
    judged: int = 4
    """The number of drafts in that mean; its start counts as four."""
    accepted: float = _START_ACCEPTED
    expected: float = _START_ACCEPTED
    open: dict[int, tuple[int, Draft]] = field(default_factory=dict[int, tuple[int, Draft]])
    """By sequence id: where a draft starts that the text has not decided yet, and the draft."""

    def value(self, draft: Draft) -> float:
        """The expected number of accepted tokens of a draft, corrected by how earlier drafts fared."""
        return draft.expected * self.accepted / self.expected

    def remember(self, seq: Sequence, draft: Draft) -> None:
        """Keep a draft to be judged, unless an earlier one is still open."""
        if seq.id not in self.open:
            self.open[seq.id] = (len(seq.tokens), replace(draft, probs=None))

    def judge(self, seq: Sequence) -> None:
        """Judge the open draft, if the text decides it by now."""
        if seq.id not in self.open:
            return
        start, draft = self.open[seq.id]
        accepted = accepted_by(draft, seq.tokens[start:])
        if accepted is not None:
            del self.open[seq.id]
            self.accepted = self.accepted * _DRAFT_DECAY + accepted
            self.expected = self.expected * _DRAFT_DECAY + draft.expected
            self.judged += 1
            self.mean_accepted += (accepted - self.mean_accepted) / min(self.judged, _RECENT_DRAFTS)


class Mix(Drafter):
    """The best draft of its members wins; `source` stays the winner's name.

    Members that run no model are asked first, for every sequence. One that runs a model is asked only for sequences
    where the best draft so far expects fewer accepted tokens than that member's drafts had on average; the average
    starts at its max tokens, so that it is tried. A draft that states the probabilities it was sampled from is never
    dropped for another: choosing by what was sampled would bias the output. With `view.state` the host cannot see the
    drafts: a member then expects what its drafts were lately worth for that sequence. Members whose draft did not win
    observe an empty draft and all the tokens committed. A member that fails affects no other.
    """

    compares = True

    def __init__(self, drafters: Seq[Drafter], vocab_size: int, name: str = "") -> None:
        """name: by default the members' names."""
        traits = _traits_of([drafter.traits for drafter in drafters])
        self.traits = replace(traits, name=name or traits.name)
        self.parts = _parts_of(drafters, vocab_size)
        self.members = [
            _Member(GuardedDrafter(drafter, vocab_size), float(drafter.traits.max_tokens))
            for drafter in sorted(drafters, key=lambda drafter: drafter.traits.runs_model)
        ]
        self.rows = max([drafter.rows for drafter in drafters])
        included = [each for drafter in drafters for each in drafter.includes]
        self._asked = [each for each in self.members if each.drafter.drafter not in included]
        """The members that are asked; the others take part in their drafts."""
        self._unpredicted = [each for each in self._asked if not each.drafter.traits.needs_prediction]
        """Of these, the members that may have drafts for sequences without a prediction."""
        self._winners: dict[int, list[_Member | None]] = {}
        """By sequence id: whose draft was taken in each round that has not been observed yet, the oldest first."""

    def propose(self, view: RoundView) -> list[Draft] | None:
        best = [EMPTY] * len(view.seqs)
        values = [0.0] * len(view.seqs)
        winners: list[_Member | None] = [None] * len(view.seqs)
        members = self._asked_members(view.seqs)
        if len(members) == 1:
            view = replace(view, compared=False)
        elif view.room is not None:  # rows are not shared where members compete
            view = replace(view, room=None)
        for member in members:
            rows = [i for i, k in enumerate(view.budgets) if k > 0]
            if not self._always_asks(member):
                rows = [i for i in rows if self._asks(member, view.seqs[i], best[i], values[i])]
            if not rows:
                continue
            asked = view
            if len(rows) < len(view.seqs) and member.drafter.traits.watches:  # the others get no budget
                chosen, rows = {*rows}, list(range(len(view.seqs)))
                asked = replace(view, budgets=[k if i in chosen else 0 for i, k in enumerate(view.budgets)])
            drafts = member.drafter.propose(asked if len(rows) == len(view.seqs) else asked.take(rows))
            if drafts is None:
                return None
            for i, draft in zip(rows, drafts, strict=True):
                if draft is EMPTY or not draft:
                    continue
                if view.state is None:  # else it is not known yet where it starts
                    member.remember(view.seqs[i], draft)
                value = member.value(draft)
                if draft.probs is not None or not best[i] or value > values[i]:
                    best[i], values[i], winners[i] = draft, value, member
        self._note_winners(view, winners)
        return best

    def _note_winners(self, view: RoundView, winners: Seq[_Member | None]) -> None:
        """Keep whose drafts were taken until the round is observed; newcomers without a draft are not observed."""
        known = len(view.seqs) - view.newcomers
        for row, (seq, winner) in enumerate(zip(view.seqs, winners, strict=True)):
            if winner is not None or row < known:
                before = () if view.state is None else self._winners.get(seq.id, ())
                self._winners[seq.id] = [*before, winner]

    def repeat(self, view: RoundView, drafts: Seq[Draft]) -> HostCopy | None:
        """As `Drafter.repeat`, where only one member is asked: others would have to be compared with it."""
        members = self._asked_members(view.seqs)
        if len(members) > 1 or not members:
            return None
        made = members[0].drafter.repeat(view, drafts)
        if made is not None:
            for seq in view.seqs:
                self._winners.setdefault(seq.id, []).append(members[0])
        return made

    def _asked_members(self, seqs: Seq[Sequence]) -> list[_Member]:
        """The members that may have drafts for these sequences."""
        return self._asked if any(seq.prediction for seq in seqs) else self._unpredicted

    def process(self, work: TargetPass) -> None:
        for member in self.members:
            if member.drafter.traits.follows_target:
                member.drafter.process(work)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        queues = [self._winners.get(seq.id) for seq in seqs]
        winners = [queue.pop(0) if queue else None for queue in queues]
        asked, others = self._asked_members(seqs), list[Verdict]()
        for member in self.members:
            if member.open:
                for seq in seqs:
                    member.judge(seq)
            if not member.drafter.traits.observes or member not in asked:
                continue
            if winners.count(member) == len(winners):
                member.drafter.observe(seqs, drafts, verdicts)
                continue
            own = [winner is member for winner in winners]
            others = others or [verdict if not verdict.path else Verdict(verdict.tokens) for verdict in verdicts]
            seen = [draft if mine else EMPTY for draft, mine in zip(drafts, own, strict=True)]
            judged = [a if mine else b for a, b, mine in zip(verdicts, others, own, strict=True)]
            member.drafter.observe(seqs, seen, judged)

    def watch(self, view: RoundView) -> None:
        for member in self._asked_members(view.seqs):
            if member.drafter.traits.watches:
                member.drafter.watch(view)

    def take_evidence(self) -> list[Evidence]:
        watching = (member.drafter for member in self.members if member.drafter.traits.watches)
        return [each for drafter in watching for each in drafter.take_evidence()]

    def forget(self, seq: Sequence) -> None:
        self._winners.pop(seq.id, None)
        for member in self.members:
            member.open.pop(seq.id, None)
            member.drafter.forget(seq)

    def take_failures(self, seq_id: int) -> int:
        return sum(member.drafter.take_failures(seq_id) for member in self.members)

    def _always_asks(self, member: _Member) -> bool:
        """Whether this member is asked for every sequence, whatever others have drafted."""
        traits = member.drafter.traits
        return not (traits.runs_model or traits.needs_prediction or self.traits.states_probs)

    def _asks(self, member: _Member, seq: Sequence, best: Draft, value: float) -> bool:
        """Whether this member is asked for a sequence whose best draft so far has this value."""
        traits = member.drafter.traits
        if best.probs is not None or (traits.needs_prediction and not seq.prediction):
            return False
        return not traits.runs_model or value < member.mean_accepted


def _parts_of(drafters: Seq[Drafter], vocab_size: int) -> tuple[Drafter, ...]:
    """The members without a model, as one mix, and each that runs a model; empty if none does, or there is only one."""
    free = [drafter for drafter in drafters if not drafter.traits.runs_model]
    models = [drafter for drafter in drafters if drafter.traits.runs_model]
    if not models or len(drafters) == 1:
        return ()
    if len(free) < 2:
        return (*free, *models)
    together = Mix(free, vocab_size)
    for model in models:
        if any(each in model.includes for each in free):
            model.includes = (*model.includes, together)
    return (together, *models)
