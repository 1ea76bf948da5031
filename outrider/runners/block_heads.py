"""Block heads over their target's pages: they draft in one pass of their layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any, cast

import torch
from torch import Tensor

from outrider.core.sequence import Span
from outrider.models.heads.block import BlockHead
from outrider.runners.cpu_heads import BlockRows, TreeSize, cpu_blocks_of
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import BatchAttention, DraftBatch, DraftTexts, HeadDraft
from outrider.runners.graphed_reads import GraphedReads
from outrider.runners.head_reads import HeadReads
from outrider.runners.layout import lay_out
from outrider.runners.paged_model import PagedModel
from outrider.runners.text_runner import TextRunner

BlockFunction = Callable[["BlockBatch"], HeadDraft]


class BlockRunner(TextRunner["BlockBatch"]):
    """Drafts with a block head, which reads a text up to its last cached token.

    Its keys and values at a position depend on the target's outputs there alone. The rows of a block are written behind
    the text, at the positions of the target's next tokens; the next draft overwrites them, and nothing reads them
    before.
    """

    def __init__(
        self,
        model: PagedModel,
        head: BlockHead,
        draft: BlockFunction,
        *,
        tokens: int,
        gained: int = 0,
        sampled: bool = False,
        chains: bool = False,
        tree: TreeSize | None = None,
        graph_pool: Any = None,
    ) -> None:
        """tokens: max tokens of a draft in a row. gained: max tokens in a row of all drafts that take turns with it,
        if more: so many are read in one drafting pass. sampled: mode `distribution`.

        chains: `draft` makes chains of mode `seeded`; tree: it makes such trees, of this size. Where the CPU kernels
        support the head, they make both in place of `draft`. graph_pool: the memory pool of captured graphs; None:
        nothing is captured.
        """
        reads, rows = HeadReads(model.pool, 1 + max(tokens, gained), last=False), head.config.block_size
        super().__init__(model, head.config, reads, rows=rows, row_width=rows, graph_pool=graph_pool)
        self.head, self.draft_function, self.tokens, self.sampled = head, draft, tokens, sampled
        self.fused = None
        if model.fused:
            from outrider.runners import fused_block

            self.fused = fused_block.FusedBlock(head, model, self.layers) if fused_block.supports(head) else None
        self.cpu = cpu_blocks_of(head, model, self.layers)
        """Makes drafts in one call of the CPU kernels; None where they do not support the head."""
        self.chains, self.tree = chains and self.cpu is not None, tree
        self.graphed_reads = GraphedReads(self.read_rows, model, graph_pool)

    def make_batch(self, size: int) -> BlockBatch:
        return BlockBatch(self, size)

    def place(self, size: int) -> HeadDraft:
        """The tensors to which captured drafts for `size` sequences are written."""
        return cast(HeadDraft, self._batch(size).kept())

    def length_of(self, length: int) -> int:
        return min(length, self.tokens) if self.chains and length else self.tokens

    def store(self, features: Tensor, attend: BatchAttention) -> None:
        """Write keys and values for a batch's rows, from the target's tapped outputs [B * R, taps * hidden]."""
        for layer, (k, v) in enumerate(self.head.keys_values(self.head.context(features), attend.positions)):
            attend.store(layer, k, v)

    def run(self, anchors: Tensor, attend: BatchAttention) -> BlockRows:
        """Run the blocks that begin with these anchors, int64 [B], at the starts of a batch."""
        count = len(anchors)
        if self.fused is not None:
            hidden = self.fused.forward(anchors, attend.batch, self.workspace)
            hidden = hidden.view(count, -1, hidden.shape[-1])[:, -self.head.drafts :][:, : self.tokens]
            return BlockRows(hidden, self.fused.logits(hidden.flatten(0, 1)).view(count, self.tokens, -1))
        hidden = self.head(anchors, attend.batch.starts, attend)[:, : self.tokens]
        return BlockRows(hidden, self.head.logits(hidden.flatten(0, 1)).view(count, self.tokens, -1))

    def capture(self, batch: int) -> Iterator[str]:
        yield from super().capture(batch)
        if self.graph_pool is not None:
            for rows in self.graphed_reads.capture():
                yield f"a head's reads of {rows} rows"

    def read(self, spans: Seq[Span]) -> None:
        if self.cpu is not None:
            self.cpu.read(spans)
        elif self.graphed_reads.captured:
            self.graphed_reads.run(spans)
        else:
            layout = lay_out(spans, self.model.pool, self.model.device)
            self.read_rows(layout.slots, layout.positions)

    def read_rows(self, slots: Tensor, positions: Tensor) -> None:
        """Read the tapped outputs kept at these slots, and write the head's keys and values there: int64 [N] both."""
        rows = self.kept.features[slots]
        if self.fused is not None:
            self.fused.store(rows, self.fused.places(slots, positions))
            return
        for layer, (k, v) in enumerate(self.head.keys_values(self.head.context(rows), positions)):
            keys, values = self.layers.caches[layer]
            keys.index_copy_(0, slots, k)
            values.index_copy_(0, slots, v)


