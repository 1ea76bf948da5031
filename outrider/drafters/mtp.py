"""The target's own MTP module (multi-token prediction) drafts token by token, as EAGLE's head does."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.errors import ConfigError
from outrider.drafters.base import DrafterContext, ModelLoaded, Traits
from outrider.drafters.eagle import Eagle, check_steps, step_traits
from outrider.drafters.head_drafter import native_target
from outrider.models.heads.mtp import load_mtp


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig:
    """Draft token by token with the MTP module that the target's checkpoint holds."""

    model: str = ""
    """Folder or Hugging Face id of another checkpoint that holds a module for this target."""
    k: int = 3
    """Tokens of a chain: the module is applied so many times."""
    tree: int = 0
    """Nodes of a tree, which grows where the module is surest (EAGLE-2); 0 drafts chains."""
    depth: int = 4
    """Levels of a tree."""
    top_k: int = 8
    """Nodes of each level that get children, and children of each."""

    def __post_init__(self) -> None:
        check_steps("mtp", self)

    @property
    def traits(self) -> Traits:
        return step_traits("mtp", self, ModelLoaded(self.model, module=True))

    def build(self, context: DrafterContext) -> Eagle:
        target = native_target("mtp", context)
        name = self.model or str(context.target_folder or "")
        if not name:
            raise ConfigError(
                "mtp: the target was not loaded from a folder; name one with its module: mtp:model=FOLDER"
            )
        return Eagle(self, load_mtp(name, target.model.decoder), target, context)
