"""A few layers over the target's own hidden states draft a whole block in one pass: DSpark and DFlash heads."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from outrider.core.device_row import ConfidenceRow
from outrider.core.draft import Draft
from outrider.core.errors import ConfigError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import is_int
from outrider.core.sequence import Sequence
from outrider.drafters.base import DrafterContext, ModelLoaded, RoundView, Traits
from outrider.drafters.head_drafter import HeadDrafter, native_target
from outrider.drafters.shipped import shipped_folder
from outrider.models.heads.block import BlockHead
from outrider.models.heads.checkpoint import check_target, load_weights, open_head, parse_head_config
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.packed import PackedLinear, pack_linears
from outrider.runners.block_heads import BlockBatch, BlockRunner
from outrider.runners.cpu_heads import TreeSize
from outrider.runners.cuda_graphs import MIN_PACKED_BATCH
from outrider.runners.draft_batch import HeadDraft, Share
from outrider.runners.native import NativeRunner
from outrider.verify.block_sampling import (
    TREE_WIDTH,
    BlockLogits,
    ConfidenceLayer,
    draft_chain,
    draft_tree,
    draw_chain,
    share_chains,
)

MAX_BLOCK = 32
"""Max rows of a block, and nodes of a tree with the text's last token."""


def _read_head(name: str) -> HeadConfig:
    """The configuration in a head's checkpoint. No weight is read."""
    return parse_head_config(open_head(name))


