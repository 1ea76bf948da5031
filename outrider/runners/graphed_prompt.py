"""Captured passes that read prompts: texts one after another, padded to one of a few numbers of rows.

They compute the same sums as `Decoder.forward`, with nine launches per layer in place of 26. Launched one by one, these
would take the host longer than the device, except for the longest prompts of the largest models. Padding rows write to
the scratch page, and no row sees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from outrider.core.pinned_inputs import PinnedInputs
from outrider.core.sequence import Span
from outrider.kernels.batch import RowPlaces
from outrider.kernels.triton_prompt import QUERY_TILE, attend_prompt, prompt_tiles
from outrider.kernels.triton_rope import rotate_and_store
from outrider.kernels.triton_rows import gate_rows, norm_rows
from outrider.models.decoder import Layer
from outrider.models.linear import Linear
from outrider.runners.base import Scores
from outrider.runners.cuda_graphs import PROMPT_SIZES, capture
from outrider.runners.paged_model import PagedModel

ROWS_A_TEXT = 16
"""Texts of a captured pass have so many rows or more, on average; shorter ones are read by a plain pass."""


class PromptParts(NamedTuple):
    """The inputs of N rows: int64 parts of one array, or of a tensor on the device."""

    ids: Any  # [N]
    positions: Any  # [N]
    slots: Any  # [N]: where each row's key and value go
    wanted: Any  # [N]: the rows whose logits are asked for come first
    tiles: Any  # [T, 4], see `prompt_tiles`; those without rows are padding


class PromptBuffers:
    """The outputs of passes: one set for all sizes, since one pass runs at a time."""

    def __init__(self, model: PagedModel, rows: int) -> None:
        def buffer(columns: int) -> Tensor:
            return torch.zeros(rows, columns, dtype=model.decoder.dtype, device=model.device)

        self.hidden, self.tapped = buffer(model.config.hidden_size), buffer(model.features_width)


class GraphedPrompt:
    """The inputs of one size of pass, and the launches from there to the outputs."""

    def __init__(self, model: PagedModel, buffers: PromptBuffers, rows: int) -> None:
        self.model = model
        self.max_tiles = rows // QUERY_TILE + rows // ROWS_A_TEXT
        self._inputs = PinnedInputs(4 * (rows + self.max_tiles), model.device)
        self._written = [_parts(array, rows) for array in self._inputs.arrays]
        self.given: PromptParts = _parts(self._inputs.ints, rows)
        """The inputs on the device, where the pass reads them."""
        self.hidden, self.tapped = buffers.hidden[:rows], buffers.tapped[:rows]
        """[N, hidden], after the last norm, and [N, taps * hidden]; valid until the next pass."""

    def load(self, spans: Seq[Span]) -> tuple[Tensor, list[slice]] | None:
        """Send a batch's inputs, in one copy that is not waited for; None where there are too many texts.

        Returns the rows whose logits are asked for, int64 [M], and each span's own rows.
        """
        ends = np.cumsum([span.width for span in spans]).tolist()
        rows = [slice(end - span.width, end) for span, end in zip(spans, ends, strict=True)]
        table_ids = self.model.tables.table_ids([span.seq_id for span in spans])
        tiles = [
            tile
            for table_id, span, own in zip(table_ids, spans, rows, strict=True)
            for tile in prompt_tiles(table_id, span.start, own.start, span.width)
        ]
        if len(tiles) > self.max_tiles:
            return None
        array = self._inputs.array()
        array[:] = 0
        into = self._written[self._inputs.current]
        into.slots[:] = self.model.scratch_slot
        for span, own in zip(spans, rows, strict=True):
            positions = np.arange(span.start, span.start + span.width)
            pages, size = np.array(self.model.pool.table(span.seq_id)), self.model.pool.size
            into.ids[own], into.positions[own] = span.tokens, positions
            into.slots[own] = pages[positions // size] * size + positions % size
        into.tiles[: len(tiles)] = tiles
        wanted = [row for span, end in zip(spans, ends, strict=True) for row in range(end - span.rows, end)]
        into.wanted[: len(wanted)] = wanted
        self._inputs.send()
        return self.given.wanted[: len(wanted)], rows

    def run(self) -> None:
        """Launch the pass, from the inputs to the outputs."""
        model, given = self.model, self.given
        decoder, config, weights = model.decoder, model.config, model.decoder.weights
        x = weights.embed(given.ids)
        places = [RowPlaces(given.slots, decoder.cos_sin(rope)[given.positions]) for rope in range(len(config.ropes))]
        for i, layer in enumerate(weights.layers):
            attended = self._attention(i, layer, x, places[config.layers[i].rope])
            x = torch.addmm(x, attended, _weight(layer.out))
            both = torch.mm(self._normed(x), _weight(layer.gate_up))
            wide = both.new_empty(len(x), config.intermediate_size)
            gate_rows(both, wide, pdl=False)
            x = torch.addmm(x, wide, _weight(layer.down))
            if i in model.taps:
                self.tapped.view(len(x), len(model.taps), -1)[:, model.taps.index(i)] = x
        norm_rows(x, self.hidden, config.norm_eps, weight=weights.norm.weight, pdl=False)
        if model.kept is not None:
            model.kept.store(given.slots, given.ids, self.tapped)

    def _attention(self, i: int, layer: Layer, x: Tensor, places: RowPlaces) -> Tensor:
        """A layer's attention over what is cached and the rows themselves: [N, heads * dim]"""
        model, config, qkv = self.model, self.model.config, cast(Linear, layer.qkv)
        normed, w = self._normed(x), _weight(qkv)
        heads = torch.mm(normed, w) if qkv.bias is None else torch.addmm(qkv.bias, normed, w)
        q = x.new_empty(len(x), config.heads, config.head_dim)
        norms = None if layer.qk_norm is None else layer.qk_norm.weight
        rotate_and_store(heads, places, q, model.caches[i], norms=norms, eps=config.norm_eps, pdl=False)
        out = torch.empty_like(q)
        attend_prompt(
            q, *model.caches[i], model.tables.pages, self.given.tiles, out,
            scale=config.attention_scale, softcap=config.attention_softcap or 0.0,
            window=config.layers[i].window or 0, page=model.pool.size,
        )  # fmt: skip
        return out.view(len(x), -1)

    def _normed(self, x: Tensor) -> Tensor:
        """Rows divided by their root mean square: the norm's weight is folded into the matrix behind it."""
        out = torch.empty_like(x)
        norm_rows(x, out, self.model.config.norm_eps, pdl=False)
        return out


