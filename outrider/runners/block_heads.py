"""A block head over its target's pages: it reads what the target keeps there, and drafts in one pass of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from outrider.core.sequence import Sequence, Span
from outrider.models.heads.block import BlockHead
from outrider.runners.attention import AttentionLayers
from outrider.runners.cpu_heads import BlockRows, TreeSize, cpu_blocks_of
from outrider.runners.cuda_graphs import MAX_ROWS, capture_batches, padded_batch
from outrider.runners.device_state import DeviceState
from outrider.runners.draft_batch import BatchAttention, DraftBatch, HeadDraft, HeadShape, attention_workspace, joined
from outrider.runners.head_reads import HeadReads, reading_passes, ready_texts
from outrider.runners.layout import lay_out
from outrider.runners.paged_model import PagedModel, tapped_pages
from outrider.runners.threads import use_threads

BlockFunction = Callable[["BlockBatch"], HeadDraft]


class BlockRunner:
    """Drafts with a block head, which reads what the target has read when it is asked.

    Its layers lie in the target's pages: they are shared and freed with the target's own. What it keeps at a position
    depends on the target's outputs there alone. The rows of a block are written behind it, where the target's next
    tokens will be: the next draft overwrites them as those come, and nothing reads them before.
    """

    def __init__(
        self,
        model: PagedModel,
        head: BlockHead,
        draft: BlockFunction,
        *,
        tokens: int,
        sampled: bool = False,
        chains: bool = False,
        tree: TreeSize | None = None,
        graph_pool: Any = None,
    ) -> None:
        """tokens: how many one draft holds in a row. sampled: mode `distribution`.

        chains: `draft` makes chains of mode `seeded`; tree: or such trees. The CPU kernels make both without it.
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
        self.cpu = cpu_blocks_of(head, model, self.layers)
        """Drafts in one call of the CPU kernels; None where they do not compute them."""
        self.chains, self.tree = chains and self.cpu is not None, tree
        self.kept = tapped_pages(model)
        self.reads = HeadReads(model.pool, self.width, last=False)
        self._batches: dict[int, BlockBatch] = {}

    def ready(self, seqs: Seq[Sequence], state: DeviceState | None) -> list[int]:
        """Which of these sequences can be drafted for: the target has read them, and there are pages for their blocks.

        state: theirs, where the host is a round behind.
        """
        rows = self.head.config.block_size
        return ready_texts(self.model, seqs, self.reads.gains(seqs, state), self.width, rows)

    @torch.inference_mode()
    def draft(self, seqs: Seq[Sequence], state: DeviceState | None, length: int = 0) -> HeadDraft:
        """A draft for each of these sequences, all `ready`. state: theirs, where the host is a round behind.

        length: tokens that are wanted, 0: all; more may come.
        """
        length = min(length, self.tokens) if self.chains and length else self.tokens
        made: list[HeadDraft] = []
        gained = self.reads.gains(seqs, state)
        with use_threads(self.model.threads.count):
            for part in self._parts(len(seqs)):
                whole = len(part) == len(seqs)
                own, there = (seqs, state) if whole else ([seqs[i] for i in part], state and state.take(part))
                unread = [self.reads.unread(seqs[i], gained[i]) for i in part]
                for spans in reading_passes(list(zip(own, unread, strict=True))):
                    self._read(spans)
                ids, firsts = self.model.tables.table_ids([seq.id for seq in own]), [each.end for each in unread]
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
                yield f"blocks of {size}"

    def store(self, features: Tensor, attend: BatchAttention) -> None:
        """Write the keys and values of a batch's rows: the target's tapped outputs [B * R, taps * hidden]."""
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

    def _read(self, spans: Seq[Span]) -> None:
        """Read text that the target has read."""
        if self.cpu is not None:
            self.cpu.read(spans)
            return
        layout = lay_out(spans, self.model.pool, self.model.device)
        rows = self.kept.features[layout.slots]
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
        size, causal = runner.head.config.block_size, runner.head.config.causal
        self._read_rows, self._block_rows = (_rows_seen(batch, rows, model.device) for rows in (runner.width, size))
        """What rows see of each other, and their depths: of those that are read, and of a block's."""
        self._full = torch.full_like(self.lengths, size)
        if not causal:
            self._block_rows[0].fill_((1 << size) - 1)
        self._draft_graph = self.graph(lambda: self.keep(runner.draft_function(self)), f"blocks of {batch}")
        self._texts = None if runner.cpu is None else runner.cpu.texts_of(self)

    def rows(self) -> BlockRows:
        """Read what the target has read since, and run the blocks behind the texts."""
        runner = self.runner
        if runner.cpu is not None and self._texts is not None:
            return runner.cpu.rows(self._texts, int(self.lengths.max()), runner.tokens)
        self._read()
        batch = self.attention_batch(
            runner.shape, runner.head.config.block_size, self.starts, self._full, self._block_rows
        )
        return runner.run(self.last, BatchAttention(runner.model, runner.layers, batch, runner.workspace))

    def draft(
        self, table_ids: Seq[int], seqs: Seq[Sequence], firsts: Seq[int], state: DeviceState | None, length: int
    ) -> HeadDraft:
        """length: tokens that the CPU kernels draft; others draft all."""
        self.fill_texts(table_ids, seqs, firsts, state)
        cpu = self.runner.cpu
        if cpu is not None and self._texts is not None and self.runner.chains:
            return cpu.chains(self._texts, int(self.lengths.max()), length)
        if cpu is not None and self._texts is not None and self.runner.tree is not None:
            return cpu.trees(self._texts, int(self.lengths.max()), self.runner.tokens, self.runner.tree)
        self._draft_graph()
        return self.result(len(seqs))

    def _read(self) -> None:
        """Read what the target has read since."""
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
