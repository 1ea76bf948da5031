"""One recorded pass: its size, what it reads, what it writes, and the launches in between.

The same sums as `Decoder.forward` and `logits`, spelled with the fused kernels: six launches a
layer, none of them waited for by the host. A pass takes B sequences of W rows each, both rounded
up to a few sizes; what is added only fills up and is written to a page of its own. One recorded
pass serves texts of every length. captured.py says which are recorded, and when they are replayed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from outrider.core.device_row import DeviceRow, copy_guesses
from outrider.core.sequence import Span
from outrider.kernels.batch import MAX_SEQUENCES, AttentionBatch, AttentionWorkspace, RowPlaces
from outrider.kernels.triton_accept import accept_chains
from outrider.kernels.triton_attention import MAX_ROW_SPLITS, attend_pages
from outrider.kernels.triton_linear import LinearWorkspace, linear, linear_rope
from outrider.kernels.triton_rope import locate_rows, rotate_and_store
from outrider.kernels.triton_rows import gate_rows, norm_rows
from outrider.kernels.triton_tiles import supports_linear
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Layer
from outrider.models.linear import Linear
from outrider.runners.device_state import MAX_WIDTH, DeviceState

if TYPE_CHECKING:
    from outrider.runners.graph_runner import GraphRunner

WIDTHS = (1, 2, 4, 6, 8, 12, 16, MAX_WIDTH)
MIN_ROWS = 256
"""What passes have room for where nobody said how many rows they will have."""
MAX_ROWS = 1024
"""What they may be given room for; more rows are scored in several passes."""
PDL = True  # kernels begin while the one before ends: programmatic dependent launch


@dataclass(frozen=True, slots=True)
class BatchShape:
    """One size of pass: sequences, and rows each."""

    batch: int
    width: int
    outputs: int = 0
    """Logits of a row, by a narrow head of so many; 0: by the whole one."""

    @property
    def rows(self) -> int:
        return self.batch * self.width


def padded_shape(batch: int, width: int) -> BatchShape:
    """The recorded size that takes so many sequences of so many rows."""
    return BatchShape(1 << (batch - 1).bit_length(), next(w for w in WIDTHS if w >= width))


def capture_shapes(batch: int, width: int, most: int = MAX_ROWS) -> list[BatchShape]:
    """Every size that passes of up to so many sequences and rows need, less those of more than `most` rows in all.

    A text wider than any size is a prompt being read: that is no pass of these.
    """
    widest = padded_shape(1, min(width, WIDTHS[-1])).width
    batches = [1 << i for i in range((min(batch, MAX_SEQUENCES) - 1).bit_length() + 1)]
    return [BatchShape(b, w) for b in batches for w in WIDTHS if w <= widest and b * w <= most]


class ActivationBuffers:
    """What passes write between their launches: one for all sizes, since one pass runs at a time.

    Recorded passes write to where it was when they were recorded, so it is never moved nor resized.
    """

    def __init__(self, config: DecoderConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        def room(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=kind, device=device)

        heads, kv, dim = config.heads, config.kv_heads, config.head_dim
        self.x, self.normed = room(config.hidden_size), room(config.hidden_size)
        self.qkv = room((heads + 2 * kv) * dim)
        self.q, self.attended = room(heads, dim), room(heads, dim)
        self.both, self.wide = room(2 * config.intermediate_size), room(config.intermediate_size)
        self.logits = room(config.vocab_size, kind=torch.float32)
        self.work = AttentionWorkspace(MAX_ROW_SPLITS, heads, dim, device)
        self.scratch = LinearWorkspace(device)
        self.places = [RowPlaces.empty(rows, dim, device) for _ in config.ropes]


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The one stream of warm-ups: libraries keep a workspace of tens of megabytes for every stream they have seen."""
    return torch.cuda.Stream(device)


