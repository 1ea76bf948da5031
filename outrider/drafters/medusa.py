"""Medusa heads over the target's last hidden state draft several positions at once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from outrider.core.errors import ConfigError
from outrider.core.sampling import is_int
from outrider.drafters.base import DrafterContext, ModelLoaded, RoundView, Traits
from outrider.drafters.head_drafter import HeadDrafter, native_target
from outrider.models.heads.checkpoint import check_target, load_weights, open_head, parse_head_config
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.medusa import MedusaHead
from outrider.runners.draft_batch import HeadDraft
from outrider.runners.heads import HeadBatch, HeadRunner
from outrider.runners.native import NativeRunner
from outrider.verify.block_sampling import BlockLogits, draft_chain, draft_tree, draw_chain

MAX_NODES = 31


@lru_cache(maxsize=8)
def _read_head(name: str) -> HeadConfig:
    """The configuration in a head's checkpoint. No weight is read."""
    return parse_head_config(open_head(name))


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaConfig:
    """Draft with Medusa heads, which predict several positions from the target's last hidden state."""

    model: str = ""
    """Folder or Hugging Face id of the heads, which were trained for this target."""
    k: int = 0
    """Tokens drafted a round; 0: as many as there are heads."""
    tree: int = 24
    """Nodes of a tree of the likeliest tokens; 0 drafts chains. In mode `distribution` always chains."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("medusa needs heads: medusa:model=FOLDER, trained for this target")
        for name, value in (("k", self.k), ("tree", self.tree)):
            if not is_int(value) or not 0 <= value <= MAX_NODES:
                raise ConfigError(f"medusa: {name} must be 0 to {MAX_NODES}, got {value!r}")

    @property
    def traits(self) -> Traits:
        config = _read_head(self.model)
        return Traits(
            name="medusa",
            max_tokens=max(self.tree, self.levels(config)),
            runs_model=True,
            drafts_ahead=True,
            drafts_newcomers=True,
            pays_budget=True,
            kept_taps=config.taps,
            states_probs=True,
            loads=(ModelLoaded(self.model),),
        )

    def levels(self, config: HeadConfig) -> int:
        """Max tokens on one path of a draft of these heads."""
        return min(self.k, config.medusa_heads) if self.k else config.medusa_heads

    def build(self, context: DrafterContext) -> Medusa:
        target = native_target("medusa", context)
        decoder = target.model.decoder
        config = check_target(_read_head(self.model), decoder.config, name=self.model, kinds=("medusa",))
        head = MedusaHead(config, decoder)
        load_weights(head, open_head(self.model))
        drafter = Medusa(self, head.to(decoder.device, decoder.dtype).requires_grad_(False), target, context)
        for _ in drafter.runner.capture(context.max_batch):
            pass
        return drafter


class Medusa(HeadDrafter[HeadRunner]):
    """Drafts from the target's hidden state at each text's last cached token, see `HeadRunner`."""

    def __init__(self, options: MedusaConfig, head: MedusaHead, target: NativeRunner, context: DrafterContext) -> None:
        self.head, self.sampled = head, context.mode == "distribution"
        self.levels = options.levels(head.config)
        self.nodes = 0 if self.sampled or not target.scores_trees else options.tree
        """The number of nodes of a tree; 0: chains are drafted."""
        self.traits = replace(options.traits, max_tokens=max(self.nodes, self.levels), kept_taps=head.config.taps)
        target.keep_taps(head.config.taps)
        pool = None if target.graphs is None else target.graphs.graph_pool
        self.runner = HeadRunner(
            target.model, head, self._draft, max_accepted=self.levels, sampled=self.sampled, graph_pool=pool
        )  # fmt: skip
        super().__init__(self.levels)
        self.lengths = (self.traits.max_tokens,)

    def make(self, view: RoundView) -> HeadDraft:
        return self.runner.draft(view.seqs, view.state)

    def _draft(self, batch: HeadBatch, _length: int) -> HeadDraft:
        """Draft from a block of independent rows, as a block drafter does without a Markov head."""
        rows = self.head.logits(batch.outputs())[:, : self.levels]
        block = BlockLogits(
            rows, batch.last, batch.lengths, batch.seeds, batch.temperatures, self.head.config.vocab_size
        )  # fmt: skip
        if self.nodes:
            return HeadDraft(*draft_tree(block, self.nodes))
        tokens, probs = draw_chain(block) if self.sampled else (draft_chain(block)[0], None)
        return HeadDraft(tokens, probs=probs)
