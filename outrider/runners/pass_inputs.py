"""The inputs of a captured pass: written on the host, sent in one copy, completed by what only the device knows."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from outrider.core.device_row import DeviceRow
from outrider.core.draws import Draws
from outrider.core.host_copy import HostCopy
from outrider.core.pinned_inputs import PinnedInputs
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.kernels.triton_inputs import (
    HEADER,
    SOURCES,
    Packing,
    fetch_inputs,
    write_draft,
    write_shared,
    write_state,
)
from outrider.kvcache.block_tables import BlockTables
from outrider.runners.cuda_graphs import BatchShape
from outrider.runners.device_state import DeviceState

Source = int | tuple[Token, ...]
"""A draft's tokens: their address on the device, or themselves."""
DeviceParents = list[tuple[int, int, DeviceRow]]
"""Parents of trees that are on the device: (sequence, 0, numbers) for each."""


class InputParts(NamedTuple):
    """The inputs of B sequences at W places each, N rows: int64 parts of one array, or of a tensor on the device."""

    ids: Any  # [B, W]; negative: padding of a draft
    parents: Any  # [B, W - 1]
    starts: Any  # [B], as the next four
    widths: Any
    table_ids: Any
    seeds: Any
    temperatures: Any  # the bits of float64
    header: Any  # [HEADER], see `fetch_inputs`
    sources: Any  # [B, SOURCES]
    wanted: Any  # [N]: the rows whose logits are asked for, where those are not side by side
    offsets: Any  # [B]; this and the next are empty where a pass is not packed
    row_index: Any  # [N]


class PassInputs:
    """The inputs of passes of one shape."""

    def __init__(self, shape: BatchShape, tables: BlockTables, max_id: int) -> None:
        """max_id: larger token ids in a state are replaced by this one."""
        self.shape, self._tables, self._max_id = shape, tables, max_id
        self._inputs = PinnedInputs(sum(map(prod, _shapes(shape))), tables.device)
        self.given = _parts(self._inputs.ints, shape)
        """The inputs on the device, where the pass reads them."""
        self._written = [_parts(array, shape) for array in self._inputs.arrays]
        self._fetched: list[Tensor] = []
        """The tensors that the next pass fetches by address: kept alive until another is loaded."""
        self._copied = False
        """Whether these include copies of drafts, which a drafter has on another device or not contiguous."""
        self._sent: tuple[Any, ...] | None = None
        """All that determines the inputs on the device; None without a state, or with trees."""
        self.wanted: Tensor | slice = slice(0, 0)
        """The rows whose logits the last batch asked for."""
        self.shared = False
        """Whether drafts of the last batch share its rows, see `Draft.share`; `wanted` counts all places asked for."""
        self._padding = np.zeros(len(self._inputs.ints), dtype=np.int64)  # chains in the scratch page
        padding = _parts(self._padding, shape)
        padding.parents[:] = range(-1, shape.width - 2)
        padding.table_ids[:] = tables.spare
        padding.row_index[:] = -1

    def load(
        self, spans: Seq[Span], after: DeviceState | None, draws: Draws | None, *, shared: bool = False
    ) -> tuple[Tensor | slice, DeviceParents | None]:
        """Send a batch's inputs: one copy, not waited for; none where the device has them. See `GraphedForward.load`.

        Behind a round in flight the device fetches texts and drafts by address: often all is as it was for the batch
        before. Returns the rows whose logits are asked for, and the parents of trees that are on the device; None where
        all drafts are chains. shared: drafts, all of them chains, share the rows of this packed pass.
        """
        widths, table_ids = [span.width for span in spans], self._tables.table_ids([span.seq_id for span in spans])
        self._fetched = [] if after is None else [after.origin.lengths.contiguous(), after.origin.last.contiguous()]
        sources, trees = self._sources(spans)
        key = None
        if after is not None and not trees:
            state = [each.data_ptr() for each in self._fetched[:2]], after.rows
            drawn = draws and (draws.seeds, draws.temperatures)
            wanted = [span.wanted for span in spans]
            key = table_ids, widths, sources, state, drawn, len(spans[0].tokens), wanted, shared
            if key == self._sent:
                return self.wanted, None
        self._sent, self.shared = key, shared
        array = self._inputs.array()
        array[:] = self._padding
        into, count = self._written[self._inputs.current], len(spans)
        into.table_ids[:count] = table_ids
        into.widths[:count] = widths
        if draws is not None:
            into.seeds[:count] = np.array(draws.seeds, dtype=np.uint64).view(np.int64)
            into.temperatures.view(np.float64)[:count] = draws.temperatures
        if after is None:
            _write_texts(spans, into)
        else:
            self._write_state(after, len(spans[0].tokens), into)
        device_parents = _write_drafts(spans, widths, sources, into)
        if shared:
            own = [len(s.tokens) if isinstance(at, int) else s.width for s, at in zip(spans, sources, strict=True)]
            write_shared(into.header, into.sources, self.shape.rows - sum(own), widths)
            self.wanted = slice(0, sum(widths))
        else:
            self._write_packing(into)
            self.wanted = self._write_wanted(spans, widths, into)
        self._inputs.send()
        return self.wanted, device_parents if trees else None

    @property
    def are_fetched(self) -> bool:
        """Whether the last batch's texts and drafts are fetched from their own tensors, as `load_again` needs."""
        return self._sent is not None and not self._copied

    def load_again(self, state: DeviceState) -> None:
        """Load the last batch again, its texts fetched from all rows of this state; sent only if they were not.

        The same tensors may need new inputs: a pass that newcomers joined fetched selected rows of a state, and may
        leave its own state in those tensors.
        """
        if self._sent is None or (self._fetched[0] is state.lengths and self._sent[3][1] is None):
            return
        reads = int(self._written[self._inputs.current].header[2])
        last, array = self._inputs.arrays[self._inputs.current], self._inputs.array()
        array[:] = last
        self._fetched[:2] = state.lengths.contiguous(), state.last.contiguous()
        self._write_state(state, reads, self._written[self._inputs.current])
        self._inputs.send()
        fetched = [each.data_ptr() for each in self._fetched[:2]], state.rows
        self._sent = (*self._sent[:3], fetched, *self._sent[4:])

    def fetch(self) -> None:
        """Launch the kernel that completes the inputs by what only the device knows."""
        given = self.given
        packing = Packing(given.widths, given.offsets, given.row_index) if self.shape.packed else None
        fetch_inputs(given.ids, given.starts, given.header, given.sources, self._max_id, packing)

    def first_rows(self, widths: Seq[int]) -> list[int]:
        """The first row of each sequence, given the sequences' widths."""
        if not self.shape.packed:
            return [i * self.shape.width for i in range(len(widths))]
        return [0, *accumulate(widths)][: len(widths)]

    def _write_state(self, after: DeviceState, reads: int, into: InputParts) -> None:
        """Write where a state's texts are, on the device or known to the host. reads: tokens that each reads."""
        rows = range(len(after)) if after.rows is None else after.rows
        for i, row in enumerate(rows):
            if not isinstance(row, int):
                into.starts[i] = row[0] - reads
                into.ids[i, :reads] = row[-reads:]
        known = [row if isinstance(row, int) else -1 for row in rows]
        write_state(into.header, into.sources, *self._fetched[:2], reads=reads, rows=known)

    def _sources(self, spans: Seq[Span]) -> tuple[list[Source], bool]:
        """Where each draft's tokens are, and whether there is a tree among the drafts.

        The tensors at those addresses are kept alive until another pass is loaded.
        """
        blocks: dict[HostCopy, Tensor] = {}
        sources: list[Source] = []
        trees = self._copied = False
        for span in spans:
            tokens = span.draft.tokens
            trees = trees or span.draft.parents is not None
            if not tokens or not isinstance(tokens, DeviceRow):
                sources.append(tuple(tokens))
                continue
            block = blocks.get(tokens.block)
            if block is None:  # it may be another device's
                block = tokens.block.tokens.to(self._tables.device, non_blocking=True).contiguous()
                blocks[tokens.block] = block
                self._fetched.append(block)
                self._copied = self._copied or block is not tokens.block.tokens
            sources.append(block.data_ptr() + 8 * tokens.row * block.shape[1])
        return sources, trees

    def _write_packing(self, into: InputParts) -> None:
        """Write where the rows of a packed pass lie, from the widths."""
        if self.shape.packed:
            into.offsets[1:] = into.widths.cumsum()[:-1]
            real = np.flatnonzero(np.arange(self.shape.width) < into.widths[:, None])
            into.row_index[: len(real)] = real

    def _write_wanted(self, spans: Seq[Span], widths: Seq[int], into: InputParts) -> Tensor | slice:
        """The rows whose logits the spans ask for: a slice, or written to the inputs."""
        firsts, rows = self.first_rows(widths), [span.rows for span in spans]
        if len(spans) == 1 or rows == (widths if self.shape.packed else [self.shape.width] * len(spans)):
            first = widths[0] - rows[0]
            return slice(first, first + sum(rows))
        wanted = [
            row
            for first, width, count in zip(firsts, widths, rows, strict=True)
            for row in range(first + width - count, first + width)
        ]
        into.wanted[: len(wanted)] = wanted
        return self.given.wanted[: len(wanted)]


