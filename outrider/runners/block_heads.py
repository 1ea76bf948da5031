"""A block head over its target's pages: fed with all that the target reads, it drafts in one pass of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.core.sequence import Sequence, Span
from outrider.models.heads.block import BlockHead
from outrider.runners.attention import AttentionLayers
from outrider.runners.cuda_graphs import MAX_ROWS, capture_batches, padded_batch
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import BatchAttention, DraftBatch, HeadDraft, HeadShape, attention_workspace
from outrider.runners.layout import lay_out
from outrider.runners.paged_model import PagedModel
from outrider.runners.threads import use_threads

BlockFunction = Callable[["BlockBatch"], HeadDraft]


class BlockRows(NamedTuple):
    """What a pass says of the tokens to be drafted, for B sequences."""

    hidden: Tensor  # [B, K, hidden], after the final norm
    logits: Tensor  # float32 [B, K, outputs], without the Markov head's part


class BlockRunner:
    """Keeps a block head's keys and values in step with its target's, and drafts with it.

    Its layers lie in the target's pages: they are shared and freed with the target's own. What it keeps at a position
    depends on the target's outputs there alone. The rows of a block are written behind it, where the target's next
    tokens will be: `feed` overwrites them as those come, and nothing reads them before.
    """

    def __init__(
        self,
        model: PagedModel,
        head: BlockHead,
        draft: BlockFunction,
        *,
        tokens: int,
        sampled: bool = False,
        graph_pool: Any = None,
    ) -> None:
        """tokens: how many one draft holds in a row. sampled: mode `distribution`.

        graph_pool: where to capture; None: nothing is captured.
        """
        self.model, self.head, self.draft_function = model, head, draft
        self.tokens, self.sampled, self.graph_pool = tokens, sampled, graph_pool
        config = head.config
        caches = model.add_layers(config.layers, config.kv_heads, config.head_dim)
        self.layers = AttentionLayers(caches, [config.window] * config.layers, head.scale)
        self.shape = HeadShape(config.heads, config.kv_heads, config.head_dim, head.scale)
        self.workspace = attention_workspace(model, self.shape)
        self.width = 1 + tokens
        self.max_batch = 1 << (MAX_ROWS // max(self.width, config.block_size)).bit_length() - 1
        """Sequences of one pass; more are drafted for in several."""
        self.fused = None
        if model.fused:
            from outrider.runners import fused_block

            self.fused = fused_block.FusedBlock(head, model, self.layers) if fused_block.supports(head) else None
        self._fed: set[int] = set()
        """Sequences whose text was read whole, but for the last token."""
        self._batches: dict[int, BlockBatch] = {}

    @torch.inference_mode()
    def feed(self, spans: Seq[Span], features: Seq[Tensor] | None, state: DeviceState | None) -> None:
        """Read what the target has read: text in any chunks, and what a round accepted.

        state: of the sequences whose spans ask for logits, in their order.
        """
        texts = [(span, i) for i, span in enumerate(spans) if len(span.tokens) > 1 or not span.wanted]
        decoding = [span.seq_id for span in spans if span.wanted]
        with use_threads(self.model.threads.count):
            if texts and features is not None:
                self._feed_texts([span for span, _ in texts], [features[i] for _, i in texts])
                self._fed.difference_update(span.seq_id for span, _ in texts)
            if state is None:
                return
            for part in self._parts(len(decoding)):
                ids = self.model.tables.table_ids([decoding[i] for i in part])
                self._batch(len(part)).feed(ids, state.take(part))
            self._fed.update(decoding)

    def ready(self, seqs: Seq[Sequence], *, ahead: bool) -> list[int]:
        """Which of these sequences can be drafted for: they were read whole, and there are pages for their blocks.

        ahead: the host is a round behind, so that a text may be longer by a whole draft.
        """
        pool, most = self.model.pool, self.model.tables.width
        rows: list[int] = []
        for i, seq in enumerate(seqs):
            length = min(len(seq.tokens) + (self.width if ahead else 0), seq.limit)
            end = length - 1 + self.head.config.block_size
            if seq.id in self._fed and -(-end // pool.size) <= most and pool.reserve(seq.id, end):
                rows.append(i)
        return rows

    @torch.inference_mode()
    def draft(self, seqs: Seq[Sequence], state: DeviceState | None) -> HeadDraft:
        """A draft for each of these sequences, all `ready`. state: theirs, where the host is a round behind."""
        made: list[HeadDraft] = []
        with use_threads(self.model.threads.count):
            for part in self._parts(len(seqs)):
                own = [seqs[i] for i in part]
                ids = self.model.tables.table_ids([seq.id for seq in own])
                made.append(self._batch(len(own)).draft(ids, own, state and state.take(part)))
        if len(made) == 1:
            return made[0]
        columns = zip(*made, strict=True)
        return HeadDraft(*(None if each[0] is None else torch.cat(each) for each in columns))  # type: ignore[arg-type]

    def forget(self, seq: Sequence) -> None:
        self._fed.discard(seq.id)

    def capture(self, batch: int) -> Iterator[str]:
        """Capture for up to so many sequences; yields what is ready."""
        if self.graph_pool is not None:
            for size in capture_batches(min(batch, self.max_batch)):
                self._batch(size)
                yield f"blocks of {size}"

    def store(self, features: Tensor, attend: BatchAttention) -> None:
        """Write the keys and values of a batch's rows: the target's tapped outputs [B * R, taps * hidden]."""
        if self.fused is not None:
            self.fused.store(features, self.fused.locate(attend.batch))
            return
        for layer, (k, v) in enumerate(self.head.keys_values(self.head.context(features), attend.positions)):
            attend.store(layer, k, v)

    def run(self, anchors: Tensor, attend: BatchAttention) -> BlockRows:
        """Run the blocks of these anchors, int64 [B], at the starts of a batch."""
        count = len(anchors)
        if self.fused is not None:
            hidden = self.fused.forward(anchors, attend.batch, self.workspace)
            hidden = hidden.view(count, -1, hidden.shape[-1])[:, -self.head.drafts :][:, : self.tokens]
            return BlockRows(hidden, self.fused.logits(hidden.flatten(0, 1)).view(count, self.tokens, -1))
        hidden = self.head(anchors, attend.batch.starts, attend)[:, : self.tokens]
        return BlockRows(hidden, self.head.logits(hidden.flatten(0, 1)).view(count, self.tokens, -1))

    def _parts(self, count: int) -> list[range]:
        return [range(at, min(at + self.max_batch, count)) for at in range(0, count, self.max_batch)]

    def _batch(self, count: int) -> BlockBatch:
        size = count if self.graph_pool is None else padded_batch(count)
        if size not in self._batches:
            self._batches[size] = BlockBatch(self, size)
        return self._batches[size]

    def _feed_texts(self, spans: Seq[Span], features: Seq[Tensor]) -> None:
        """Read text whose every token is known. The last token of a span that decodes is left to the state."""
        counts = [len(span.tokens) - span.wanted for span in spans]
        read = [
            Span(span.seq_id, span.start, span.tokens[:count], wanted=False)
            for span, count in zip(spans, counts, strict=True)
        ]
        layout = lay_out(read, self.model.pool, self.model.device)
        rows = torch.cat([own[:count] for own, count in zip(features, counts, strict=True)])
        if self.fused is not None:
            self.fused.store(rows, self.fused.places(layout.slots, layout.positions))
            return
        for layer, (k, v) in enumerate(self.head.keys_values(self.head.context(rows), layout.positions)):
            keys, values = self.layers.caches[layer]
            keys.index_copy_(0, layout.slots, k)
            values.index_copy_(0, layout.slots, v)


class BlockBatch(DraftBatch):
    """A block head's passes for up to B sequences: inputs that stay where they are, captured where graphs are."""

    def __init__(self, runner: BlockRunner, batch: int) -> None:
        model = runner.model
        super().__init__(model, batch, runner.graph_pool, sampled=runner.sampled)
        self.runner = runner
        self._accepted = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self._features = torch.zeros(
            batch, runner.width, model.features_width, dtype=model.decoder.dtype, device=model.device
        )
        size, causal = runner.head.config.block_size, runner.head.config.causal
        self._read_rows, self._block_rows = (_rows_seen(batch, rows, model.device) for rows in (runner.width, size))
        """What rows see of each other, and their depths: of those that are read, and of a block's."""
        self._full = torch.full_like(self.lengths, size)
        if not causal:
            self._block_rows[0].fill_((1 << size) - 1)
        self._feed_graph = self.graph(self._feed, f"a block head's reading of {batch}")
        self._draft_graph = self.graph(lambda: self.keep(runner.draft_function(self)), f"blocks of {batch}")

    def rows(self) -> BlockRows:
        """Run the blocks behind the texts."""
        runner, starts = self.runner, self.lengths - 1
        batch = self.attention_batch(runner.shape, runner.head.config.block_size, starts, self._full, self._block_rows)
        return runner.run(self.last, BatchAttention(runner.model, runner.layers, batch, runner.workspace))

    def feed(self, table_ids: Seq[int], state: DeviceState) -> None:
        """Read what a round committed; the state's sequences have these table ids."""
        if state.accepted is None or state.features is None:
            raise ValueError("a head is fed with tapped outputs; this state has none")
        self.fill(table_ids)
        self._accepted.zero_()
        count, width = len(state), min(self.runner.width, state.features.shape[1])
        self.lengths[:count].copy_(state.lengths)
        self._accepted[:count].copy_(state.accepted)
        self._features[:count, :width].copy_(state.features[:, :width])
        self._feed_graph()

    def draft(self, table_ids: Seq[int], seqs: Seq[Sequence], state: DeviceState | None) -> HeadDraft:
        self.fill_texts(table_ids, seqs, state)
        self._draft_graph()
        return self.result(len(seqs))

    def _feed(self) -> None:
        runner, starts = self.runner, self.lengths - 2 - self._accepted
        batch = self.attention_batch(runner.shape, runner.width, starts, self._accepted + 1, self._read_rows)
        runner.store(self._features.flatten(0, 1), BatchAttention(runner.model, runner.layers, batch, None))


def _rows_seen(batch: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ancestors and depths of chains, int64 [batch, rows] both."""
    column = torch.arange(rows, device=device).repeat(batch, 1)
    return (2 << column) - 1, column
