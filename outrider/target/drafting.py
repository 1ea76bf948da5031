"""A draft model's whole chain in one replay: each step's token is chosen and read on the device.

Nothing comes back to the host before the last step. The first step reads the text's last two
tokens, whatever of them is cached: after a round in which every guess stood both are new, and
reading one again writes the same key and value.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from outrider.core import Span, Token
from outrider.kernels.triton_attention import CHUNK
from outrider.kernels.triton_sample import choose
from outrider.target.base import Start
from outrider.target.captured import Captured, Pass, Shape, record


class ChainLoop:
    """Chains of `steps` tokens for up to `batch` sequences, recorded for one length of text."""

    def __init__(self, captured: Captured, shape: Shape, steps: int) -> None:
        self.captured, self.shape, self.steps = captured, shape, steps
        device, batch = captured.decoder.device, shape.batch
        self.first = Pass(captured, Shape(batch, 2, shape.chunks))
        self.later = Pass(captured, Shape(batch, 1, shape.chunks))
        self.state = torch.zeros(2 * batch, dtype=torch.int64, device=device)
        self.seeds, self.lengths = self.state.split(batch)
        self.temperatures = torch.zeros(batch, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(batch, steps, dtype=torch.int64, device=device)
        self.graph = record(self._loop)

    @torch.inference_mode()
    def run(self, starts: Seq[Start]) -> list[list[Token]]:
        """Draft for every start; one transfer each way."""
        fill = self.shape.batch - len(starts)
        self.first.load([Span(s.seq_id, s.length - 2, s.last) for s in starts])
        state = [_signed(s.seed) for s in starts] + [0] * fill + [s.length for s in starts] + [2] * fill
        temperatures = [s.temperature for s in starts] + [0.0] * fill
        self.state.copy_(torch.tensor(state, dtype=torch.int64).pin_memory(), non_blocking=True)
        self.temperatures.copy_(torch.tensor(temperatures, dtype=torch.float64).pin_memory(), non_blocking=True)
        self.graph.replay()
        return self.tokens[: len(starts)].tolist()

    def _loop(self) -> None:
        first, later, page = self.first, self.later, self.captured.page
        first.forward()
        logits = first.logits[1::2]  # after the last token of each text
        later.batch.tables.copy_(first.batch.tables)
        later.batch.ancestors.fill_(1)
        for step in range(self.steps):
            token = choose(logits, self.temperatures, self.seeds, self.lengths + step)
            self.tokens[:, step] = token
            if step + 1 == self.steps:
                return
            place = self.lengths + step
            later.ids.copy_(token)
            later.positions.copy_(place)
            later.batch.starts.copy_(place)
            pages = later.batch.tables.gather(1, (place // page)[:, None])[:, 0]
            later.slots.copy_(pages * page + place % page)
            later.forward()
            logits = later.logits


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x


class ChainLoops:
    """The loops of one draft model, by size."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.loops: dict[tuple[Shape, int], ChainLoop] = {}

    def run(self, starts: Seq[Start], steps: int) -> list[list[Token]]:
        chunks = -(-(max(s.length for s in starts) + steps) // CHUNK)
        shape = Shape(1 << (len(starts) - 1).bit_length(), 1, 1 << max(2, (chunks - 1).bit_length()))
        if (shape, steps) not in self.loops:
            self.loops[shape, steps] = ChainLoop(self.captured, shape, steps)
        return self.loops[shape, steps].run(starts)
