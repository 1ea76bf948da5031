"""Lookups captured for a few batch sizes: a round's lookups take one copy to the device and one replay."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.pinned_inputs import PinnedInputs
from outrider.kernels.lookup import GAIN, LIMITS, Found, Gains, History
from outrider.kernels.triton_lookup import HEADER, look_up, write_header
from outrider.runners.cuda_graphs import capture, padded_batch

Integers = NDArray[np.int64]


class GraphedLookup:
    """Lookups of up to `batch` texts at a time. Each run overwrites what the one before found."""

    def __init__(self, batch: int, history: History, *, k: int, max_match: int) -> None:
        """history: its tensors must stay at their addresses."""
        device, width = history.tokens.device, LIMITS + 2 * (max_match + 1)
        self.history, self.k, self.max_match = history, k, max_match
        self.inputs = PinnedInputs(HEADER + batch * width, device)
        self.header, self.rows = self.inputs.ints[:HEADER], self.inputs.ints[HEADER:].view(batch, width)
        # not in the graph's memory: read by others after the replay
        self.found = torch.zeros(batch, Found.of(k).chance + 1, dtype=torch.int64, device=device)
        self._ends = torch.zeros(batch, dtype=torch.int64, device=device)
        self._keys = torch.zeros_like(self._ends)
        self._graph = capture(self.launch, None, f"lookups of {batch}")
        self._in_order = False
        """Whether the gains of the last run are in the order of its texts."""
        self._views: dict[int, Tensor] = {}
        """Views of `found` for the first n texts, by n; made once."""

    def run(self, texts: Tensor, history: History, rows: Integers, limits: Integers, gains: Gains | None) -> Tensor:
        """As `kernels.lookup.look_up`, for rows [B, LIMITS] and their limits [B, ...]: int64 [B, 2 * k + 5]."""
        count, array = len(rows), self.inputs.array()
        write_header(array[:HEADER], texts, history, gains)
        inputs = array[HEADER:].reshape(self.rows.shape)
        inputs[:count, :LIMITS] = rows
        inputs[:count, LIMITS:] = limits.reshape(count, -1)
        inputs[count:] = 0
        self._in_order = False
        self.inputs.send()
        return self.replay(count)

    def run_again(self, texts: Tensor, history: History, gains: Gains, count: int) -> Tensor:
        """Repeat the last run for the same `count` texts, whose gains are in the order of the texts.

        Inputs are sent only if the header differs: where texts and gains are, and which part of the history is in use.
        """
        last, header = self.inputs.arrays[self.inputs.current], np.zeros(HEADER, dtype=np.int64)
        write_header(header, texts, history, gains)
        if self._in_order and header.tobytes() == last[:HEADER].tobytes():
            return self.replay(count)
        array = self.inputs.array()
        array[:] = last
        array[:HEADER] = header
        array[HEADER:].reshape(self.rows.shape)[:count, GAIN] = range(1, count + 1)
        self._in_order = True
        self.inputs.send()
        return self.replay(count)

    def replay(self, count: int) -> Tensor:
        """Repeat the last run, with the same inputs at the same addresses."""
        self._graph.replay()
        if count not in self._views:
            self._views[count] = self.found[:count]
        return self._views[count]

    def launch(self) -> None:
        """The launches that are captured."""
        ends, keys = self._ends, self._keys
        look_up(self.header, self.rows, self.history, ends, keys, self.found, self.max_match, self.k)


class GraphedLookups:
    """Lookups of up to `max_batch` texts, captured for every power of two that is needed."""

    def __init__(self, max_batch: int, history: History, *, k: int, max_match: int) -> None:
        sizes = [1 << i for i in range(padded_batch(max_batch).bit_length())]
        self._by_batch = {size: GraphedLookup(size, history, k=k, max_match=max_match) for size in sizes}

    def place(self, size: int) -> Tensor:
        """The tensor that is written by lookups of `size` texts, a captured batch size: int64 [size, columns]."""
        return self._by_batch[size].found

    def run(self, texts: Tensor, history: History, rows: Integers, limits: Integers, gains: Gains | None) -> Tensor:
        """As `GraphedLookup.run`."""
        return self._by_batch[padded_batch(len(rows))].run(texts, history, rows, limits, gains)

    def run_again(self, texts: Tensor, history: History, gains: Gains, count: int) -> Tensor:
        """As `GraphedLookup.run_again`; the last run was of `count` texts."""
        return self._by_batch[padded_batch(count)].run_again(texts, history, gains, count)

    def replay(self, count: int) -> Tensor:
        """As `GraphedLookup.replay`; the last run was of `count` texts."""
        return self._by_batch[padded_batch(count)].replay(count)
