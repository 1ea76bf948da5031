"""A head over the target's own hidden states drafts token by token: EAGLE, EAGLE-2's trees, EAGLE-3 and 3.1."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from outrider.core.device_row import DeviceRow
from outrider.core.draft import EMPTY, Draft, Verdict
from outrider.core.errors import ConfigError
from outrider.core.host_copy import HostCopy
from outrider.core.sampling import is_int
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, DrafterContext, ModelLoaded, RoundView, TargetPass, Traits
from outrider.drafters.draft_model import chain_lengths
from outrider.drafters.eagle_tree import TreePlan, drawn_plan, grow_trees, ranked_plan
from outrider.drafters.options import check_options
from outrider.models.heads.config import HeadKind
from outrider.models.heads.eagle import EagleHead, load_eagle
from outrider.runners.draft_batch import HeadDraft
from outrider.runners.heads import HeadBatch, HeadRunner
from outrider.runners.native import NativeRunner
from outrider.verify.head_sampling import Children, HeadLogits, drawn_children, next_tokens, noisy_children

MAX_NODES = 31
"""Of a tree: a pass of the target has room for the text's last token and so many more."""
MAX_TREE_ROWS = 63
"""Rows of a tree that a head runs: as many as one number's bits can tell apart."""
_MEMORY = 0.05
"""Weight of a new round in running means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """Draft token by token with a head over the target's hidden states (EAGLE-1, 2 and 3)."""

    model: str = ""
    """Folder or Hugging Face id of the head, which was trained for this target."""
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
        if not self.model:
            raise ConfigError("eagle needs a head: eagle:model=FOLDER, one that was trained for this target")
        check_options("eagle", self, k=(1, MAX_NODES), depth=(1, MAX_NODES), top_k=(1, MAX_NODES))
        if not is_int(self.tree) or not 0 <= self.tree <= MAX_NODES:
            raise ConfigError(f"eagle: tree must be 0 to {MAX_NODES}, got {self.tree!r}")
        if self.tree and (rows := ranked_plan(self.tree, self.depth, self.top_k).rows) > MAX_TREE_ROWS:
            raise ConfigError(
                f"eagle: depth={self.depth} and top_k={self.top_k} run {rows} nodes of a tree, and {MAX_TREE_ROWS} is "
                "the most: give a smaller depth or top_k"
            )

    @property
    def traits(self) -> Traits:
        """Which layers are read, the head's checkpoint says: the drafter's own traits name them."""
        return Traits(
            name="eagle",
            max_tokens=self.tree or self.k,
            runs_model=True,
            drafts_ahead=True,
            pays_budget=True,
            follows_target=True,
            states_probs=True,
            loads=(ModelLoaded(self.model),),
        )

    def build(self, context: DrafterContext) -> Eagle:
        target = context.target
        if not isinstance(target, NativeRunner):
            raise ConfigError(
                "eagle reads the layers of its target, which only models of a native family show; choose another "
                "drafter, for example suffix"
            )
        kinds: tuple[HeadKind, ...] = ("eagle", "eagle3") if self.kind == "any" else (self.kind,)
        drafter = Eagle(self, load_eagle(self.model, target.model.decoder, kinds), target, context)
        for _ in drafter.runner.capture(context.max_batch):
            pass
        return drafter


