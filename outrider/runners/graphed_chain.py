"""A draft model's whole chain in one replay: each step's token is sampled and read on the device.

All tokens are copied to the host after the last step, without waiting. The first step reads the text's last two tokens,
whether they are cached or not: after a round in which every draft token was accepted both are new, and reading a token
again writes the same key and value. A runner that shares its pages with the target reads the last token only: the keys
and values of the others are the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch

from outrider.core.device_row import DeviceRow
from outrider.core.draws import Draws
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Span
from outrider.kernels.triton_sample import sample_tokens
from outrider.runners.base import ChainStart
from outrider.runners.cuda_graphs import BatchShape, capture, capture_batches, padded_batch
from outrider.runners.device_state import DeviceState
from outrider.runners.graph_runner import GraphRunner


class GraphedChain:
    """Chains of `steps` tokens for up to `batch` sequences, captured.

    The first token is always chosen by the whole output head, since all others depend on it. Later tokens are chosen by
    the head in use when this is made; a reduced head's logits are not widened: a column is sampled, and replaced by its
    token.
    """

    def __init__(self, graphs: GraphRunner, batch: int, steps: int, reads: int) -> None:
        """reads: tokens of the text that the first step reads, its last two or its last."""
        self.graphs, self.batch, self.steps, self.reads = graphs, batch, steps, reads
        model = graphs.model
        self.first = graphs.forward_of(BatchShape(batch, reads))
        self.later = graphs.forward_of(BatchShape(batch, 1, model.heads.size))
        self.tokens = torch.zeros(batch, steps, dtype=torch.int64, device=model.device)
        self.graph = capture(self._loop, graphs.graph_pool, f"chains of {batch} x {steps}")

    @torch.inference_mode()
    def run(self, starts: Seq[ChainStart], after: DeviceState | None = None) -> list[DeviceRow]:
        """Draft for every start; one transfer each way, neither waited for. after: the state of the sequences."""
        reads, count = self.reads, len(starts)
        spans = [Span(s.seq_id, s.length - reads, s.last[-reads:]) for s in starts]
        self.first.load(spans, after, Draws([s.seed for s in starts], [s.temperature for s in starts]))
        self.graph.replay()
        block = HostCopy(self.tokens[:count].clone())  # the next chains are written to the same place
        return [DeviceRow(block, row, self.steps) for row in range(count)]

    def _loop(self) -> None:
        first, later = self.first, self.later
        first.inputs.fetch()
        first.forward()
        logits, ids = first.logits[self.reads - 1 :: self.reads], None  # after the last token of each text
        later.batch.table_ids.copy_(first.batch.table_ids)
        torch.clamp(first.batch.widths, max=1, out=later.batch.widths)
        for step in range(self.steps):
            positions = first.batch.starts + (self.reads + step)
            token = sample_tokens(logits, first.temperatures, first.seeds, positions, ids=ids).clamp_(min=0)
            self.tokens[:, step] = token
            if step + 1 < self.steps:
                later.ids[:, 0] = token
                later.batch.starts.copy_(positions)
                later.forward()
                logits, ids = later.logits, None if later.reduced is None else later.reduced.ids


class GraphedChains:
    """The captured chains of one draft model, by batch size, length and head."""

    def __init__(self, graphs: GraphRunner, reads: int = 2) -> None:
        """reads: see `GraphedChain`."""
        self.graphs, self.reads = graphs, reads
        self.chains: dict[tuple[int, int, int], GraphedChain] = {}

    def run(self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None) -> list[DeviceRow]:
        """Chains after every start; in two halves where one pass would have too many rows."""
        batch = padded_batch(len(starts))
        if not self.graphs.has_room(BatchShape(batch, self.reads)):
            middle = len(starts) // 2
            halves = [range(middle), range(middle, len(starts))]
            parts = [self.run(starts[h.start : h.stop], steps, after and after.take(h)) for h in halves]
            return [*parts[0], *parts[1]]
        return self._chain(batch, steps).run(starts, after)

    def capture(self, batch: int, steps: int) -> Iterator[int]:
        """Capture the chains for up to `batch` sequences; yields each batch size when it is captured."""
        for size in capture_batches(batch):
            if self.graphs.has_room(BatchShape(size, self.reads)):
                self._chain(size, steps)
                yield size

    def _chain(self, batch: int, steps: int) -> GraphedChain:
        key = batch, steps, self.graphs.model.heads.size
        if key not in self.chains:
            self.chains[key] = GraphedChain(self.graphs, batch, steps, self.reads)
        return self.chains[key]
