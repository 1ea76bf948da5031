"""A drafting head over its target's pages: it reads what the target keeps there, and drafts on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core.sequence import Sequence, Span
from outrider.kernels.accept import tree_rows
from outrider.models.heads.base import Head
from outrider.runners.attention import AttentionLayers, PromptAttention, attention_of
from outrider.runners.cpu_heads import cpu_steps_of
from outrider.runners.cuda_graphs import MAX_ROWS, capture_batches, padded_batch
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import (
    BatchAttention,
    DraftBatch,
    HeadDraft,
    HeadShape,
    attention_workspace,
    joined,
)
from outrider.runners.head_reads import HeadReads, reading_passes, ready_texts
from outrider.runners.layout import lay_out, to_device
from outrider.runners.paged_model import PagedModel, tapped_pages
from outrider.runners.threads import use_threads

if TYPE_CHECKING:
    from outrider.runners.fused_head import FusedHead

__all__ = ["HeadBatch", "HeadDraft", "HeadRunner"]

MakeFused = Callable[[PagedModel, AttentionLayers], "FusedHead"]
DraftFunction = Callable[["HeadBatch", int], HeadDraft]
"""Drafts of one of the lengths that a runner is made for."""


class HeadRunner:
    """Drafts with a head, which reads what the target has read when it is asked.

    Its layers lie in the target's pages: they are shared, rolled back and freed with the target's own. So do the
    target's tokens and tapped outputs, from which it reads.
    """

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
        """max_accepted: draft tokens that one round can accept. lengths: what `draft` is asked for, rising.

        rows: that a draft runs in all, the text's last token included; 0: max_accepted. row_width: that one of its
        passes has. sampled: mode `distribution`. chains: `draft` makes chains of mode `seeded`, which the CPU
        kernels make without it. fused: makes what runs the head with the fused kernels; None: its own code does.
        graph_pool: where to capture; None: nothing is captured.
        """
        self.sampled, self.lengths, self.rows = sampled, tuple(lengths), rows or max_accepted
        self.model, self.head, self.draft_function, self.graph_pool = model, head, draft, graph_pool
        config = head.config
        scale = config.head_dim**-0.5
        caches = model.add_layers(config.layers, config.kv_heads, config.head_dim) if config.layers else []
        self.layers = AttentionLayers(caches, [config.window] * config.layers, scale, skip=head.skip)
        self.shape = HeadShape(config.heads, config.kv_heads, config.head_dim, scale)
        self.workspace = attention_workspace(model, self.shape) if config.layers else None
        self.fused = None if fused is None else fused(model, self.layers)
        self.cpu = cpu_steps_of(head, model, self.layers)
        """Chains in one call of the CPU kernels; None where they do not compute them."""
        self.chains = chains and self.cpu is not None
        self.width = 1 + max_accepted
        self.max_batch = 1 << (MAX_ROWS // max(self.width, row_width)).bit_length() - 1
        """Sequences of one pass; more are drafted for in several."""
        self.kept = tapped_pages(model)
        self.reads = HeadReads(model.pool, self.width, last=True)
        self._batches: dict[int, HeadBatch] = {}

    def ready(self, seqs: Seq[Sequence], state: DeviceState | None) -> list[int]:
        """Which of these sequences can be drafted for: the target has read them, and there are pages for the draft.

        state: theirs, where the host is a round behind.
        """
        return ready_texts(self.model, seqs, self.reads.gains(seqs, state), self.width, self.rows)

    @torch.inference_mode()
    def draft(self, seqs: Seq[Sequence], state: DeviceState | None, length: int = 0) -> HeadDraft:
        """A draft for each of these sequences, all `ready`, of the shortest length that is at least `length`.

        state: theirs, where the host is a round behind.
        """
        length = next((each for each in self.lengths if each >= length), self.lengths[-1])
        made: list[HeadDraft] = []
        gained = self.reads.gains(seqs, state)
        with use_threads(self.model.threads.count):
            for part in self._parts(len(seqs)):
                whole = len(part) == len(seqs)
                own, there = (seqs, state) if whole else ([seqs[i] for i in part], state and state.take(part))
                firsts = self._catch_up(own, [gained[i] for i in part])
                ids = self.model.tables.table_ids([seq.id for seq in own])
                drafts = self._batch(len(own)).draft(ids, own, firsts, there, length)
                made.append(drafts if whole else drafts.copied())
        for seq, gain in zip(seqs, gained, strict=True):
            self.reads.note(seq, gain)
        return made[0] if len(made) == 1 else joined(made)

    def forget(self, seq: Sequence) -> None:
        self.reads.forget(seq)

    def capture(self, batch: int) -> Iterator[str]:
        """Capture for up to so many sequences; yields what is ready."""
        if self.graph_pool is not None:
            for size in capture_batches(min(batch, self.max_batch)):
                self._batch(size)
                yield f"head of {size}"

    def _parts(self, count: int) -> list[range]:
        return [range(at, min(at + self.max_batch, count)) for at in range(0, count, self.max_batch)]

    def _batch(self, count: int) -> HeadBatch:
        size = count if self.graph_pool is None else padded_batch(count)
        if size not in self._batches:
            self._batches[size] = HeadBatch(self, size)
        return self._batches[size]

    def _catch_up(self, seqs: Seq[Sequence], gained: Seq[int]) -> list[int]:
        """Read what a drafting pass has no room for; returns the position at which that pass begins in each text."""
        if not self.head.config.layers:  # it reads nothing but the outputs at the last cached token
            return [0] * len(seqs)
        unread = [self.reads.unread(seq, gain) for seq, gain in zip(seqs, gained, strict=True)]
        for spans in reading_passes(list(zip(seqs, unread, strict=True))):
            self._read(spans)
        return [each.end for each in unread]

    def _read(self, spans: Seq[Span]) -> None:
        """Read text whose every token is known."""
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
    """A head's passes for up to B sequences: inputs that stay where they are, captured where graphs are."""

    def __init__(self, runner: HeadRunner, batch: int) -> None:
        super().__init__(runner.model, batch, runner.graph_pool, sampled=runner.sampled)
        self.runner = runner
        self._draft_graphs = {length: self._draft_graph(length) for length in runner.lengths}
        self._texts = None if runner.cpu is None else runner.cpu.texts_of(self)

    def outputs(self) -> Tensor:
        """[B, hidden]: the target's outputs at each text's last token but one, fused."""
        return self.runner.head.fuse(self.runner.kept.features[self.slots(self.lengths[:, None] - 2)[:, 0]])

    def read(self) -> Tensor:
        """Read from `firsts` up to each text's last token: the head's outputs there, [B, 1, hidden]."""
        rows = self.unread(self.runner.width, before=True)
        hidden = self.runner.head.fuse(rows.features).view(*rows.ids.shape, -1)
        made = self.forward(rows.ids, hidden, rows.firsts, rows.counts)
        return made.flatten(0, 1)[rows.ends][:, None]

    def forward(
        self, ids: Tensor, hidden: Tensor, starts: Tensor, widths: Tensor | None = None, parents: Tensor | None = None
    ) -> Tensor:
        """Run R rows of each text through the head, and write their keys and values: [B, R, hidden].

        ids int64 [B, R]; hidden [B, R, hidden] of the positions before; starts int64 [B]: the first row's
        position. widths int64 [B]: rows that are real, all if None. parents int64 [B, R - 1]: rows after the
        first are a tree's nodes; None: a chain. Rows see all text before `starts`, and their ancestors.
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

    def draft(
        self, table_ids: Seq[int], seqs: Seq[Sequence], firsts: Seq[int], state: DeviceState | None, length: int
    ) -> HeadDraft:
        self.fill_texts(table_ids, seqs, firsts, state)
        cpu = self.runner.cpu
        if cpu is not None and self._texts is not None and self.runner.chains:
            return cpu.chains(self._texts, int(self.lengths.max()), length)
        self._draft_graphs[length]()
        return self.result(len(seqs), length)

    def _draft_graph(self, length: int) -> Callable[[], None]:
        draft = self.runner.draft_function
        return self.graph(lambda: self.keep(draft(self, length), length), f"a head's drafts of {self.batch} x {length}")