class BlockBatch(DraftBatch):
    """A block head's passes for up to B sequences, with inputs at fixed addresses; captured if it has a graph pool."""

    def __init__(self, runner: BlockRunner, batch: int) -> None:
        model = runner.model
        super().__init__(model, batch, runner.graph_pool, sampled=runner.sampled)
        self.runner = runner
        size, causal = runner.head.config.block_size, runner.head.config.causal
        self._read_rows, self._block_rows = (_rows_seen(batch, rows, model.device) for rows in (runner.width, size))
        """Ancestors and depths of rows: of those that are read, and of those of a block."""
        self._full = torch.full_like(self.lengths, size)
        if not causal:
            self._block_rows[0].fill_((1 << size) - 1)
        self._draft_graph = self.graph(lambda: self.keep(runner.draft_function(self)), f"blocks of {batch}")
        self._texts = None if runner.cpu is None else runner.cpu.texts_of(self)

    def rows(self) -> BlockRows:
        """Read what the target has read since the last draft, and run the blocks behind the texts."""
        runner = self.runner
        if runner.cpu is not None and self._texts is not None:
            return runner.cpu.rows(self._texts, int(self.lengths.max()), runner.tokens)
        self._read()
        batch = self.attention_batch(
            runner.shape, runner.head.config.block_size, self.starts, self._full, self._block_rows
        )
        return runner.run(self.last, BatchAttention(runner.model, runner.layers, batch, runner.workspace))

    def draft(self, texts: DraftTexts, length: int) -> HeadDraft:
        """length: tokens of chains that the CPU kernels draft; all other drafts have full length."""
        self.fill_texts(texts)
        cpu = self.runner.cpu
        if cpu is not None and self._texts is not None and self.runner.chains:
            return cpu.chains(self._texts, int(self.lengths.max()), length)
        if cpu is not None and self._texts is not None and self.runner.tree is not None:
            return cpu.trees(self._texts, int(self.lengths.max()), self.runner.tokens, self.runner.tree)
        self._draft_graph()
        return self.result(len(texts.seqs))

    def repeat(self, count: int, state: DeviceState) -> HeadDraft | None:
        if not self.fetch_again(state, count):
            return None
        self._draft_graph()
        return self.result(count)

    def _read(self) -> None:
        """Read what the target has read since the last draft."""
        runner = self.runner
        if runner.fused is not None:
            rows, places = self.unread_located(runner.width, runner.fused.cos_sin)
            runner.fused.store(rows.features, places)
            return
        rows = self.unread(runner.width, before=False)
        batch = self.attention_batch(runner.shape, runner.width, rows.firsts, rows.counts, self._read_rows)
        runner.store(rows.features, BatchAttention(runner.model, runner.layers, batch, None))


def _rows_seen(batch: int, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ancestors and depths of chains, int64 [batch, rows] both."""
    column = torch.arange(rows, device=device).repeat(batch, 1)
    return (2 << column) - 1, column
