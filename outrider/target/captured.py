"""The native target's passes of a few rows a sequence, recorded as CUDA graphs and replayed.

The same sums as `Decoder.forward` and `logits`, spelled with the fused kernels: seven launches a
layer, none of them waited for by the host. A pass takes B sequences of W rows each, both rounded
up to a few sizes; what is added only fills up and is written to a page of its own. One recorded
pass serves texts of every length.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from outrider.core import Span
from outrider.errors import ConfigError
from outrider.kernels.triton_attention import (
    ROWS_TIMES_SPLITS,
    Batch,
    Workspace,
    attend_pages,
    rotate_and_store,
    splits_for,
)
from outrider.kernels.triton_linear import Scratch, gate_rows, linear, norm_rows, takes
from outrider.models.config import DecoderConfig
from outrider.models.decoder import Decoder, Layer, Norm
from outrider.models.linear import Linear
from outrider.target.device_tokens import DeviceTokens, copy_guesses
from outrider.target.tables import Tables

if TYPE_CHECKING:
    from outrider.target.native import NativeTarget

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 32)
MOST_ROWS = 256
PINNED_ROWS = 64  # what the fused kernels take: beyond, the library picks its sums by the number of rows
PINNED_SPLITS = 32
PDL = True  # kernels begin while the one before ends: programmatic dependent launch


def fits(decoder: Decoder) -> bool:
    """Whether the fused kernels say all that this decoder says."""
    config = decoder.config
    return (
        not (config.sandwich_norms or config.out_bias or config.mlp_bias)
        and decoder.device.type == "cuda"
        and decoder.dtype in (torch.bfloat16, torch.float16)
        and config.activation == "silu"
        and config.final_softcap is None
        and config.embedding_scale == 1
        and config.head_dim in (16, 32, 64, 128, 256)
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """One size of pass: sequences, and rows each."""

    batch: int
    width: int

    @property
    def rows(self) -> int:
        return self.batch * self.width


def bucket(batch: int, width: int) -> Shape:
    """The recorded size that takes so many sequences of so many rows."""
    return Shape(1 << (batch - 1).bit_length(), next(w for w in WIDTHS if w >= width))


class Arena:
    """What passes write between their launches: one for all sizes, since one pass runs at a time."""

    def __init__(self, config: DecoderConfig, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        def room(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.empty(rows, *shape, dtype=kind, device=device)

        heads, kv, dim = config.heads, config.kv_heads, config.head_dim
        self.x, self.normed = room(config.hidden_size), room(config.hidden_size)
        self.qkv = room((heads + 2 * kv) * dim)
        self.q, self.attended = room(heads, dim), room(heads, dim)
        self.both, self.wide = room(2 * config.intermediate_size), room(config.intermediate_size)
        self.logits = room(config.vocab_size, kind=torch.float32)
        self.narrow_logits = room(config.vocab_size)
        self.work = Workspace(ROWS_TIMES_SPLITS, heads, dim, device)
        self.scratch = Scratch(device)


class Captured:
    """Replays passes over a NativeTarget's weights and cache. One replay at a time."""

    def __init__(self, target: NativeTarget, *, pinned: bool = False) -> None:
        """pinned: every row by one path of arithmetic, so that its bits do not depend on the rows beside it."""
        self.target, self.decoder, self.config = target, target.decoder, target.decoder.config
        self.pinned, self.most_rows = pinned, PINNED_ROWS if pinned else MOST_ROWS
        self.page, self.nowhere = target.pool.size, target.pool.count * target.pool.size
        weights = self.decoder.weights
        for layer in weights.layers:
            _fold(layer.attention_norm, cast(Linear, layer.qkv))
            _fold(layer.mlp_norm, cast(Linear, layer.gate_up))
        self.head = cast(Linear, weights.head).weight
        self.arena = Arena(self.config, self.most_rows, self.decoder.dtype, self.decoder.device)
        self.tables = Tables(target.pool, MOST_ROWS, target.context, self.decoder.device)
        self.graph_pool = torch.cuda.graph_pool_handle()
        self.recorded: dict[Shape, tuple[Pass, torch.cuda.CUDAGraph]] = {}

    def takes(self, span: Span) -> bool:
        """Whether the span is narrow: a text that goes on, not a prompt being read."""
        return span.width <= WIDTHS[-1]

    def cut(self, spans: Seq[Span]) -> Seq[Span]:
        """The spans to score; where rows are pinned, all but the end of each prompt is read here, by the same path.

        Then the bits of a key or value are a function of the text alone, however it was read.
        """
        if not self.pinned:
            return spans
        return [self._read_ahead(span) for span in spans]

    def check_width(self, width: int) -> None:
        """ConfigError where texts of so many rows cannot be pinned."""
        if self.pinned and width > WIDTHS[-1]:
            raise ConfigError(
                f"pinned: drafts of {width - 1} tokens are too wide; it takes {WIDTHS[-1] - 1} at most, so lower the "
                "drafter's k, or leave out pinned"
            )

    def _read_ahead(self, span: Span) -> Span:
        while span.width > WIDTHS[-1]:
            self.check_width(1 + len(span.draft))
            piece = min(WIDTHS[-1], len(span.tokens) - 1)
            self.score([Span(span.seq_id, span.start, span.tokens[:piece], wanted=False)])
            span = replace(span, start=span.start + piece, tokens=span.tokens[piece:])
        return span

    def prepare(self, batch: int, width: int) -> Iterator[Shape]:
        """Record every size that passes of up to so many sequences and rows need; yields each once it is there."""
        for b in (1 << i for i in range((batch - 1).bit_length() + 1)):
            for w in WIDTHS:
                if (w == 1 or w <= bucket(1, min(width, WIDTHS[-1])).width) and b * w <= self.most_rows:
                    self._recorded(Shape(b, w))
                    yield Shape(b, w)

    def score(self, spans: Seq[Span]) -> Tensor:
        """As NativeTarget.score, for spans it takes; in several passes where one would have too many rows."""
        shape = bucket(len(spans), max(span.width for span in spans))
        if shape.rows > self.most_rows:
            half = len(spans) // 2
            return torch.cat([self.score(spans[:half]), self.score(spans[half:])])
        made, graph = self._recorded(shape)
        made.load(spans)
        graph.replay()
        return made.rows(spans)

    def _recorded(self, shape: Shape) -> tuple[Pass, torch.cuda.CUDAGraph]:
        if shape not in self.recorded:
            made = Pass(self, shape)
            self.recorded[shape] = made, record(made.forward, self.graph_pool)
        return self.recorded[shape]


