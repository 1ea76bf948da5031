"""A head over the target's own hidden states drafts token by token: EAGLE, EAGLE-2's trees, EAGLE-3 and 3.1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.sampling import is_int
from outrider.drafters.base import DrafterContext, ModelLoaded, RoundView, Traits
from outrider.drafters.draft_model import chain_lengths
from outrider.drafters.eagle_tree import TreePlan, drawn_plan, grow_trees, ranked_plan
from outrider.drafters.head_drafter import HeadDrafter, native_target
from outrider.drafters.options import check_options
from outrider.drafters.shipped import shipped_folder
from outrider.models.heads.config import HeadKind
from outrider.models.heads.eagle import EagleHead, load_eagle
from outrider.models.heads.mtp import MtpHead
from outrider.runners.draft_batch import HeadDraft
from outrider.runners.heads import HeadBatch, HeadRunner, MakeFused
from outrider.runners.native import NativeRunner
from outrider.verify.head_sampling import Children, HeadLogits, drawn_children, next_tokens, noisy_children

MAX_NODES = 31
"""Max nodes of a tree: a pass of the target has room for the text's last token and this many more."""
MAX_TREE_ROWS = 63
"""Max rows of a tree that a head runs: the ancestors of a row are bits of one int64."""
_MEMORY = 0.05
"""Weight of a new round in running means."""


StepHead = EagleHead | MtpHead
"""A head that drafts token by token."""