class PromptPasses:
    """The captured passes of a model whose norms' weights are folded into its matrices. One replay at a time."""

    def __init__(self, model: PagedModel, graph_pool: Any) -> None:
        self.model, self._graph_pool = model, graph_pool
        self._captured: dict[int, tuple[GraphedPrompt, torch.cuda.CUDAGraph]] = {}
        self._buffers: PromptBuffers | None = None
        self._tapping = model.tapping

    def capture(self, sizes: Seq[int] = PROMPT_SIZES) -> Iterator[int]:
        """Capture passes of so many rows each, the largest first: the others share its memory. Yields each."""
        if self._buffers is None or self._tapping != self.model.tapping:  # the tapped layers have changed since
            self._captured.clear()
            self._buffers, self._tapping = PromptBuffers(self.model, max(sizes)), self.model.tapping
        for rows in sorted(sizes, reverse=True):
            if rows not in self._captured:
                prompt = GraphedPrompt(self.model, self._buffers, rows)
                self._captured[rows] = prompt, capture(prompt.run, self._graph_pool, f"a prompt of {rows} rows")
            yield rows

    def score(self, spans: Seq[Span]) -> Scores | None:
        """As `Runner.score`, for texts without drafts; None where no captured pass takes them."""
        count = sum(span.width for span in spans)
        rows = min((size for size in self._captured if size >= count), default=None)
        if rows is None or self._tapping != self.model.tapping or any(len(span.draft) for span in spans):
            return None
        prompt, graph = self._captured[rows]
        loaded = prompt.load(spans)
        if loaded is None:
            return None
        graph.replay()
        wanted, own = loaded
        logits = self.model.heads.logits(prompt.hidden[wanted])
        return Scores(logits, spans, [prompt.tapped[part] for part in own] if self.model.returns_taps else None)


def _weight(linear: Any) -> Tensor:
    """[inputs, outputs]"""
    return cast(Linear, linear).weight.t()


def _parts(array: Any, rows: int) -> PromptParts:
    """Views of an array or tensor that holds all inputs."""
    ids, positions, slots, wanted = (array[i * rows : (i + 1) * rows] for i in range(4))
    return PromptParts(ids, positions, slots, wanted, array[4 * rows :].reshape(-1, 4))
