"""One captured forward pass: its inputs, its buffers, and the launches in between.

It computes the same sums as `Decoder.forward` and `logits`, with the fused kernels: six launches per layer, none of
them waited for by the host. A pass takes B sequences of at most W rows, padded to a few sizes. Its inputs have W places
for each sequence; its rows are all of those, or the real ones one after another (`BatchShape.packed`). Padding rows
write to the scratch page. One captured pass serves texts of every length. graph_runner.py decides which shapes are
captured, and replays them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import cast

import torch
from torch import Tensor

from outrider.core.draws import Draws
from outrider.core.sequence import Span
from outrider.kernels.batch import AttentionBatch, AttentionWorkspace, PackedRows, RowPlaces, uniform_rows
from outrider.kernels.triton_accept import accept_chains, accept_trees, compact_kept, tree_rows
from outrider.kernels.triton_attention import MAX_ROW_SPLITS, attend_pages, choose_kv_splits
from outrider.kernels.triton_linear import LinearWorkspace, linear, linear_rope
from outrider.kernels.triton_rope import locate_rows, rotate_and_store
from outrider.kernels.triton_rows import embed_rows, gate_rows, norm_rows, store_tapped
from outrider.kernels.triton_sample import sample_rows
from outrider.kernels.triton_tiles import supports_linear
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Layer
from outrider.models.linear import Linear
from outrider.runners.cuda_graphs import BatchShape, copy_rows
from outrider.runners.device_state import DeviceState
from outrider.runners.paged_model import LayerCache, PagedModel
from outrider.runners.pass_inputs import PassInputs

PINNED_SPLITS = 32
PINNED_ROWS_PER_PROGRAM = 8
PACKED_TILE = 32
"""Max rows, times the query heads of a group, in an attention program of a packed pass. Where few sequences are wide,
larger programs would mostly compute padding."""
PDL = True  # kernels begin while the one before ends: programmatic dependent launch


class ActivationBuffers:
    """The intermediate buffers of passes: one set for all shapes, since one pass runs at a time.

    Captured passes write to the addresses they were captured with, so buffers are never moved nor resized.
    """

    def __init__(self, model: PagedModel, rows: int) -> None:
        config, device = model.config, model.device

        def buffer(*shape: int, dtype: torch.dtype = model.decoder.dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=device)

        heads, kv, dim = config.heads, config.kv_heads, config.head_dim
        self.x, self.normed = buffer(config.hidden_size), buffer(config.hidden_size)
        self.qkv = buffer((heads + 2 * kv) * dim)
        self.q, self.attended = buffer(heads, dim), buffer(heads, dim)
        self.both, self.wide = buffer(2 * config.intermediate_size), buffer(config.intermediate_size)
        self.logits = buffer(config.vocab_size, dtype=torch.float32)
        self.tapped = torch.empty(len(model.taps), rows, config.hidden_size, dtype=model.decoder.dtype, device=device)
        """The outputs of each tapped layer."""
        self.attention = AttentionWorkspace(MAX_ROW_SPLITS, heads, dim, device)
        self.linear = LinearWorkspace(device)
        self.places = [RowPlaces.empty(rows, dim, device) for _ in config.ropes]


class GraphedForward:
    """One shape's inputs and buffers, and the launches that go from one to the other."""

    def __init__(self, model: PagedModel, buffers: ActivationBuffers, shape: BatchShape, *, pinned: bool) -> None:
        self.model, self.shape, self.buffers, self.pinned = model, shape, buffers, pinned
        n, batch, width = shape.rows, shape.batch, shape.width
        self.inputs = PassInputs(shape, model.tables, model.config.vocab_size - 1)
        given = self.inputs.given
        self.ids, self.parents, self.seeds = given.ids, given.parents, given.seeds
        self.temperatures = given.temperatures.view(torch.float64)
        chain = torch.arange(width, device=model.device)
        packing = PackedRows(width, given.offsets, given.row_index)
        self.batch = AttentionBatch(
            model.tables.pages, given.table_ids, given.starts, given.widths,
            ((2 << chain) - 1).repeat(batch), chain.repeat(batch),
            packing if shape.packed else uniform_rows(batch, width, model.device),
            **_splits(shape, model.config, pinned),
        )  # fmt: skip
        self._trees = False
        """Whether ancestors and depths are those of trees, not of chains."""
        self.x, self.qkv, self.q = buffers.x[:n], buffers.qkv[:n], buffers.q[:n]
        self.attended, self.wide = buffers.attended[:n], buffers.wide[:n]
        self.tapped = [buffers.tapped[i, :n] for i in range(len(model.taps))]
        self.reduced = model.heads.reduced(shape.outputs)
        self.head = cast(Linear, model.decoder.weights.head if self.reduced is None else self.reduced.rows).weight
        self.logits = buffers.logits.view(-1)[: n * len(self.head)].view(n, len(self.head))
        self.no_logits = self.logits[:0]
        # not in the graphs' memory, where other graphs may write before these are read
        self.choices = torch.zeros(n, dtype=torch.int64, device=model.device)
        """int64 [N]: the target's choice after each row, by the seed and temperature of its sequence."""
        self.placed = torch.zeros(shape.places if shape.packed else 0, dtype=torch.int64, device=model.device)
        """The choices of all places that are asked for, where drafts share rows; negative where a place has no row."""
        numbers = torch.zeros(4, batch, dtype=torch.int64, device=model.device)
        self._state = DeviceState(numbers[0], numbers[2:].view(batch, 2), self.ids, numbers[1])
        """The state after these choices, where all drafts are chains."""
        self._states: dict[int, DeviceState] = {}
        """Views of that state for the first n sequences, by n; made once."""
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Views of the logits and choices of adjacent rows, by (start, stop); made once."""
        self._placed: dict[int, Tensor] = {}

    def load(
        self,
        spans: Seq[Span],
        after: DeviceState | None = None,
        draws: Draws | None = None,
        *,
        shared: bool = False,
    ) -> Tensor | slice:
        """Send a batch's inputs to the device in one copy, not waited for. Returns the rows whose logits are asked for.

        after: the state of the batch's sequences. draws: their seeds and temperatures; None: every row takes its best
        token. shared: as for `PassInputs.load`; only choices are asked for then.
        """
        wanted, device_parents = self.inputs.load(spans, after, draws, shared=shared)
        trees = device_parents is not None
        if trees or self._trees:
            copy_rows(self.parents, device_parents or [])
            ancestors, depths = tree_rows(self.parents, self.batch.widths - 1)
            self.batch.ancestors.copy_(ancestors.view(-1))
            self.batch.depths.copy_(depths.view(-1))
        self._trees = trees
        return wanted

    @property
    def has_trees(self) -> bool:
        """Whether there is a tree in the last batch."""
        return self._trees

    def known_state(self, count: int) -> DeviceState | None:
        """The state that `accept` returns for the pass's own choices, where it needs no launch; else None."""
        return None if self._trees or self.model.returns_taps else self._states.get(count)

    def accept(self, count: int, choices: Tensor | None = None) -> DeviceState:
        """The state of the first `count` sequences, each of one token and a draft, after these choices.

        choices int64: for all real rows, in order; None: the pass's own. The accepted nodes of trees are moved together
        in the cache. Padding of a draft, which is read as some token, is never accepted.
        """
        if choices is None and not self._trees:
            if count not in self._states:
                self._states[count] = self._state.first(count)
            state = self._states[count]
            return self._with_features(state, None) if self.model.returns_taps else state
        batch, ids = self.batch, self.ids[:count]
        starts, widths = batch.starts[:count], batch.widths[:count]
        if not self._trees:
            lengths, last, accepted = accept_chains(ids, starts, widths, cast(Tensor, choices))
            state = DeviceState(lengths, last, ids, accepted)
            return self._with_features(state, None) if self.model.returns_taps else state
        offsets = batch.packing.offsets if choices is None else None
        choices = self.choices if choices is None else choices
        lengths, last, path, accepted = accept_trees(ids, self.parents[:count], starts, widths, choices, offsets)
        for keys, values in self.model.groups:
            table_ids, page = batch.table_ids[:count], self.model.pool.size
            compact_kept(keys, values, batch.block_tables, table_ids, starts, path, accepted, page=page)
        if not self.model.returns_taps:
            return DeviceState(lengths, last)
        rows = torch.cat([torch.zeros_like(starts)[:, None], path.clamp(min=0) + 1], 1)  # [count, W]
        return self._with_features(DeviceState(lengths, last, ids.gather(1, rows), accepted), rows)

    def accept_empty_trees(self) -> None:
        """Compile the kernels that trees need, by accepting trees without nodes."""
        tree_rows(self.parents, self.batch.widths - 1)
        self._trees = True
        self.accept(self.shape.batch, self.ids.view(-1))
        self.accept(self.shape.batch)
        self._trees = False

    def _with_features(self, state: DeviceState, rows: Tensor | None) -> DeviceState:
        """The state with the tapped outputs at the rows that were kept."""
        count, features = len(state), self.features()
        if rows is None and not self.shape.packed:
            kept = features.view(self.shape.batch, self.shape.width, -1)[:count]
        else:
            rows = torch.arange(self.shape.width, device=self.x.device) if rows is None else rows
            places = self.batch.packing.offsets[:count, None] + rows  # [count, W]
            kept = features[places.clamp(max=len(features) - 1)]
        return DeviceState(state.lengths, state.last, state.tokens, state.accepted, kept)

    def features(self) -> Tensor:
        """A copy of the tapped outputs of all rows, [N, taps * hidden]."""
        return torch.cat(self.tapped, -1)

    def take_logits(self, rows: Tensor | slice, *, lasting: bool) -> Tensor:
        """These rows' logits, float32 [M, vocab]; valid until the next pass unless lasting."""
        logits = self._views(rows)[0] if isinstance(rows, slice) else self.logits[rows]
        if self.reduced is not None:
            return self.reduced.widen(logits)
        return logits.clone() if lasting and isinstance(rows, slice) else logits

    def take_choices(self, rows: Tensor | slice) -> Tensor:
        """The target's choices after these rows, int64 [M]; valid until the next pass."""
        if self.inputs.shared:
            return self._placed_rows(cast(slice, rows).stop)
        return self._views(rows)[1] if isinstance(rows, slice) else self.choices[rows]

    def _placed_rows(self, count: int) -> Tensor:
        """A view of the first `count` of `placed`, made once."""
        if count not in self._placed:
            self._placed[count] = self.placed[:count]
        return self._placed[count]

    def _views(self, rows: slice) -> tuple[Tensor, Tensor]:
        key = rows.start, rows.stop
        if key not in self._rows:
            self._rows[key] = self.logits[rows], self.choices[rows]
        return self._rows[key]

    def positions(self, rows: Tensor | slice) -> Tensor:
        """int64 [M]: the position of the token that follows each of these rows."""
        batch = self.batch
        places = batch.packing.row_index[rows] if self.shape.packed else rows
        return (batch.starts[:, None] + batch.depths.view(self.shape.batch, -1) + 1).view(-1)[places]

    def run(self) -> None:
        """Launch the pass, then each row's choice, and what chains accept by these choices."""
        self.inputs.fetch()
        self.forward()
        if self.reduced is None:
            batch, state = self.batch, self._state
            sample_rows(self.logits, self.temperatures, self.seeds, batch, self.choices)
            out = state.lengths, state.last, cast(Tensor, state.accepted)
            placed = (self.inputs.given.sources, self.placed) if self.shape.packed else None
            accept_chains(self.ids, batch.starts, batch.widths, self.choices, batch.packing.offsets, out, placed)

    def forward(self) -> None:
        """Launch the pass, from the inputs to the logits: [N, vocab], or [N, outputs] of a reduced head."""
        model, x = self.model, self.x
        weights, config, page = model.decoder.weights, model.config, model.pool.size
        embed_rows(weights.embedding, self.ids, self.batch.packing.row_index, x, pdl=PDL)
        places = [p.first(len(x)) for p in self.buffers.places]
        for rope, place in enumerate(places):
            cos_sin = model.decoder.cos_sin(rope)
            locate_rows(self.batch, cos_sin, place, scratch_slot=model.scratch_slot, page=page, pdl=PDL)
        for i, layer in enumerate(weights.layers):
            cache, kind = model.caches[i], config.layers[i]
            self._qkv(x, layer, places[kind.rope], cache)
            attend_pages(
                self.q, *cache, self.batch, self.attended, self.buffers.attention,
                scale=config.attention_scale, softcap=config.attention_softcap or 0.0, window=kind.window or 0,
                page=page, pdl=PDL,
            )  # fmt: skip
            x = self._rest_of_layer(x, layer, self.tapped[model.taps.index(i)] if i in model.taps else self.x)
        if model.kept is not None:
            store_tapped(
                self.buffers.tapped, self.ids, self.batch.packing.row_index, places[0].slots, *model.kept, pdl=PDL
            )
        normed = self.buffers.normed[: len(x)]
        norm_rows(x, normed, config.norm_eps, weight=weights.norm.weight, pdl=PDL)
        self._linear(normed, self.head, self.logits)

    def _qkv(self, x: Tensor, layer: Layer, places: RowPlaces, cache: LayerCache) -> None:
        """A layer's queries, rotated, to self.q; its keys and values to the cache."""
        qkv, eps = cast(Linear, layer.qkv), self.model.config.norm_eps
        if layer.qk_norm is None and supports_linear(self.qkv.shape[1], x.shape[1], len(x), False):
            linear_rope(
                x, qkv.weight, self.q, cache, places, self.buffers.linear,
                bias=qkv.bias, eps=eps, pinned=self.pinned, pdl=PDL,
            )  # fmt: skip
            return
        self._linear(x, qkv.weight, self.qkv, residual=qkv.bias, eps=eps)
        norms = None if layer.qk_norm is None else layer.qk_norm.weight
        rotate_and_store(self.qkv, places, self.q, cache, norms=norms, eps=eps, pdl=PDL)

    def _rest_of_layer(self, x: Tensor, layer: Layer, into: Tensor) -> Tensor:
        """Run a layer behind its attention; the output goes to `into`. x is only written where it is self.x."""
        out, gate_up, down = (cast(Linear, p).weight for p in (layer.out, layer.gate_up, layer.down))
        self._linear(self.attended.view(len(x), -1), out, self.x, residual=x)
        self._linear(self.x, gate_up, self.wide, eps=self.model.config.norm_eps, gated=True)
        self._linear(self.wide, down, into, residual=self.x)
        return into

    def _linear(
        self,
        x: Tensor,
        w: Tensor,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        eps: float | None = None,
        gated: bool = False,
    ) -> None:
        """A product by the fused kernel where it supports the shape (up to 64 rows), else by the library."""
        buffers, rows = self.buffers, len(x)
        if supports_linear(out.shape[1], x.shape[1], rows, gated):
            linear(
                x, w, out, buffers.linear, residual=residual, eps=eps, gated=gated, pinned=self.pinned, pdl=PDL
            )  # fmt: skip
            return
        if eps is not None:
            norm_rows(x, buffers.normed[:rows], eps, pdl=PDL)
            x = buffers.normed[:rows]
        if gated:
            torch.mm(x, w.t(), out=buffers.both[:rows])
            gate_rows(buffers.both[:rows], out, pdl=PDL)
        elif residual is not None:
            torch.addmm(residual, x, w.t(), out=out)
        else:  # logits are float32, finer than the rows
            torch.mm(x, w.t(), out_dtype=out.dtype, out=out)


def _splits(shape: BatchShape, config: DecoderConfig, pinned: bool) -> dict[str, int]:
    """How attention splits the keys in a pass of this shape: fields of its AttentionBatch."""
    if pinned:
        return {"splits": PINNED_SPLITS, "rows_per_program": PINNED_ROWS_PER_PROGRAM, "chunk": 0}
    splits, chunk = choose_kv_splits(shape.batch, shape.rows, config.kv_heads)
    rows_per_program = min(shape.width, max(1, PACKED_TILE * config.kv_heads // config.heads)) if shape.packed else 0
    return {"splits": splits, "rows_per_program": rows_per_program, "chunk": chunk}
