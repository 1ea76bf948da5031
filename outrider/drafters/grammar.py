"""Drafts what a request's constraint forces: keys, quotes and brackets that leave no choice."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext
from outrider.drafters.options import check_options

NAME = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Draft only what the request's constraint forces."""

    k: int = 16
    """Most tokens proposed in one round."""

    def __post_init__(self) -> None:
        check_options(NAME, self, k=(1, 256))

    def build(self, setting: DrafterContext) -> Grammar:
        return Grammar(self.k)


class Grammar:
    """Proposes forced tokens and nothing else. A deterministic guess: it states no law."""

    name = NAME

    def __init__(self, k: int) -> None:
        self.max_tokens = k

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [_forced(seq, min(budget, self.max_tokens)) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """Nothing to learn."""

    def forget(self, seq: Sequence) -> None:
        """Nothing to drop."""


class ForcedFirst:
    """Any drafter, with forced tokens before its guesses: the engine puts one around its drafter.

    Where a constraint forces tokens they are the draft, and the drafter is not asked; it
    sees an empty draft and all the tokens that came, as a member of a `mix` does. Whether
    tokens are forced depends on the text alone, so no guess is dropped for what it holds.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = [_forced(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]
        free = [i for i, draft in enumerate(drafts) if not draft]
        if free:
            guesses = self.drafter.propose([seqs[i] for i in free], [budgets[i] for i in free])
            for i, guess in zip(free, guesses, strict=True):
                drafts[i] = guess
        return drafts

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        own = [draft.source != NAME for draft in drafts]
        self.drafter.observe(
            seqs,
            [draft if mine else EMPTY for draft, mine in zip(drafts, own, strict=True)],
            [verdict if mine else Verdict(verdict.tokens) for verdict, mine in zip(verdicts, own, strict=True)],
        )

    def forget(self, seq: Sequence) -> None:
        self.drafter.forget(seq)


def _forced(seq: Sequence, budget: int) -> Draft:
    if seq.constraint is None or budget < 1:
        return EMPTY
    tokens = seq.constraint.forced()[:budget]
    return Draft(tokens, source=NAME, expected=float(len(tokens))) if tokens else EMPTY
