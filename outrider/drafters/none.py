"""No drafts: every round yields one token, chosen by the target alone."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.draft import EMPTY, Draft
from outrider.drafters.base import Drafter, DrafterContext, RoundView, Traits


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDraftConfig:
    """Never draft: plain decoding."""

    @property
    def traits(self) -> Traits:
        return NoDraft.traits

    def build(self, context: DrafterContext) -> NoDraft:
        return NoDraft()


class NoDraft(Drafter):
    """Proposes nothing and keeps nothing."""

    traits = Traits(name="none", max_tokens=0, drafts_ahead=True, observes=False)

    def propose(self, view: RoundView) -> list[Draft]:
        return [EMPTY] * len(view.seqs)