class StepOptions(Protocol):
    """What the configurations of such heads have in common: see `EagleConfig`."""

    @property
    def k(self) -> int: ...
    @property
    def tree(self) -> int: ...
    @property
    def depth(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def traits(self) -> Traits: ...


def check_steps(name: str, options: StepOptions) -> None:
    """ConfigError where options of the drafter `name` are out of range."""
    check_options(name, options, k=(1, MAX_NODES), depth=(1, MAX_NODES), top_k=(1, MAX_NODES))
    if not is_int(options.tree) or not 0 <= options.tree <= MAX_NODES:
        raise ConfigError(f"{name}: tree must be 0 to {MAX_NODES}, got {options.tree!r}")
    if options.tree and (rows := ranked_plan(options.tree, options.depth, options.top_k).rows) > MAX_TREE_ROWS:
        raise ConfigError(
            f"{name}: depth={options.depth} and top_k={options.top_k} run {rows} nodes of a tree, and {MAX_TREE_ROWS} "
            "is the most: give a smaller depth or top_k"
        )


def step_traits(name: str, options: StepOptions, loads: ModelLoaded) -> Traits:
    """The traits that the options decide; the drafter's own traits also name the layers that its checkpoint reads."""
    return Traits(
        name=name,
        max_tokens=options.tree or options.k,
        runs_model=True,
        drafts_ahead=True,
        drafts_newcomers=True,
        pays_budget=True,
        states_probs=True,
        loads=(loads,),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Draft token by token with a head over the target's hidden states (EAGLE-1, 2 and 3)."""

    model: str = ""
    """Folder or Hugging Face id of a head that was trained for this target; empty: the one that is shipped for it."""
    k: int = 5
    """Tokens of a chain."""
    tree: int = 0
    """Nodes of a tree, which grows where the head is surest (EAGLE-2); 0 drafts chains."""
    depth: int = 6
    """Levels of a tree."""
    top_k: int = 8
    """Nodes of each level that get children, and children of each."""
    kind: Literal["any", "eagle", "eagle3"] = "any"
    """What the head must be; any: what its checkpoint says."""

    def __post_init__(self) -> None:
        check_steps("eagle", self)

    @property
    def traits(self) -> Traits:
        """Without `model`, the traits that every head has; `for_target` names the head."""
        found = step_traits("eagle", self, ModelLoaded(self.model))
        return found if self.model else replace(found, loads=())

    def for_target(self, folder: Path) -> EagleConfig:
        """With the shipped head for the model in this folder, where none is named."""
        return self if self.model else replace(self, model=shipped_folder("eagle", folder, "eagle3"))

    def build(self, context: DrafterContext) -> Eagle:
        target = native_target("eagle", context)
        if not self.model:
            return replace(self, model=shipped_folder("eagle", context.target_folder, "eagle3")).build(context)
        kinds: tuple[HeadKind, ...] = ("eagle", "eagle3") if self.kind == "any" else (self.kind,)
        return Eagle(self, load_eagle(self.model, target.model.decoder, kinds), target, context)


class Eagle(HeadDrafter[HeadRunner]):
    """Drafts with a head that drafts token by token, EAGLE's or another.

    Its keys and values lie in the target's pages; see `HeadRunner` for what else is kept of a text.
    """

    def __init__(self, options: StepOptions, head: StepHead, target: NativeRunner, context: DrafterContext) -> None:
        self.head, self.sampled = head, context.mode == "distribution"
        self.plan: TreePlan | None = None
        """The sizes of its trees; None: it drafts chains."""
        levels = options.k
        if options.tree:
            levels = min(options.depth, options.tree)
            if target.scores_trees:
                top_k = min(options.top_k, head.config.outputs)
                self.plan = (drawn_plan if self.sampled else ranked_plan)(options.tree, levels, top_k)
        taps, most = head.config.taps, levels if self.plan is None else self.plan.nodes
        self.traits = replace(options.traits, max_tokens=most, kept_taps=taps)
        target.keep_taps(taps)
        pool = None if target.graphs is None else target.graphs.graph_pool
        chains = tuple(range(1, levels + 1)) if pool is None else chain_lengths(levels)
        if self.plan is not None or pool is not None:
            self.lengths = chains if self.plan is None else (most,)
        self.runner = HeadRunner(
            target.model,
            head,
            self._draft,
            max_accepted=levels,
            lengths=chains if self.plan is None else (most,),
            rows=levels if self.plan is None else self.plan.rows,
            row_width=1 if self.plan is None else self.plan.row_width,
            sampled=self.sampled,
            chains=self.plan is None and not self.sampled,
            fused=_fused(head, target),
            graph_pool=pool,
        )
        self._steps = torch.arange(levels, device=target.device)[:, None]
        self._tokens = head.tokens()
        if self._tokens is not None:
            self._tokens = self._tokens.to(target.device)
        super().__init__(levels)
        for _ in self.runner.capture(context.max_batch):
            pass

    def make(self, view: RoundView) -> HeadDraft:
        return self.runner.draft(view.seqs, view.state, max(view.budgets))

    def _draft(self, batch: HeadBatch, length: int) -> HeadDraft:
        if self.plan is None:
            return self._chain(batch, length)
        return grow_trees(batch, self.plan, partial(self._children, batch))

    def _chain(self, batch: HeadBatch, length: int) -> HeadDraft:
        """Draft chains: each step runs one row of each sequence, with the token before and the head's output there."""
        hidden, places = batch.read(), batch.lengths + self._steps[:length]  # [length, B]: where each token will be
        chain: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(length):
            if step:
                hidden = batch.forward(chain[-1][:, None], hidden, places[step - 1])
            logits = self._logits(batch, hidden, step)
            if self.sampled:
                made = drawn_children(logits, 1)
                chain.append(made.tokens[:, 0, 0])
                probs += [] if made.probs is None else [made.probs]
            else:
                chain.append(next_tokens(logits._replace(lengths=places[step], step=0)))
        return HeadDraft(torch.stack(chain, 1), None, torch.cat(probs, 1) if probs else None)

    def _children(self, batch: HeadBatch, outputs: Tensor, depth: int, count: int) -> Children:
        return (drawn_children if self.sampled else noisy_children)(self._logits(batch, outputs, depth), count)

    def _logits(self, batch: HeadBatch, outputs: Tensor, step: int) -> HeadLogits:
        """outputs [B, R, hidden]: of nodes at depth `step`."""
        rows = self.runner.logits(outputs.flatten(0, 1)).view(*outputs.shape[:2], -1)
        vocab = self.head.config.vocab_size
        return HeadLogits(rows, step, batch.lengths, batch.seeds, batch.temperatures, vocab, self._tokens)


def _fused(head: StepHead, target: NativeRunner) -> MakeFused | None:
    """What makes the head with fused kernels; None where the kernels do not support it."""
    if not target.model.fused:
        return None
    from outrider.runners import fused_head

    return partial(fused_head.FusedHead, head) if fused_head.supports(head) else None