def capture(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which is run twice before: kernels are compiled and libraries warmed up then."""
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    gc.disable()  # an old graph thrown away while another is recorded would spoil it
    try:
        with torch.inference_mode(), torch.cuda.graph(graph, pool=pool):
            work()
    finally:
        gc.enable()
    return graph


class PinnedInputs:
    """A pass's whole numbers: written on the host, sent in one copy that nobody waits for."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.ints = torch.zeros(size, dtype=torch.int64, device=device)
        self._hosts = [torch.zeros(size, dtype=torch.int64, pin_memory=True) for _ in range(2)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._arrived = [torch.cuda.Event() for _ in self._hosts]
        self._stream = torch.cuda.current_stream(device)
        self._turn = 0

    def array(self) -> np.ndarray:
        """Where to write the next ones; its last copy has arrived."""
        self._turn ^= 1
        if not self._arrived[self._turn].query():
            self._arrived[self._turn].synchronize()
        return self._arrays[self._turn]

    def send(self) -> None:
        self.ints.copy_(self._hosts[self._turn], non_blocking=True)
        self._arrived[self._turn].record(self._stream)


class GraphedForward:
    """One shape's inputs and buffers, and the launches that go from one to the other."""

    def __init__(self, owner: GraphRunner, shape: BatchShape) -> None:
        self.owner, self.shape = owner, shape
        self.arena = arena = owner.arena
        n, batch = shape.rows, shape.batch
        self.inputs = PinnedInputs(3 * n + 3 * batch, owner.decoder.device)
        self.ids, ancestors, depths, starts, widths, table_ids = self.inputs.ints.split([n, n, n, batch, batch, batch])
        cut = owner.splits_of(shape)
        self.batch = AttentionBatch(owner.tables.pages, table_ids, starts, widths, ancestors, depths, shape.width, *cut)
        self.x, self.qkv, self.q, self.attended = (t[:n] for t in (arena.x, arena.qkv, arena.q, arena.attended))
        self.narrow = owner.target.heads.narrow(shape.outputs)
        self.head = owner.head if self.narrow is None else cast(Linear, self.narrow.rows).weight
        self.wide, self.logits = arena.wide[:n], _matrix(arena.logits, n, len(self.head))
        self._blank = np.zeros(3 * n + 3 * batch, dtype=np.int64)  # chains that only fill up
        self._blank[n : 2 * n] = [(2 << w) - 1 for w in range(shape.width)] * batch
        self._blank[2 * n : 3 * n] = [*range(shape.width)] * batch
        self._blank[3 * n + 2 * batch :] = owner.tables.spare

    def load(self, spans: Seq[Span]) -> None:
        """Bring a batch's inputs to the device: one copy, not waited for."""
        shape, count = self.shape, len(spans)
        array, n = self.inputs.array(), shape.rows
        array[:] = self._blank
        ids, ancestors, depths = array[: 3 * n].reshape(3, shape.batch, shape.width)
        starts, widths, table_ids = array[3 * n :].reshape(3, shape.batch)
        table_ids[:count] = self.owner.tables.table_ids(span.seq_id for span in spans)
        waiting: list[tuple[int, int, DeviceRow]] = []
        for i, span in enumerate(spans):
            text, draft = len(span.tokens), span.draft
            starts[i], widths[i] = span.start, span.width
            ids[i, :text] = span.tokens
            if isinstance(draft.tokens, DeviceRow):
                waiting.append((i, text, draft.tokens))
            else:
                ids[i, text : span.width] = draft.tokens
            if draft.parents is not None:
                _grow(draft.parents, text, ancestors[i], depths[i])
        self.inputs.send()
        if waiting:
            copy_guesses(self.tokens, waiting)

    @property
    def tokens(self) -> Tensor:
        """The ids as [texts, rows each]."""
        return self.ids.view(self.shape.batch, self.shape.width)

    def place(self, standing: DeviceState) -> None:
        """Go on from where texts stand: their last token is read, at the place behind all that is cached."""
        count = len(standing)
        self.tokens[:count, 0].copy_(standing.last[:, 1])
        torch.sub(standing.lengths, 1, out=self.batch.starts[:count])

    def stand(self, count: int, choices: Tensor) -> DeviceState:
        """Where the first `count` texts stand, each of one token and a chain of guesses, after these choices."""
        where = self.batch
        return DeviceState(*accept_chains(self.tokens[:count], where.starts[:count], where.widths[:count], choices))

    def rows(self, spans: Seq[Span]) -> Tensor:
        """The logits the spans asked for, float32 [rows wanted, vocab]"""
        width = self.shape.width
        if all(span.rows == width for span in spans):
            logits = self.logits[: len(spans) * width]
            return logits.clone() if self.narrow is None else self.narrow.widen(logits)
        wanted = [i * width + row for i, span in enumerate(spans) for row in range(span.width - span.rows, span.width)]
        index = torch.tensor(wanted, dtype=torch.int64).pin_memory().to(self.logits.device, non_blocking=True)
        logits = self.logits[index]
        return logits if self.narrow is None else self.narrow.widen(logits)

    def forward(self) -> None:
        """Launch everything: from the inputs to the logits [N, vocab], or as many as a narrow head says."""
        owner, x = self.owner, self.x
        weights, config, target = owner.decoder.weights, owner.config, owner.target
        torch.index_select(weights.embedding, 0, self.ids, out=x)
        places = [p.first(len(x)) for p in self.arena.places]
        for rope, place in enumerate(places):
            cos_sin = owner.decoder.cos_sin(rope)
            locate_rows(self.batch, cos_sin, place, scratch_slot=owner.scratch_slot, page=owner.page, pdl=PDL)
        for i, layer in enumerate(weights.layers):
            cache, kind = target.caches[i], config.layers[i]
            self._heads(x, layer, places[kind.rope], cache)
            attend_pages(
                self.q, *cache, self.batch, self.attended, self.arena.work,
                scale=config.attention_scale, softcap=config.attention_softcap or 0.0, window=kind.window or 0,
                page=owner.page, pdl=PDL,
            )  # fmt: skip
            self._layer_rest(x, layer)
        normed = self.arena.normed[: len(x)]
        norm_rows(x, normed, config.norm_eps, weight=weights.norm.weight, pdl=PDL)
        self._product(normed, self.head, self.logits)

    def _heads(self, x: Tensor, layer: Layer, places: RowPlaces, cache: tuple[Tensor, Tensor]) -> None:
        """A layer's queries, turned, to self.q; its keys and values to the cache."""
        qkv, eps, pinned = cast(Linear, layer.qkv), self.owner.config.norm_eps, self.owner.pinned
        if layer.qk_norm is None and supports_linear(self.qkv.shape[1], x.shape[1], len(x), False):
            linear_rope(
                x, qkv.weight, self.q, cache, places, self.arena.scratch,
                bias=qkv.bias, eps=eps, pinned=pinned, pdl=PDL,
            )  # fmt: skip
            return
        self._product(x, qkv.weight, self.qkv, residual=qkv.bias, eps=eps)
        norms = None if layer.qk_norm is None else layer.qk_norm.weight
        rotate_and_store(self.qkv, places, self.q, cache, norms=norms, eps=eps, pdl=PDL)

    def _layer_rest(self, x: Tensor, layer: Layer) -> None:
        out, gate_up, down = (cast(Linear, p).weight for p in (layer.out, layer.gate_up, layer.down))
        self._product(self.attended.view(len(x), -1), out, x, residual=x)
        self._product(x, gate_up, self.wide, eps=self.owner.config.norm_eps, gated=True)
        self._product(self.wide, down, x, residual=x)

    def _product(
        self,
        x: Tensor,
        w: Tensor,
        out: Tensor,
        *,
        residual: Tensor | None = None,
        eps: float | None = None,
        gated: bool = False,
    ) -> None:
        """The fused kernel for up to 64 rows, the library's product and what goes around it beyond."""
        arena, rows = self.arena, len(x)
        if supports_linear(out.shape[1], x.shape[1], rows, gated):
            pinned = self.owner.pinned
            linear(x, w, out, arena.scratch, residual=residual, eps=eps, gated=gated, pinned=pinned, pdl=PDL)
            return
        if eps is not None:
            norm_rows(x, arena.normed[:rows], eps, pdl=PDL)
            x = arena.normed[:rows]
        if gated:
            torch.mm(x, w.t(), out=arena.both[:rows])
            gate_rows(arena.both[:rows], out, pdl=PDL)
        elif residual is not None:
            torch.addmm(residual, x, w.t(), out=out)
        else:  # logits are summed up in float32, and so stay finer than the rows
            torch.mm(x, w.t(), out_dtype=out.dtype, out=out)


def _matrix(room: Tensor, rows: int, columns: int) -> Tensor:
    """[rows, columns] at the beginning of a room that is as wide or wider, without gaps."""
    return room.view(-1)[: rows * columns].view(rows, columns)


def _grow(parents: Seq[int], text: int, ancestors: np.ndarray, depths: np.ndarray) -> None:
    """Fill in what a tree's rows see, and how deep they stand; the text's own rows are there already."""
    for node, parent in enumerate(parents):
        above = text + parent  # the parent's row: the text's last one for a first guess
        ancestors[text + node] = int(ancestors[above]) | 1 << (text + node)
        depths[text + node] = depths[above] + 1
