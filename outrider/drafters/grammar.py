"""Drafts what a request's constraint forces: keys, quotes and brackets that leave no choice."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits
from outrider.drafters.options import check_options

NAME = "grammar"


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarConfig:
    """Draft only what the request's constraint forces."""

    k: int = 16
    """Max tokens proposed in one round."""

    def __post_init__(self) -> None:
        check_options(NAME, self, k=(1, 256))

    @property
    def traits(self) -> Traits:
        return Grammar(self.k).traits

    def build(self, context: DrafterContext) -> Grammar:
        return Grammar(self.k)


class Grammar(Drafter):
    """Proposes forced tokens and nothing else. They are certain: the drafts carry no probabilities."""

    def __init__(self, k: int) -> None:
        self.traits = Traits(name=NAME, max_tokens=k)

    def propose(self, view: RoundView) -> list[Draft]:
        most = self.traits.max_tokens
        return [forced_tokens(seq, min(budget, most)) for seq, budget in zip(view.seqs, view.budgets, strict=True)]


def forced_tokens(seq: Sequence, budget: int) -> Draft:
    """The tokens that the constraint of a sequence forces next, at most `budget`; empty where it has a choice."""
    if seq.constraint is None or budget < 1:
        return EMPTY
    tokens = seq.constraint.forced()[:budget]
    return Draft(tokens, source=NAME, expected=float(len(tokens))) if tokens else EMPTY
