"""A drafting head over its target's pages: fed with all that the target reads, drafting on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.sequence import Sequence, Span
from outrider.kernels.accept import tree_rows
from outrider.kernels.batch import MAX_SEQUENCES
from outrider.models.heads.base import Head
from outrider.runners.attention import AttentionLayers, attention_of
from outrider.runners.cuda_graphs import MAX_ROWS, capture_batches, padded_batch
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import BatchAttention, DraftBatch, HeadDraft, HeadShape, attention_workspace, joined
from outrider.runners.layout import lay_out
from outrider.runners.paged_model import PagedModel
from outrider.runners.threads import use_threads

__all__ = ["HeadBatch", "HeadDraft", "HeadRunner"]

DraftFunction = Callable[["HeadBatch", int], HeadDraft]
"""Drafts of one of the lengths that a runner is made for."""


@dataclass(slots=True)
class FedText:
    """How far the head has read a sequence whose prompt is being read; unknown to the host once it decodes."""

    table_id: int
    length: int | None


class HeadRunner:
    """Keeps a head's keys and values in step with its target's, and drafts with it.

    Its layers lie in the target's pages: they are shared, rolled back and freed with the target's own.
    Between rounds it keeps one thing for each sequence: the target's outputs at its last cached token.
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
        graph_pool: Any = None,
    ) -> None:
        """max_accepted: draft tokens that one round can accept. lengths: what `draft` is asked for, rising.

        rows: that a draft runs in all, the text's last token included; 0: max_accepted. row_width: that one of its
        passes has. sampled: mode `distribution`. graph_pool: where to capture; None: nothing is captured.
        """
        self.sampled, self.lengths, self.rows = sampled, tuple(lengths), rows or max_accepted
        self.model, self.head, self.draft_function, self.graph_pool = model, head, draft, graph_pool
        config = head.config
        scale = config.head_dim**-0.5
        caches = model.add_layers(config.layers, config.kv_heads, config.head_dim) if config.layers else []
        self.layers = AttentionLayers(caches, [config.window] * config.layers, scale, skip=head.skip)
        self.shape = HeadShape(config.heads, config.kv_heads, config.head_dim, scale)
        self.workspace = attention_workspace(model, self.shape) if config.layers else None
        self.width = 1 + max_accepted
        self.max_batch = 1 << (MAX_ROWS // max(self.width, row_width)).bit_length() - 1
        """Sequences of one pass; more are drafted for in several."""
        self.outputs = torch.zeros(
            MAX_SEQUENCES + 1, model.features_width, dtype=model.decoder.dtype, device=model.device
        )
        """[table ids, taps * hidden]: the tapped outputs at each sequence's last cached token."""
        self._fed: dict[int, FedText] = {}
        self._batches: dict[int, HeadBatch] = {}

    @torch.inference_mode()
    def feed(self, spans: Seq[Span], features: Seq[Tensor] | None, state: DeviceState | None) -> None:
        """Read what the target has read: text in any chunks, and what a round accepted.

        state: of the sequences whose spans ask for logits, in their order.
        """
        texts = [(span, i) for i, span in enumerate(spans) if len(span.tokens) > 1 or not span.wanted]
        if texts and features is not None:
            with use_threads(self.model.threads.count):
                self._feed_texts([span for span, _ in texts], [features[i] for _, i in texts])
        decoding = [span for span in spans if span.wanted]
        if decoding and state is not None:
            ids = self.model.tables.table_ids([span.seq_id for span in decoding])
            for span, table_id in zip(decoding, ids, strict=True):
                fed = self._fed.get(span.seq_id)
                if fed is None or fed.table_id != table_id:  # all but one token were found in shared pages
                    self.outputs[table_id] = self._outputs_before(span, table_id)
                self._fed[span.seq_id] = FedText(table_id, None)
            with use_threads(self.model.threads.count):
                for part in self._parts(len(decoding)):
                    self._batch(len(part)).feed([ids[i] for i in part], state.take(part))

    def ready(self, seqs: Seq[Sequence], *, ahead: bool) -> list[int]:
        """Which of these sequences can be drafted for: they were fed whole, and there are pages for what is drafted.

        ahead: the host is a round behind, so that a text may be longer by a whole draft.
        """
        pool, tables = self.model.pool, self.model.tables
        ids = tables.table_ids([seq.id for seq in seqs])
        rows: list[int] = []
        for i, (seq, table_id) in enumerate(zip(seqs, ids, strict=True)):
            fed = self._fed.get(seq.id)
            if fed is not None and fed.length is None and fed.table_id == table_id:
                length = min(len(seq.tokens) + (self.width if ahead else 0), seq.limit)
                end = length - 1 + self.rows
                if -(-end // pool.size) <= tables.width and pool.reserve(seq.id, end):
                    rows.append(i)
        return rows

    @torch.inference_mode()
    def draft(self, seqs: Seq[Sequence], state: DeviceState | None, length: int = 0) -> HeadDraft:
        """A draft for each of these sequences, all `ready`, of the shortest length that is at least `length`.

        state: theirs, where the host is a round behind.
        """
        length = next((each for each in self.lengths if each >= length), self.lengths[-1])
        made: list[HeadDraft] = []
        with use_threads(self.model.threads.count):
            for part in self._parts(len(seqs)):
                own = [seqs[i] for i in part]
                ids = self.model.tables.table_ids([seq.id for seq in own])
                made.append(self._batch(len(own)).draft(ids, own, state and state.take(part), length))
        return made[0] if len(made) == 1 else joined(made)

    def forget(self, seq: Sequence) -> None:
        self._fed.pop(seq.id, None)

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

    def _feed_texts(self, spans: Seq[Span], features: Seq[Tensor]) -> None:
        """Read text whose every token is known. The last token of a span that decodes is left to the state."""
        model, tables = self.model, self.model.tables
        read: list[Span] = []
        inputs: list[Tensor] = []
        for span, own, table_id in zip(spans, features, tables.table_ids([s.seq_id for s in spans]), strict=True):
            count = len(span.tokens) - span.wanted
            inputs.append(torch.cat([self._outputs_before(span, table_id)[None], own[: count - 1]]))
            self.outputs[table_id] = own[count - 1]
            self._fed[span.seq_id] = FedText(table_id, span.start + count)
            read.append(Span(span.seq_id, span.start, span.tokens[:count], wanted=False))
        if not self.head.config.layers:  # there is nothing to keep but the outputs
            return
        layout = lay_out(read, model.pool, model.device)
        attend = attention_of(model, self.layers, read, layout)
        self.head.step(layout.ids, self.head.fuse(torch.cat(inputs)), layout.positions, attend)

    def _outputs_before(self, span: Span, table_id: int) -> Tensor:
        """The target's outputs at the token before a span: of the chunk before it, or kept with a shared page."""
        fed, size = self._fed.get(span.seq_id), self.model.pool.size
        if span.start == 0:
            return torch.zeros_like(self.outputs[0])
        if fed is not None and fed.length == span.start and fed.table_id == table_id:
            return self.outputs[table_id].clone()
        return self.model.page_features[self.model.pool.table(span.seq_id)[(span.start - 1) // size]]


class HeadBatch(DraftBatch):
    """A head's passes for up to B sequences: inputs that stay where they are, captured where graphs are."""

    def __init__(self, runner: HeadRunner, batch: int) -> None:
        model, width = runner.model, runner.width
        super().__init__(model, batch, runner.graph_pool, sampled=runner.sampled)
        self.runner = runner
        self._tokens = torch.zeros(batch, width, dtype=torch.int64, device=model.device)
        self._accepted = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self._features = torch.zeros(batch, width, model.features_width, dtype=model.decoder.dtype, device=model.device)
        self._feed_graph = self.graph(self._feed, f"a head's reading of {batch}")
        self._draft_graphs = {length: self._draft_graph(length) for length in runner.lengths}

    def outputs(self) -> Tensor:
        """[B, hidden]: the target's outputs at each text's last token but one, fused."""
        return self.runner.head.fuse(self.runner.outputs[self.table_ids])

    def forward(
        self, ids: Tensor, hidden: Tensor, starts: Tensor, widths: Tensor | None = None, parents: Tensor | None = None
    ) -> Tensor:
        """Run R rows of each text through the head, and write their keys and values: [B, R, hidden].

        ids int64 [B, R]; hidden [B, R, hidden] of the positions before; starts int64 [B]: the first row's
        position. widths int64 [B]: rows that are real, all if None. parents int64 [B, R - 1]: rows after the
        first are a tree's nodes; None: a chain. Rows see all text before `starts`, and their ancestors.
        """
        runner, (count, rows) = self.runner, ids.shape
        tree = None if parents is None else tree_rows(parents, torch.full_like(starts, rows - 1))
        batch = self.attention_batch(runner.shape, rows, starts, widths, tree)
        attend = BatchAttention(runner.model, runner.layers, batch, runner.workspace)
        return runner.head.step(ids.flatten(), hidden.flatten(0, 1), attend.positions, attend).view(count, rows, -1)

    def grow(self, ids: Tensor, hidden: Tensor, ancestors: Tensor, depths: Tensor, behind: int) -> Tensor:
        """Run R more rows of trees whose first `behind` rows were run: [B, R, hidden].

        ids int64 [B, R]; hidden [B, R, hidden] of their parents; ancestors, depths int64 [B, R] as in `tree_rows`:
        row 0 is the text's last token. Keys and values are written behind those of the rows before.
        """
        runner, (count, rows) = self.runner, ids.shape
        tree = ancestors, depths
        batch = self.attention_batch(runner.shape, rows, self.lengths - 1, tree=tree, behind=behind)
        attend = BatchAttention(runner.model, runner.layers, batch, runner.workspace, behind)
        return runner.head.step(ids.flatten(), hidden.flatten(0, 1), attend.positions, attend).view(count, rows, -1)

    def feed(self, table_ids: Seq[int], state: DeviceState) -> None:
        """Read what a round committed; the state's sequences have these table ids."""
        if state.tokens is None or state.accepted is None or state.features is None:
            raise ValueError("a head is fed with tapped outputs; this state has none")
        self.fill(table_ids)
        self._accepted.zero_()
        count, width = len(state), min(self.runner.width, state.tokens.shape[1])
        self.lengths[:count].copy_(state.lengths)
        self._tokens[:count, :width].copy_(state.tokens[:, :width])
        self._accepted[:count].copy_(state.accepted)
        self._features[:count, :width].copy_(state.features[:, :width])
        self._feed_graph()

    def draft(self, table_ids: Seq[int], seqs: Seq[Sequence], state: DeviceState | None, length: int) -> HeadDraft:
        self.fill_texts(table_ids, seqs, state)
        self._draft_graphs[length]()
        return self.result(len(seqs), length)

    def _draft_graph(self, length: int) -> Callable[[], None]:
        draft = self.runner.draft_function
        return self.graph(lambda: self.keep(draft(self, length), length), f"a head's drafts of {self.batch} x {length}")

    def _feed(self) -> None:
        """The tokens a round read and kept, each with the outputs at the token before it."""
        runner = self.runner
        if runner.head.config.layers:
            before = torch.cat([runner.outputs[self.table_ids][:, None], self._features[:, :-1]], 1)
            fused = runner.head.fuse(before.flatten(0, 1)).view(self.batch, runner.width, -1)
            self.forward(self._tokens, fused, self.lengths - 2 - self._accepted, self._accepted + 1)
        last = self._accepted[:, None, None].expand(-1, 1, self._features.shape[-1])
        runner.outputs[self.table_ids] = self._features.gather(1, last)[:, 0]
