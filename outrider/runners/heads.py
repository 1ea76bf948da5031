"""Heads over their target's pages that read each text up to its last token: EAGLE's, MTP modules, Medusa's."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core.sequence import Sequence, Span
from outrider.kernels.accept import tree_rows
from outrider.models.heads.base import Head
from outrider.runners.attention import AttentionLayers, PromptAttention, attention_of
from outrider.runners.cpu_heads import cpu_steps_of
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import BatchAttention, DraftBatch, DraftTexts, HeadDraft
from outrider.runners.head_reads import HeadReads
from outrider.runners.layout import lay_out, to_device
from outrider.runners.paged_model import PagedModel
from outrider.runners.text_runner import TextRunner

if TYPE_CHECKING:
    from outrider.runners.fused_head import FusedHead

MakeFused = Callable[[PagedModel, AttentionLayers], "FusedHead"]
DraftFunction = Callable[["HeadBatch", int], HeadDraft]
"""(batch, length) -> drafts of that length, which is one of those a runner is made for."""


class HeadRunner(TextRunner["HeadBatch"]):
    """Drafts with a head that reads each text up to its last token, by a function that runs passes of a `HeadBatch`."""

    def __init__(
        self,
        model: PagedModel,
        head: Head,
        draft: DraftFunction,
        *,
        max_accepted: int,
        lengths: Seq[int] = (0,),
        rows: int = 0,
        row_width: int = 1,
        sampled: bool = False,
        chains: bool = False,
        fused: MakeFused | None = None,
        graph_pool: Any = None,
    ) -> None:
        """max_accepted: max draft tokens that one round can accept. lengths: those that `draft` is asked for, rising.

        rows: rows of a text that a draft runs in all, that of the last token included; 0: max_accepted. row_width: max
        rows of a text in one of its passes. sampled: mode `distribution`. chains: `draft` makes chains of mode
        `seeded`, which the CPU kernels make in its place where they support the head. fused: makes the runner of the
        fused kernels; None: the head's own code is run. graph_pool: the memory pool of captured graphs; None: nothing
        is captured.
        """
        reads = HeadReads(model.pool, 1 + max_accepted, last=True)
        super().__init__(
            model, head.config, reads,
            rows=rows or max_accepted, row_width=row_width, skip=head.skip, graph_pool=graph_pool,
        )  # fmt: skip
        self.head, self.draft_function, self.lengths, self.sampled = head, draft, tuple(lengths), sampled
        self.fused = None if fused is None else fused(model, self.layers)
        self.cpu = cpu_steps_of(head, model, self.layers)
        """Makes chains in one call of the CPU kernels; None where they do not support the head."""
        self.chains = chains and self.cpu is not None

    def make_batch(self, size: int) -> HeadBatch:
        return HeadBatch(self, size)

    def length_of(self, length: int) -> int:
        """The shortest of `lengths` that is at least `length`, or else the longest."""
        return next((each for each in self.lengths if each >= length), self.lengths[-1])

    def catch_up(self, seqs: Seq[Sequence], gained: Seq[int]) -> list[int]:
        if not self.head.config.layers:  # it reads nothing but the outputs at the last cached token
            return [0] * len(seqs)
        return super().catch_up(seqs, gained)

    def read(self, spans: Seq[Span]) -> None:
        if self.cpu is not None:
            self.cpu.read(spans)
            return
        model, (pool, size) = self.model, (self.model.pool, self.model.pool.size)
        layout = lay_out(spans, pool, model.device)
        before: list[int] = []
        for span in spans:
            table = pool.table(span.seq_id)
            places = range(span.start - 1, span.start - 1 + len(span.tokens))
            before += [table[max(p, 0) // size] * size + max(p, 0) % size for p in places]
        features = self.kept.features[to_device(before, model.device)]
        features = torch.where(layout.positions[:, None] > 0, features, 0)  # nothing comes before the first token
        hidden = self.head.fuse(features)
        if self.fused is not None:
            places = self.fused.places(layout.slots, layout.positions)
            self.fused.step(layout.ids, hidden, places, PromptAttention(model, self.layers, spans, layout).attend)
            return
        self.head.step(layout.ids, hidden, layout.positions, attention_of(model, self.layers, spans, layout))

    def step(self, ids: Tensor, hidden: Tensor, attend: BatchAttention) -> Tensor:
        """Run a batch's rows through the head: int64 [B, R], [B, R, hidden] -> [B, R, hidden]"""
        flat, rows = ids.flatten(), hidden.flatten(0, 1)
        if self.fused is None:
            out = self.head.step(flat, rows, attend.positions, attend)
        else:
            located = attend.behind == 0
            places = self.fused.locate(attend.batch) if located else self.fused.places(attend.slots, attend.positions)
            out = self.fused.step(flat, rows, places, attend.attend)
        return out.view(*ids.shape, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, outputs]"""
        return self.head.logits(hidden) if self.fused is None else self.fused.logits(hidden)


class HeadBatch(DraftBatch):
    """A head's passes for up to B sequences, with inputs at fixed addresses; captured if there are graphs."""

    def __init__(self, runner: HeadRunner, batch: int) -> None:
        super().__init__(runner.model, batch, runner.graph_pool, sampled=runner.sampled)
        self.runner = runner
        self._draft_graphs = {length: self._draft_graph(length) for length in runner.lengths}
        self._texts = None if runner.cpu is None else runner.cpu.texts_of(self)
        self._length = 0
        """The length of the last draft."""

    def outputs(self) -> Tensor:
        """[B, hidden]: the target's tapped outputs at each text's last token but one, fused."""
        return self.runner.head.fuse(self.runner.kept.features[self.slots(self.lengths[:, None] - 2)[:, 0]])

    def read(self) -> Tensor:
        """Read each text from `firsts` up to its last token: the head's outputs there, [B, 1, hidden]."""
        rows = self.unread(self.runner.width, before=True)
        hidden = self.runner.head.fuse(rows.features).view(*rows.ids.shape, -1)
        made = self.forward(rows.ids, hidden, rows.firsts, rows.counts)
        return made.flatten(0, 1)[rows.ends][:, None]

    def forward(
        self, ids: Tensor, hidden: Tensor, starts: Tensor, widths: Tensor | None = None, parents: Tensor | None = None
    ) -> Tensor:
        """Run R rows of each text through the head, and write their keys and values: [B, R, hidden].

        ids int64 [B, R]; hidden [B, R, hidden] of the positions before; starts int64 [B]: the first row's position.
        widths int64 [B]: the number of real rows; None: all. parents int64 [B, R - 1]: rows after the first are a
        tree's nodes; None: a chain. Rows see all text before `starts`, and their ancestors.
        """
        runner, rows = self.runner, ids.shape[1]
        tree = None if parents is None else tree_rows(parents, torch.full_like(starts, rows - 1))
        batch = self.attention_batch(runner.shape, rows, starts, widths, tree)
        return runner.step(ids, hidden, BatchAttention(runner.model, runner.layers, batch, runner.workspace))

    def grow(self, ids: Tensor, hidden: Tensor, ancestors: Tensor, depths: Tensor, behind: int) -> Tensor:
        """Run R more rows of trees whose first `behind` rows were run: [B, R, hidden].

        ids int64 [B, R]; hidden [B, R, hidden] of their parents; ancestors, depths int64 [B, R] as in `tree_rows`:
        row 0 is the text's last token. Keys and values are written behind those of the rows before.
        """
        runner, rows = self.runner, ids.shape[1]
        tree = ancestors, depths
        batch = self.attention_batch(runner.shape, rows, self.starts, tree=tree, behind=behind)
        return runner.step(ids, hidden, BatchAttention(runner.model, runner.layers, batch, runner.workspace, behind))

    def draft(self, texts: DraftTexts, length: int) -> HeadDraft:
        self.fill_texts(texts)
        cpu = self.runner.cpu
        if cpu is not None and self._texts is not None and self.runner.chains:
            return cpu.chains(self._texts, int(self.lengths.max()), length)
        self._length = length
        self._draft_graphs[length]()
        return self.result(len(texts.seqs), length)

    def repeat(self, count: int, state: DeviceState) -> HeadDraft | None:
        if not self.fetch_again(state, count):
            return None
        self._draft_graphs[self._length]()
        return self.result(count, self._length)

    def _draft_graph(self, length: int) -> Callable[[], None]:
        draft = self.runner.draft_function
        return self.graph(lambda: self.keep(draft(self, length), length), f"a head's drafts of {self.batch} x {length}")