def _fold(norm: Norm, product: Linear) -> None:
    """Multiply a norm's weight into the matrix behind it, so that the norm's is all ones."""
    product.weight.copy_(product.weight.float() * norm.weight)
    norm.weight.fill_(1)


def record(work: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of `work`, which is run twice before: kernels are compiled and libraries warmed up then."""
    stream = torch.cuda.Stream()
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


class Inputs:
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


class Pass:
    """One shape's inputs and buffers, and the launches that go from one to the other."""

    def __init__(self, owner: Captured, shape: Shape) -> None:
        self.owner, self.shape = owner, shape
        arena, n, batch = owner.arena, shape.rows, shape.batch
        self.inputs = Inputs(3 * n + 3 * batch, owner.decoder.device)
        self.ids, ancestors, depths, starts, widths, seats = self.inputs.ints.split([n, n, n, batch, batch, batch])
        splits = PINNED_SPLITS if owner.pinned else splits_for(batch, shape.width, owner.config.kv_heads)
        self.batch = Batch(owner.tables.pages, seats, starts, widths, ancestors, depths, shape.width, splits)
        self.x, self.qkv, self.q, self.attended = (t[:n] for t in (arena.x, arena.qkv, arena.q, arena.attended))
        self.wide, self.logits = arena.wide[:n], arena.logits[:n]
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
        starts, widths, seats = array[3 * n :].reshape(3, shape.batch)
        seats[:count] = self.owner.tables.seat(span.seq_id for span in spans)
        waiting: list[tuple[int, int, DeviceTokens]] = []
        for i, span in enumerate(spans):
            text, draft = len(span.tokens), span.draft
            starts[i], widths[i] = span.start, span.width
            ids[i, :text] = span.tokens
            if isinstance(draft.tokens, DeviceTokens):
                waiting.append((i, text, draft.tokens))
            else:
                ids[i, text : span.width] = draft.tokens
            if draft.parents is not None:
                _grow(draft.parents, text, ancestors[i], depths[i])
        self.inputs.send()
        if waiting:
            copy_guesses(self.ids.view(shape.batch, shape.width), waiting)

    def rows(self, spans: Seq[Span]) -> Tensor:
        """The logits the spans asked for, float32 [rows wanted, vocab]"""
        width = self.shape.width
        if all(span.rows == width for span in spans):
            return self.logits[: len(spans) * width].clone()
        wanted = [i * width + row for i, span in enumerate(spans) for row in range(span.width - span.rows, span.width)]
        index = torch.tensor(wanted, dtype=torch.int64).pin_memory().to(self.logits.device, non_blocking=True)
        return self.logits[index]

    def forward(self) -> None:
        """Launch everything: from the inputs to the logits [N, vocab]."""
        owner, x = self.owner, self.x
        weights, config, target = owner.decoder.weights, owner.config, owner.target
        torch.index_select(weights.embedding, 0, self.ids, out=x)
        for i, layer in enumerate(weights.layers):
            cache, kind = target.caches[i], config.layers[i]
            qkv = cast(Linear, layer.qkv)
            self._product(x, qkv.weight, self.qkv, residual=qkv.bias, eps=config.norm_eps)
            norms = None if layer.qk_norm is None else layer.qk_norm.weight
            rotate_and_store(
                self.qkv, owner.decoder.turns(kind.rope), self.batch, self.q, cache,
                nowhere=owner.nowhere, norms=norms, eps=config.norm_eps, page=owner.page, pdl=PDL,
            )  # fmt: skip
            attend_pages(
                self.q, *cache, self.batch, self.attended, owner.arena.work,
                scale=config.attention_scale, softcap=config.attention_softcap or 0.0, window=kind.window or 0,
                page=owner.page, pdl=PDL,
            )  # fmt: skip
            self._layer_rest(x, layer)
        normed = owner.arena.normed[: len(x)]
        norm_rows(x, normed, config.norm_eps, weight=weights.norm.weight, pdl=PDL)
        self._product(normed, owner.head, self.logits)

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
        arena, rows = self.owner.arena, len(x)
        if takes(out.shape[1], x.shape[1], rows, gated):
            one_path = self.owner.pinned
            linear(x, w, out, arena.scratch, residual=residual, eps=eps, gated=gated, one_path=one_path, pdl=PDL)
            return
        if eps is not None:
            norm_rows(x, arena.normed[:rows], eps, pdl=PDL)
            x = arena.normed[:rows]
        if gated:
            torch.mm(x, w.t(), out=arena.both[:rows])
            gate_rows(arena.both[:rows], out, pdl=PDL)
        elif residual is not None:
            torch.addmm(residual, x, w.t(), out=out)
        elif out.dtype == x.dtype:
            torch.mm(x, w.t(), out=out)
        else:
            out.copy_(torch.mm(x, w.t(), out=arena.narrow_logits[:rows]))


def _grow(parents: Seq[int], text: int, ancestors: np.ndarray, depths: np.ndarray) -> None:
    """Fill in what a tree's rows see, and how deep they stand; the text's own rows are there already."""
    for node, parent in enumerate(parents):
        above = text + parent  # the parent's row: the text's last one for a first guess
        ancestors[text + node] = int(ancestors[above]) | 1 << (text + node)
        depths[text + node] = depths[above] + 1
