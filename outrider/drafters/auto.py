"""What to take where nobody chose: every drafter that costs nothing, and a draft model where one is named."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import ConfigError
from outrider.drafters.base import Drafter, DrafterContext, Traits
from outrider.drafters.draft_model import DraftModelConfig
from outrider.drafters.mix import MixConfig
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.suffix import SuffixConfig

_K = 7
"""A controller cuts drafts where they do not pay, so that the limit may be generous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """Draft from the text, earlier answers and predictions, and with a draft model if one is named."""

    model: str = ""
    """A draft model, as for draft-model; empty: none."""
    k: int | None = None
    """Max tokens that the draft model drafts in one round; auto: 7."""

    def __post_init__(self) -> None:
        if self.k is not None and not self.model:
            raise ConfigError(f"auto: k={self.k} is of a draft model; name one, as in auto:model=NAME,k={self.k}")
        self._mix()  # which checks the options

    def _mix(self) -> MixConfig:
        free = (SuffixConfig(), PredictionConfig())
        if not self.model:
            return MixConfig(of=free)
        return MixConfig(of=(*free, DraftModelConfig(model=self.model, k=_K if self.k is None else self.k)))

    @property
    def traits(self) -> Traits:
        return self._mix().traits

    def build(self, context: DrafterContext) -> Drafter:
        return self._mix().build(context)