def _traits(max_tokens: int, taps: tuple[int, ...], loads: tuple[ModelLoaded, ...]) -> Traits:
    return Traits(
        name="block",
        max_tokens=max_tokens,
        runs_model=True,
        drafts_ahead=True,
        drafts_newcomers=True,
        pays_budget=True,
        kept_taps=taps,
        states_probs=True,
        loads=loads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """Draft a block in one pass of a head over the target's hidden states (DSpark, DFlash)."""

    model: str = ""
    """Folder or Hugging Face id of the head, which was trained for this target; empty: the one that is shipped."""
    k: int = 0
    """Tokens drafted a round; 0: as many as its blocks have."""
    tree: int = 0
    """Nodes of a tree of the likeliest tokens; 0 drafts chains. In mode `distribution` always chains."""
    share: int = 0
    """Max tokens scored a sequence and round, on average, where several share a pass: those that the head is surest of.
    0: as many as are drafted, or as a controller asks for. On CUDA, in mode `seeded`."""

    def __post_init__(self) -> None:
        numbers = ("k", self.k, MAX_BLOCK), ("tree", self.tree, MAX_BLOCK - 1), ("share", self.share, MAX_BLOCK)
        for name, value, most in numbers:
            if not is_int(value) or not 0 <= value <= most:
                raise ConfigError(f"block: {name} must be 0 to {most}, got {value!r}")

    @property
    def traits(self) -> Traits:
        """Without `model`, the traits that every block head has; `for_target` names the head."""
        if not self.model:
            return _traits(max(self.tree, self.k), (), ())
        return self.traits_with(_read_head(self.model))

    def traits_with(self, config: HeadConfig) -> Traits:
        """The traits of a drafter with such a head."""
        return _traits(max(self.tree, self.levels(config)), config.taps, (ModelLoaded(self.model),))

    def levels(self, config: HeadConfig) -> int:
        """Max tokens on one path of a draft of this head."""
        drafts = config.block_size - (not config.sample_from_anchor)
        return min(self.k, drafts) if self.k else drafts

    def for_target(self, folder: Path) -> BlockConfig:
        """With the shipped head for the model in this folder, where none is named."""
        return self if self.model else replace(self, model=shipped_folder("block", folder, "block"))

    def build(self, context: DrafterContext) -> Block:
        target = native_target("block", context)
        if not self.model:
            return replace(self, model=shipped_folder("block", context.target_folder, "block")).build(context)
        decoder = target.model.decoder
        config = check_target(_read_head(self.model), decoder.config, name=self.model, kinds=("block",))
        if config.block_size > MAX_BLOCK:
            raise ConfigError(f"block: {self.model} has blocks of {config.block_size} rows; {MAX_BLOCK} are supported")
        head = BlockHead(config, decoder)
        load_weights(head, open_head(self.model))
        head = head.to(decoder.device, decoder.dtype).requires_grad_(False)
        if decoder.weights.packed:
            pack_linears(head.layers)
            head.fc = cast(Any, PackedLinear(head.fc))
            head.lm_head = None if head.lm_head is None else cast(Any, PackedLinear(head.lm_head))
        drafter = Block(self, head, target, context)
        for _ in drafter.runner.capture(context.max_batch):
            pass
        return drafter


class Block(HeadDrafter[BlockRunner]):
    """Its head's keys and values lie in the target's pages; the host keeps how far texts were read, and confidences."""

    def __init__(self, options: BlockConfig, head: BlockHead, target: NativeRunner, context: DrafterContext) -> None:
        config = head.config
        self.head, self.sampled = head, context.mode == "distribution"
        self.nodes = 0 if self.sampled or not target.scores_trees else options.tree
        """The number of nodes of a tree; 0: chains are drafted."""
        levels = options.levels(config)
        graphs = target.graphs
        if graphs is not None and graphs.pinned:  # pinned passes are not packed
            graphs = None
        shares = not self.nodes and not self.sampled and head.confidence_head is not None and graphs is not None
        self.traits = replace(options.traits_with(config), max_tokens=max(self.nodes, levels), shares=shares)
        target.keep_taps(config.taps)
        pool = None if target.graphs is None else target.graphs.graph_pool
        self.runner = BlockRunner(
            target.model, head, self._draft, tokens=levels, sampled=self.sampled,
            gained=context.longest_draft if shares else 0,
            chains=not self.nodes and not self.sampled, graph_pool=pool,
            tree=TreeSize(self.nodes, TREE_WIDTH) if self.nodes else None,
        )  # fmt: skip
        self._tokens = head.tokens
        markov = head.markov_head
        self._markov = None if markov is None else (markov.markov_w1.weight.detach(), markov.markov_w2.weight.detach())
        super().__init__(levels)
        self.lengths = (self.traits.max_tokens,)
        self._graphs = graphs if shares else None
        """The target's captured passes, where drafts can share their rows; else None."""
        self._share = options.share
        self._confidences: dict[int, tuple[ConfidenceRow | None, ConfidenceRow]] = {}
        """By sequence id: the confidences of its last two drafts, the older first; None where there was only one."""

    def make(self, view: RoundView) -> HeadDraft:
        share = None
        if view.room is not None and self._graphs is not None:
            share = Share(view.room, self._graphs.shared_tokens(view.budgets, self._longest))
        if self.overlay is None:
            made = self.runner.draft(view.seqs, view.state, max(view.budgets), share)
        else:
            made = self.overlay.run(self.runner.draft(view.seqs, view.state, max(view.budgets)), share)
        return made if view.compared else made._replace(confidence=None)  # else a confidence is copied to the host

    def sharing(self, view: RoundView) -> RoundView:
        room, longest, own = view.room, self._longest, self.lengths[0]
        if longest > own and room is not None and [*view.budgets] == [*room]:  # nobody decides: as far as the head
            view = replace(view, budgets=[min(n, own) for n in room])
        if room is None or self._graphs is None or len(room) > self.runner.max_batch:
            return super().sharing(view)
        budgets = [min(n, self._share) for n in view.budgets] if self._share else view.budgets
        room = [min(n, longest) if budget else 0 for n, budget in zip(room, budgets, strict=True)]
        shares = view.takes_choices_alone and sum(budgets) < sum(room)
        if not shares or not self._graphs.shared_tokens(budgets, longest):
            return super().sharing(view)
        return replace(view, budgets=budgets, room=room)

    @property
    def _longest(self) -> int:
        """Max tokens of a draft of this round."""
        return self.lengths[0] if self.overlay is None else self.overlay.longest

    def propose_for(self, view: RoundView, rows: Seq[int]) -> Seq[Draft]:
        drafts, told = super().propose_for(view, rows), self._confidences
        for seq, draft in zip(view.seqs, drafts, strict=True):
            if draft.confidence is not None:
                _, before = told.get(seq.id, (None, None))
                told[seq.id] = before, draft.confidence
        return drafts

    def expected(self, seqs: Seq[Sequence], *, ahead: bool) -> list[float]:
        """The number of tokens expected to be accepted, from the confidences of the last draft that the host knows.

        Never from those of the new draft itself: whether it is scored must not depend on what was drawn for it.
        """
        sums: dict[HostCopy, list[float]] = {}
        expected: list[float] = []
        for seq in seqs:
            older, last = self._confidences.get(seq.id, (None, None))
            known = older if ahead else last  # the device may not have computed the last one yet
            if known is None:
                expected.append(self._accepted.value)
                continue
            if known.block not in sums:
                sums[known.block] = np.add.reduce(np.multiply.accumulate(known.block.chances(), 1), 1).tolist()
            expected.append(sums[known.block][known.row])
        return expected

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._confidences.pop(seq.id, None)

    def _draft(self, batch: BlockBatch) -> HeadDraft:
        rows = batch.rows()
        block = BlockLogits(
            rows.logits, batch.last, batch.lengths, batch.seeds, batch.temperatures,
            self.head.config.vocab_size, self._tokens, self._markov,
        )  # fmt: skip
        if self.nodes:
            return HeadDraft(*draft_tree(block, self.nodes))
        confident = self._confidence_layer(rows.hidden)
        if self.sampled:
            tokens, probs = draw_chain(block)
            chances = None if confident is None else confident.chances(block, tokens)
            return HeadDraft(tokens, probs=probs, confidence=chances)
        kept = batch.kept()
        out = None if kept is None else (kept.tokens, kept.confidence)
        tokens, chances = draft_chain(block, confident, out)
        if self._graphs is not None and chances is not None and batch.batch >= MIN_PACKED_BATCH:
            share_chains(tokens, chances, batch.room, batch.shared)
        return HeadDraft(tokens, confidence=chances)

    def _confidence_layer(self, hidden: Tensor) -> ConfidenceLayer | None:
        head = self.head.confidence_head
        return None if head is None else ConfidenceLayer(hidden, head.proj.weight[0], head.proj.bias)