def _write_texts(spans: Seq[Span], into: InputParts) -> None:
    into.starts[: len(spans)] = [span.start for span in spans]
    if all(len(span.tokens) == 1 for span in spans):
        into.ids[: len(spans), 0] = [span.tokens[0] for span in spans]
        return
    for ids, span in zip(into.ids, spans, strict=False):
        ids[: len(span.tokens)] = span.tokens


def _write_drafts(spans: Seq[Span], widths: Seq[int], sources: Seq[Source], into: InputParts) -> DeviceParents:
    """Write the drafts' tokens, or their addresses. Returns the parents of trees that are on the device."""
    device_parents: DeviceParents = []
    for i, (span, width, source) in enumerate(zip(spans, widths, sources, strict=True)):
        text, parents = len(span.tokens), span.draft.parents
        if width == text:
            continue
        if isinstance(source, int):
            write_draft(into.sources[i], source, text, width - text)
        else:
            into.ids[i, text:width] = source
        if isinstance(parents, DeviceRow):
            device_parents.append((i, 0, parents))
        elif parents is not None:  # a row's parent is counted from row 1 on: -1 is row 0
            into.parents[i, text - 1 : width - 1] = [text - 1 + parent for parent in parents]
    return device_parents


def _shapes(shape: BatchShape) -> list[tuple[int, ...]]:
    """The shape of each of the InputParts."""
    batch, width, rows = shape.batch, shape.width, shape.rows
    packing = ((batch,), (rows,)) if shape.packed else ((0,), (0,))
    return [(batch, width), (batch, width - 1), *[(batch,)] * 5, (HEADER,), (batch, SOURCES), (rows,), *packing]


def _parts(array: Any, shape: BatchShape) -> InputParts:
    """Views of an array or tensor that holds all inputs."""
    shapes = _shapes(shape)
    ends = accumulate(map(prod, shapes))
    return InputParts(*(array[end - prod(each) : end].reshape(each) for each, end in zip(shapes, ends, strict=True)))
