"""The native target's recorded passes: which sizes are recorded, when, and which is replayed for a batch.

passes.py is one of them. Where a target is pinned, its rules are here: every row goes one way,
whatever rows stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from outrider.core.errors import ConfigError
from outrider.core.sequence import Span
from outrider.kernels.batch import MAX_SEQUENCES
from outrider.kernels.triton_attention import choose_kv_splits
from outrider.kvcache.block_tables import BlockTables
from outrider.models.decoder import Decoder, Norm
from outrider.models.linear import Linear
from outrider.runners.device_state import DeviceState
from outrider.runners.graphed_forward import (
    MAX_ROWS,
    MIN_ROWS,
    WIDTHS,
    ActivationBuffers,
    BatchShape,
    GraphedForward,
    capture,
    capture_shapes,
    padded_shape,
)

if TYPE_CHECKING:
    from outrider.runners.native import NativeRunner

PINNED_ROWS = 64  # what the fused kernels take: beyond, the library picks its sums by the number of rows
PINNED_SPLITS = 32
PINNED_ROWS_PER_PROGRAM = 8


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


class GraphRunner:
    """Replays passes over a NativeTarget's weights and cache. One replay at a time."""

    def __init__(self, target: NativeRunner, *, pinned: bool = False) -> None:
        """pinned: every row by one path of arithmetic, so that its bits do not depend on the rows beside it."""
        self.target, self.decoder, self.config = target, target.decoder, target.decoder.config
        self.pinned, self.most_rows = pinned, PINNED_ROWS if pinned else MIN_ROWS
        self.page, self.scratch_slot = target.pool.size, target.pool.count * target.pool.size
        weights = self.decoder.weights
        for layer in weights.layers:
            _fold(layer.attention_norm, cast(Linear, layer.qkv))
            _fold(layer.mlp_norm, cast(Linear, layer.gate_up))
        self.head = cast(Linear, weights.head).weight
        self.tables = BlockTables(target.pool, MAX_SEQUENCES, target.context, self.decoder.device)
        self.graph_pool = torch.cuda.graph_pool_handle()
        self.recorded: dict[BatchShape, tuple[GraphedForward, torch.cuda.CUDAGraph]] = {}
        self._arena: ActivationBuffers | None = None
        self._latest: tuple[GraphedForward, Seq[Span]] | None = None

    @property
    def arena(self) -> ActivationBuffers:
        """The room of passes that are recorded now. Made when first asked for, by when it is known how large."""
        if self._arena is None:
            self._arena = ActivationBuffers(self.config, self.most_rows, self.decoder.dtype, self.decoder.device)
        return self._arena

    def capture_shapes(self, batch: int, width: int) -> list[BatchShape]:
        """What `prepare` records, by the head in use."""
        most = self.most_rows if self.pinned else MAX_ROWS
        return [replace(shape, outputs=self.target.heads.width) for shape in capture_shapes(batch, width, most)]

    def make_room(self, shapes: Seq[BatchShape]) -> None:
        """Let passes recorded from now on have as many rows as these. Those recorded before keep the room they have."""
        most = max(shape.rows for shape in shapes)
        if most > self.most_rows:
            self.most_rows, self._arena = most, None

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

    def has_room(self, shape: BatchShape) -> bool:
        """Whether so many rows, and texts, go into one pass."""
        return shape.rows <= self.most_rows and shape.batch <= MAX_SEQUENCES

    def prepare(self, batch: int, width: int) -> Iterator[BatchShape]:
        """Record every size that passes of up to so many sequences and rows need; yields each once it is there."""
        shapes = self.capture_shapes(batch, width)
        self.make_room(shapes)
        for shape in shapes:
            self.pass_of(shape)
            yield shape

    def score(self, spans: Seq[Span], behind: DeviceState | None = None) -> Tensor:
        """As NativeTarget.score, for spans it takes; in several passes where one would have too many rows.

        behind: where the spans' texts stand, known to the device alone; their starts and tokens are read there.
        """
        shape = replace(padded_shape(len(spans), max(span.width for span in spans)), outputs=self.target.heads.width)
        self._latest = None
        if not self.has_room(shape):
            middle, end = len(spans) // 2, len(spans)
            halves = [range(middle), range(middle, end)]
            parts = [self.score(spans[h.start : h.stop], behind and behind.take(h)) for h in halves]
            self._latest = None
            return torch.cat(parts)
        made, graph = self.pass_of(shape)
        made.load(spans)
        if behind is not None:
            made.place(behind)
        graph.replay()
        self._latest = made, spans
        return made.rows(spans)

    def stand(self, choices: Tensor) -> DeviceState | None:
        """Where the texts of the last pass stand, its choices given; None where it did more than go on with texts."""
        made, spans = self._latest or (None, ())
        if made is None or not all(len(s.tokens) == 1 and s.wanted and s.draft.parents is None for s in spans):
            return None
        return made.stand(len(spans), choices)

    def splits_of(self, shape: BatchShape) -> tuple[int, int, int]:
        """`splits`, `rows_per_program` and `chunk` of the AttentionBatch of a pass of this size."""
        if self.pinned:
            return PINNED_SPLITS, PINNED_ROWS_PER_PROGRAM, 0
        splits, chunk = choose_kv_splits(shape.batch, shape.width, self.config.kv_heads)
        return splits, 0, chunk

    def pass_of(self, shape: BatchShape) -> tuple[GraphedForward, torch.cuda.CUDAGraph]:
        """The pass of this size, recorded now where it was not before."""
        if shape not in self.recorded:
            made = GraphedForward(self, shape)
            self.recorded[shape] = made, capture(made.forward, self.graph_pool)
            made.stand(shape.batch, made.ids)  # compiled now, not in the first round
        return self.recorded[shape]


def _fold(norm: Norm, product: Linear) -> None:
    """Multiply a norm's weight into the matrix behind it, so that the norm's is all ones."""
    product.weight.copy_(product.weight.float() * norm.weight)
    norm.weight.fill_(1)
