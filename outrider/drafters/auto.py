"""The default drafter: lookups in the text, earlier answers and predictions, and a draft model or head where one is
named, else the head that is shipped for the target, if there is one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import ConfigError
from outrider.drafters.base import Drafter, DrafterContext, Traits
from outrider.drafters.block import BlockConfig
from outrider.drafters.draft_model import DraftModelConfig
from outrider.drafters.eagle import EagleConfig
from outrider.drafters.mix import MixConfig
from outrider.drafters.prediction import PredictionConfig
from outrider.drafters.shipped import ShippedHead, shipped_for
from outrider.drafters.suffix import SuffixConfig
from outrider.models.heads.checkpoint import kind_of
from outrider.models.heads.files import open_head

_K = 7
"""Max tokens of a draft model's drafts. The controller cuts drafts that do not pay, so the limit is generous."""


_LEAST_READ = 1 << 30
"""Lookups and a head form a `Hybrid` where a target pass reads at least so many bytes of weights: a sequence that joins
then costs the host about half a millisecond more. It pays at 3 GB and not at 0.3; between, nothing was measured."""

_HEADS: dict[str, type[BlockConfig] | type[EagleConfig]] = {
    "block": BlockConfig, "eagle": EagleConfig, "eagle3": EagleConfig
}  # fmt: skip


def _kind_of(model: str) -> str:
    """The kind of the head in the folder `model`; empty if there is no head, and for a name that is no folder."""
    if Path(model).is_dir():
        with suppress(ConfigError):
            return kind_of(open_head(model))
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoMixConfig(MixConfig):
    """A mix that keeps lookups and a head separate where the target is small."""

    def joins(self, context: DrafterContext) -> bool:
        work = None if context.target is None else context.target.work
        return work is not None and work.bytes_read(1) >= _LEAST_READ


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoConfig:
    """Draft from the text, earlier answers and predictions, and with a draft model or a shipped head."""

    model: str = ""
    """A draft model, as for draft-model, or the folder of a block or EAGLE head; empty: the head that is shipped for
    the target, if there is one."""
    k: int | None = None
    """Max tokens that the model drafts in one round; auto: 7, of a head what it was made for."""

    def __post_init__(self) -> None:
        if self.k is not None and not self.model:
            raise ConfigError(f"auto: k={self.k} is of a model; name one, as in auto:model=NAME,k={self.k}")
        self._mix(None)  # which checks the options

    def _mix(self, shipped: ShippedHead | None) -> MixConfig:
        free = (SuffixConfig(), PredictionConfig())
        if not self.model:
            return AutoMixConfig(
                of=free if shipped is None else (*free, _HEADS[shipped.kind](model=str(shipped.folder)))
            )
        head = _HEADS.get(_kind_of(self.model))
        if head is None:
            return AutoMixConfig(of=(*free, DraftModelConfig(model=self.model, k=_K if self.k is None else self.k)))
        return AutoMixConfig(of=(*free, head(model=self.model) if self.k is None else head(model=self.model, k=self.k)))

    @property
    def traits(self) -> Traits:
        """The traits without a shipped head, which only `for_target` finds."""
        return self._mix(None).traits

    def for_target(self, folder: Path) -> MixConfig:
        return self._mix(None if self.model else shipped_for(folder))

    def build(self, context: DrafterContext) -> Drafter:
        folder = context.target_folder
        return (self._mix(None) if folder is None else self.for_target(folder)).build(context)
