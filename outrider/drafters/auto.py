"""What to take where nobody chose: every drafter that costs nothing, and a draft model where one is named."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.drafters.base import Drafter, DrafterContext, Traits
from outrider.drafters.draft_model import DraftModelConfig
from outrider.drafters.mix import MixConfig
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.suffix import SuffixConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """Draft from the text, earlier answers and predictions, and with a draft model if one is named."""

    model: str = ""
    """A draft model, as for draft-model; empty: none."""
    k: int = 7
    """Max tokens that it drafts in one round."""

    def __post_init__(self) -> None:
        self._mix()  # which checks the options

    def _mix(self) -> MixConfig:
        free = (SuffixConfig(), PredictionConfig())
        return MixConfig(of=(*free, DraftModelConfig(model=self.model, k=self.k)) if self.model else free)

    @property
    def traits(self) -> Traits:
        return self._mix().traits

    def build(self, context: DrafterContext) -> Drafter:
        return self._mix().build(context)
