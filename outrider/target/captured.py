"""The native target's passes of a few rows a sequence, recorded as CUDA graphs and replayed.

The same sums as `Decoder.forward` and `logits`, spelled with the fused kernels: seven launches a
layer, none of them waited for by the host. A pass takes B sequences of W rows each, both rounded
up to a few sizes; what is added only fills up and is written to a page of its own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.core import Span
from outrider.kernels.triton_attention import CHUNK, Batch, Workspace, attend_pages, rotate_and_store
from outrider.kernels.triton_linear import Scratch, linear, takes
from outrider.models.decoder import Decoder, Layer, Norm
from outrider.models.linear import Linear

if TYPE_CHECKING:
    from outrider.target.native import NativeTarget

WIDTHS = (1, 2, 4, 6, 8, 12, 16, 32)
MOST_ROWS = 256
PINNED_ROWS = 16  # what the fused kernels take: beyond, the library picks its sums by the number of rows


def fits(decoder: Decoder) -> bool:
    """Whether the fused kernels say all that this decoder says."""
    config = decoder.config
    plain = not (config.qk_norm or config.sandwich_norms or config.out_bias or config.mlp_bias)
    return (
        plain
        and decoder.device.type == "cuda"
        and decoder.dtype in (torch.bfloat16, torch.float16)
        and config.activation == "silu"
        and config.final_softcap is None
        and config.embedding_scale == 1
        and config.head_dim in (16, 32, 64, 128, 256)
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """One size of pass: sequences, rows each, and chunks of keys the longest text may need."""

    batch: int
    width: int
    chunks: int

    @property
    def rows(self) -> int:
        return self.batch * self.width


class Captured:
    """Replays passes over a NativeTarget's weights and cache. One replay at a time."""

    def __init__(self, target: NativeTarget, *, pinned: bool = False) -> None:
        """pinned: every row by one path of arithmetic, so that its bits do not depend on the rows beside it."""
        self.target, self.decoder, self.config = target, target.decoder, target.decoder.config
        self.pinned, self.most_rows = pinned, PINNED_ROWS if pinned else MOST_ROWS
        self.page, self.scratch_page = target.pool.size, target.pool.count
        weights = self.decoder.weights
        for layer in weights.layers:
            _fold(layer.attention_norm, cast(Linear, layer.qkv))
            _fold(layer.mlp_norm, cast(Linear, layer.gate_up))
        self.head = cast(Linear, weights.head).weight
        self.scratch = Scratch(max(self.head.shape[0], 2 * self.config.intermediate_size), self.decoder.device)
        self.recorded: dict[Shape, tuple[Pass, torch.cuda.CUDAGraph]] = {}

    def score(self, spans: Seq[Span]) -> Tensor | None:
        """As NativeTarget.score; None where the pass is of another kind: a prompt being read, or too many rows."""
        width = next((w for w in WIDTHS if w >= max(span.width for span in spans)), 0)
        if not 0 < width <= self.most_rows:
            return None
        batch = 1 << (len(spans) - 1).bit_length()
        if batch * width > self.most_rows:
            half = len(spans) // 2
            parts = [self.score(spans[:half]), self.score(spans[half:])]
            return None if parts[0] is None or parts[1] is None else torch.cat([parts[0], parts[1]])
        chunks = -(-(max(span.start for span in spans) + width) // CHUNK)
        shape = Shape(batch, width, 1 << max(2, (chunks - 1).bit_length()))
        if shape not in self.recorded:
            made = Pass(self, shape)
            self.recorded[shape] = made, record(made.forward)
        made, graph = self.recorded[shape]
        made.load(spans)
        graph.replay()
        return made.rows(spans)


def _fold(norm: Norm, product: Linear) -> None:
    """Multiply a norm's weight into the matrix behind it, so that the norm's is all ones."""
    product.weight.copy_(product.weight.float() * norm.weight)
    norm.weight.fill_(1)


def record(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
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
        with torch.inference_mode(), torch.cuda.graph(graph):
            work()
    finally:
        gc.enable()
    return graph


class Pass:
    """One shape's inputs and buffers, and the launches that go from one to the other."""

    def __init__(self, owner: Captured, shape: Shape) -> None:
        self.owner, self.shape = owner, shape
        config, device, dtype = owner.config, owner.decoder.device, owner.decoder.dtype
        n, self.pages = shape.rows, shape.chunks * CHUNK // owner.page
        self.host = torch.empty(5 * n + shape.batch * (1 + self.pages), dtype=torch.int64, pin_memory=True)
        self.inputs = torch.zeros_like(self.host, device=device, pin_memory=False)
        parts = self.inputs.split([n, n, n, n, n, shape.batch, shape.batch * self.pages])
        self.ids, self.positions, self.slots, ancestors, depths, starts, tables = parts
        tables.fill_(owner.scratch_page)
        self.slots.fill_(owner.scratch_page * owner.page)
        self.batch = Batch(tables.view(shape.batch, -1), starts, ancestors, depths, shape.width, shape.chunks)
        heads, kv, dim = config.heads, config.kv_heads, config.head_dim
        self.work = Workspace(n, heads, dim, shape.chunks, device)
        self.qkv = torch.empty(n, (heads + 2 * kv) * dim, dtype=dtype, device=device)
        self.q, self.attended = (torch.empty(n, heads, dim, dtype=dtype, device=device) for _ in range(2))
        self.wide = torch.empty(n, config.intermediate_size, dtype=dtype, device=device)
        self.logits = torch.empty(n, config.vocab_size, dtype=torch.float32, device=device)

    @torch.inference_mode()
    def load(self, spans: Seq[Span]) -> None:
        """Bring a batch's inputs to the device: one copy, not waited for."""
        self.inputs.copy_(self._pack(spans), non_blocking=True)

    @torch.inference_mode()
    def rows(self, spans: Seq[Span]) -> Tensor:
        """The logits the spans asked for, float32 [rows wanted, vocab]"""
        width = self.shape.width
        if all(span.rows == width for span in spans):
            return self.logits[: len(spans) * width].clone()
        wanted = [i * width + row for i, span in enumerate(spans) for row in range(span.width - span.rows, span.width)]
        return self.logits[torch.tensor(wanted, device=self.logits.device)]

    def _pack(self, spans: Seq[Span]) -> Tensor:
        """All inputs of a pass in one piece of pinned memory."""
        shape, page, pool = self.shape, self.owner.page, self.owner.target.pool
        ids, positions, slots, ancestors, depths = ([] for _ in range(5))
        starts, tables = [], []
        nowhere = self.owner.scratch_page * page
        for span in spans:
            table, draft, start, text = pool.table(span.seq_id), span.draft, span.start, len(span.tokens)
            depth = [*range(text), *(text - 1 + d for d in draft.depths())]
            bits = [(2 << row) - 1 for row in range(text)]
            for node in range(len(draft)):
                bits.append(bits[draft.parent(node) + text] | 1 << (node + text))
            spare = shape.width - span.width
            ids += [*span.tokens, *draft.tokens] + [0] * spare
            positions += [start + d for d in depth] + [start] * spare
            slots += [table[p // page] * page + p % page for p in range(start, start + span.width)] + [nowhere] * spare
            ancestors += bits + [0] * spare
            depths += depth + [0] * spare
            starts.append(start)
            tables += table[: self.pages] + [self.owner.scratch_page] * (self.pages - len(table))
        empty = shape.batch - len(spans)
        fill = empty * shape.width
        packed = ids + [0] * fill + positions + [0] * fill + slots + [nowhere] * fill
        packed += ancestors + [1] * fill + depths + [0] * fill + starts + [0] * empty
        packed += tables + [self.owner.scratch_page] * (empty * self.pages)
        self.host.copy_(torch.tensor(packed, dtype=torch.int64))
        return self.host

    def forward(self) -> None:
        """Launch everything: from the inputs to the logits [N, vocab]."""
        owner = self.owner
        weights, config, target = owner.decoder.weights, owner.config, owner.target
        x = F.embedding(self.ids, weights.embedding)
        for i, layer in enumerate(weights.layers):
            (keys, values), kind = target.caches[i], config.layers[i]
            qkv = cast(Linear, layer.qkv)
            self._product(x, qkv.weight, self.qkv, residual=qkv.bias, eps=config.norm_eps)
            turns = owner.decoder.turns(kind.rope)
            rotate_and_store(self.qkv, turns, self.positions, self.slots, self.q, (keys, values))
            attend_pages(
                self.q, keys, values, self.batch, self.attended, self.work,
                scale=config.attention_scale, softcap=config.attention_softcap or 0.0, window=kind.window or 0,
                page=owner.page,
            )  # fmt: skip
            self._layer_rest(x, layer)
        self._product(weights.norm(x), owner.head, self.logits)

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
        """The fused kernel for up to 16 rows, the library's product and what goes around it beyond."""
        if takes(out.shape[1], x.shape[1], len(x), gated):
            one_path = self.owner.pinned
            linear(x, w, out, self.owner.scratch, residual=residual, eps=eps, gated=gated, one_path=one_path)
            return
        if eps is not None:
            x = F.rms_norm(x, x.shape[-1:], None, eps)
        if gated:
            gate, up = F.linear(x, w).chunk(2, -1)
            torch.mul(F.silu(gate), up, out=out)
        elif residual is not None:
            torch.addmm(residual, x, w.t(), out=out)
        elif out.dtype == x.dtype:
            torch.mm(x, w.t(), out=out)
        else:
            out.copy_(torch.mm(x, w.t()))
