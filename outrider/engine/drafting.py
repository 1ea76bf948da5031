"""Where drafts come in: forced tokens, then the drafter's, checked and cut to what the target scores."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sequence import Sequence
from outrider.drafters import grammar
from outrider.drafters.base import Drafter, RoundView, TargetPass, Traits
from outrider.drafters.guard import GuardedDrafter, legal_nodes
from outrider.runners.base import Runner


class Drafting:
    """The engine's drafter. What a drafter does wrong costs time, never an answer: see `GuardedDrafter`.

    Where a constraint forces tokens they are the draft, and the drafter is not asked; it observes an empty
    draft and all the tokens committed, as a member of a `mix` does. Whether tokens are forced depends
    on the text alone, so no draft is dropped for what it holds.
    """

    def __init__(self, drafter: Drafter, runner: Runner) -> None:
        self.runner = runner
        self.drafter = GuardedDrafter(drafter, runner.vocab_size)

    @property
    def traits(self) -> Traits:
        return self.drafter.traits

    def propose(self, view: RoundView) -> list[Draft] | None:
        """A draft for each sequence; None, only where `view.state` is given: the round in flight comes first."""
        if view.state is not None:  # such sequences have no constraint
            proposed = self.drafter.propose(view)
            return None if proposed is None else [self._scorable(draft) for draft in proposed]
        drafts = [self._forced(seq, budget) for seq, budget in zip(view.seqs, view.budgets, strict=True)]
        rows = [i for i, budget in enumerate(view.budgets) if budget > 0 and not drafts[i]]
        if rows:
            for i, draft in zip(rows, self.drafter.propose(view.take(rows)) or (), strict=True):
                drafts[i] = self._scorable(draft)
        return [self._trimmed(draft) for draft in drafts] if len(drafts) == 1 else drafts

    def process(self, work: TargetPass) -> None:
        """Show the drafter what the target has read; only for one that follows the target."""
        self.drafter.process(work)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Show the drafter what became of its drafts, and what was committed where tokens were forced."""
        own = [draft.source != grammar.NAME for draft in drafts]
        self.drafter.observe(
            seqs,
            [draft if mine else EMPTY for draft, mine in zip(drafts, own, strict=True)],
            [verdict if mine else Verdict(verdict.tokens) for verdict, mine in zip(verdicts, own, strict=True)],
        )

    def forget(self, seq: Sequence) -> None:
        """Let the drafter drop a finished sequence. `take_failures` comes after."""
        self.drafter.forget(seq)

    def take_failures(self, seq_id: int) -> int:
        """How often the drafter failed for a sequence; the count is dropped with that."""
        return self.drafter.take_failures(seq_id)

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