class Eagle(Drafter):
    """The head's keys and values lie in the target's pages; see `HeadRunner` for what else is kept of a text."""

    def __init__(self, options: EagleConfig, head: EagleHead, target: NativeRunner, context: DrafterContext) -> None:
        self.head, self.sampled = head, context.mode == "distribution"
        self.plan: TreePlan | None = None
        """Of its trees; None: it drafts chains."""
        levels = options.k
        if options.tree:
            levels = min(options.depth, options.tree)
            if target.scores_trees:
                top_k = min(options.top_k, head.config.outputs)
                self.plan = (drawn_plan if self.sampled else ranked_plan)(options.tree, levels, top_k)
        taps, most = head.config.taps, levels if self.plan is None else self.plan.nodes
        self.traits = replace(options.traits, max_tokens=most, taps=taps)
        target.tap(taps)
        pool = None if target.graphs is None else target.graphs.graph_pool
        chains = tuple(range(1, levels + 1)) if pool is None else chain_lengths(levels)
        self.lengths = () if pool is None or self.plan is not None else chains
        self.runner = HeadRunner(
            target.model,
            head,
            self._draft,
            max_accepted=levels,
            lengths=chains if self.plan is None else (most,),
            rows=levels if self.plan is None else self.plan.rows,
            row_width=1 if self.plan is None else self.plan.row_width,
            sampled=self.sampled,
            graph_pool=pool,
        )
        self._tokens = head.tokens()
        if self._tokens is not None:
            self._tokens = self._tokens.to(target.device)
        self._mean_accepted = levels / 2
        """Of the tokens of one draft, over recent rounds."""

    def process(self, work: TargetPass) -> None:
        self.runner.feed(work.spans, work.scores.features, work.state)

    def propose(self, view: RoundView) -> Seq[Draft]:
        drafts = [EMPTY] * len(view.seqs)
        rows = [i for i in self.runner.ready(view.seqs, ahead=view.state is not None) if view.budgets[i] > 0]
        if not rows:
            return drafts
        asked = view.take(rows)
        made = self.runner.draft(asked.seqs, asked.state, max(asked.budgets))
        tokens, nodes = HostCopy(made.tokens), made.tokens.shape[1]
        parents = None if made.parents is None else HostCopy(made.parents)
        for at, (i, seq) in enumerate(zip(rows, asked.seqs, strict=True)):
            draft = Draft(
                DeviceRow(tokens, at, nodes),
                None if parents is None else DeviceRow(parents, at, nodes),
                None if made.probs is None or seq.params.greedy else made.probs[at],
                self.traits.name,
                min(self._mean_accepted, nodes),
                known=True,
            )
            drafts[i] = draft.first_nodes(view.budgets[i])
        return drafts

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        for draft, verdict in zip(drafts, verdicts, strict=True):
            if len(draft):
                self._mean_accepted += _MEMORY * (verdict.accepted - self._mean_accepted)

    def forget(self, seq: Sequence) -> None:
        self.runner.forget(seq)

    def _draft(self, batch: HeadBatch, length: int) -> HeadDraft:
        if self.plan is None:
            return self._chain(batch, length)
        return grow_trees(batch, self.plan, partial(self._children, batch))

    def _chain(self, batch: HeadBatch, length: int) -> HeadDraft:
        """One row of each sequence a step: the token before, and the head's output there."""
        before, hidden = batch.last, batch.outputs()[:, None]
        chain: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(length):
            hidden = batch.forward(before[:, None], hidden, batch.lengths - 1 + step)
            logits = self._logits(batch, hidden, step)
            if self.sampled:
                made = drawn_children(logits, 1)
                before = made.tokens[:, 0, 0]
                probs += [] if made.probs is None else [made.probs]
            else:
                before = next_tokens(logits)
            chain.append(before)
        return HeadDraft(torch.stack(chain, 1), None, torch.cat(probs, 1) if probs else None)

    def _children(self, batch: HeadBatch, outputs: Tensor, depth: int, count: int) -> Children:
        return (drawn_children if self.sampled else noisy_children)(self._logits(batch, outputs, depth), count)

    def _logits(self, batch: HeadBatch, outputs: Tensor, step: int) -> HeadLogits:
        """outputs [B, R, hidden]: of nodes at depth `step`."""
        rows = self.head.logits(outputs.flatten(0, 1)).view(*outputs.shape[:2], -1)
        vocab = self.head.config.vocab_size
        return HeadLogits(rows, step, batch.lengths, batch.seeds, batch.temperatures, vocab, self._tokens)
