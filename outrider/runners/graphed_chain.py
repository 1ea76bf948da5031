"""A draft model's whole chain in one replay: each step's token is chosen and read on the device.

Nothing comes back to the host before the last step, and nobody waits for it then. The first step
reads the text's last two tokens, whatever of them is cached: after a round in which every guess
stood both are new, and reading one again writes the same key and value.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import torch

from outrider.core.device_row import DeviceRow
from outrider.core.host_copy import HostCopy
from outrider.core.sequence import Span
from outrider.kernels.triton_sample import sample_tokens
from outrider.runners.base import ChainStart
from outrider.runners.device_state import DeviceState
from outrider.runners.graph_runner import GraphRunner
from outrider.runners.graphed_forward import BatchShape, GraphedForward, PinnedInputs, capture, padded_shape


class GraphedChain:
    """Chains of `steps` tokens for up to `batch` sequences, recorded.

    The first guess is always by the whole head: all others stand or fall with it. Those after it are by the head
    in use when this is made; a narrow one's logits are not widened: columns are chosen from, and named by their tokens.
    """

    def __init__(self, captured: GraphRunner, batch: int, steps: int) -> None:
        self.captured, self.batch, self.steps = captured, batch, steps
        device, outputs = captured.decoder.device, captured.target.heads.width
        self.first, self.later = (
            GraphedForward(captured, BatchShape(batch, 2)),
            GraphedForward(captured, BatchShape(batch, 1, outputs)),
        )
        self.inputs = PinnedInputs(3 * batch, device)
        self.seeds, self.lengths, temperatures = self.inputs.ints.split(batch)
        self.temperatures = temperatures.view(torch.float64)
        self.tokens = torch.zeros(batch, steps, dtype=torch.int64, device=device)
        self.graph = capture(self._loop, captured.graph_pool)

    @torch.inference_mode()
    def run(self, starts: Seq[ChainStart], behind: DeviceState | None = None) -> list[DeviceRow]:
        """Draft for every start; one transfer each way, neither waited for. behind: where they stand, if not known."""
        self.first.load([Span(s.seq_id, s.length - 2, s.last) for s in starts])
        seeds, lengths, temperatures = self.inputs.array().reshape(3, self.batch)
        count = len(starts)
        seeds[:count] = np.array([s.seed for s in starts], dtype=np.uint64).view(np.int64)
        lengths.fill(2)
        lengths[:count] = [s.length for s in starts]
        chances = temperatures.view(np.float64)
        chances.fill(0)
        chances[:count] = [s.temperature for s in starts]
        self.inputs.send()
        if behind is not None:
            most = self.captured.config.vocab_size - 1  # the target may have more rows than the draft
            torch.clamp(behind.last, max=most, out=self.first.tokens[:count])
            torch.sub(behind.lengths, 2, out=self.first.batch.starts[:count])
            self.lengths[:count].copy_(behind.lengths)
        self.graph.replay()
        block = HostCopy(self.tokens[:count].clone())  # the next chains are written to the same place
        return [DeviceRow(block, row, self.steps) for row in range(count)]

    def _loop(self) -> None:
        first, later = self.first, self.later
        first.forward()
        logits, ids = first.logits[1::2], None  # after the last token of each text
        later.batch.table_ids.copy_(first.batch.table_ids)
        torch.clamp(first.batch.widths, max=1, out=later.batch.widths)
        later.batch.ancestors.fill_(1)
        for step in range(self.steps):
            places = self.lengths + step
            token = sample_tokens(logits, self.temperatures, self.seeds, places, ids=ids).clamp_(min=0)
            self.tokens[:, step] = token
            if step + 1 < self.steps:
                later.ids.copy_(token)
                later.batch.starts.copy_(places)
                later.forward()
                logits, ids = later.logits, None if later.narrow is None else later.narrow.ids


class GraphedChains:
    """The loops of one draft model, by size and head."""

    def __init__(self, captured: GraphRunner) -> None:
        self.captured = captured
        self.loops: dict[tuple[int, int, int], GraphedChain] = {}

    def run(self, starts: Seq[ChainStart], steps: int, behind: DeviceState | None = None) -> list[DeviceRow]:
        """Chains after every start; in two goes where one pass would have too many rows."""
        batch = padded_shape(len(starts), 1).batch
        if not self.captured.has_room(BatchShape(batch, 2)):
            middle, end = len(starts) // 2, len(starts)
            halves = [range(middle), range(middle, end)]
            parts = [self.run(starts[h.start : h.stop], steps, behind and behind.take(h)) for h in halves]
            return [*parts[0], *parts[1]]
        return self._loop(batch, steps).run(starts, behind)

    def prepare(self, batch: int, steps: int) -> Iterator[int]:
        """Record the loops for up to so many sequences; yields each size once it is there."""
        for size in (1 << i for i in range((batch - 1).bit_length() + 1)):
            if self.captured.has_room(BatchShape(size, 2)):
                self._loop(size, steps)
                yield size

    def _loop(self, batch: int, steps: int) -> GraphedChain:
        key = batch, steps, self.captured.target.heads.width
        if key not in self.loops:
            self.loops[key] = GraphedChain(self.captured, batch, steps)
        return self.loops[key]
