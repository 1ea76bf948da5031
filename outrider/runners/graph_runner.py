"""The captured passes of a native model: which shapes are captured, when, and which is replayed for a batch.

graphed_forward.py has a single pass. The rules of pinned models are here: every row takes one path of arithmetic,
whatever the other rows of the pass are.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from outrider.core.draws import Draws
from outrider.core.errors import ConfigError
from outrider.core.sequence import Span
from outrider.kernels.batch import MAX_SEQUENCES
from outrider.models.decoder import Decoder, Norm
from outrider.models.linear import Linear
from outrider.runners.base import Scores
from outrider.runners.compile_counter import watch_triton
from outrider.runners.cuda_graphs import (
    MAX_ROWS,
    MIN_ROWS,
    WIDTHS,
    BatchShape,
    capture,
    capture_shapes,
    packed_shapes,
    padded_shape,
    prompt_shapes,
    split_round,
)
from outrider.runners.device_state import DeviceState
from outrider.runners.graphed_forward import ActivationBuffers, GraphedForward
from outrider.runners.graphed_prompt import PromptPasses
from outrider.runners.paged_model import PagedModel

PINNED_ROWS = 64  # max rows of the fused kernels: beyond, the order of the library's sums depends on the rows


def supports(decoder: Decoder) -> bool:
    """Whether the fused kernels compute all that this decoder does."""
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
    """Captures and replays passes over a model's weights and cache. One replay at a time."""

    def __init__(self, model: PagedModel, *, pinned: bool = False) -> None:
        """pinned: every row takes one path of arithmetic, so that its bits do not depend on the other rows."""
        self.model, self.pinned = model, pinned
        self.max_rows = PINNED_ROWS if pinned else MIN_ROWS
        self.max_decode = WIDTHS[-1]
        """Max rows of a sequence in a pass of several. `capture` sets it, so that no other shapes are needed later."""
        self._widest = 1
        """The widest sequence that passes were captured for; engines of several drafters may share a model."""
        self._packed: list[BatchShape] = []
        """The packed shapes that are captured, those of fewer rows first, and of those the narrower."""
        self._chosen: dict[tuple[int, int, int, int], BatchShape | None] = {}
        """The shapes that `_shape` found, by sequences, rows of the widest, rows of all, and outputs."""
        self._accepts_trees = False
        watch_triton()
        for layer in model.decoder.weights.layers:
            _fold(layer.attention_norm, cast(Linear, layer.qkv))
            _fold(layer.mlp_norm, cast(Linear, layer.gate_up))
        self.graph_pool = torch.cuda.graph_pool_handle()
        self.prompts = PromptPasses(model, self.graph_pool)
        self.captured: dict[BatchShape, tuple[GraphedForward, torch.cuda.CUDAGraph]] = {}
        self._buffers: ActivationBuffers | None = None
        self._tapping = model.tapping
        """`PagedModel.tapping` when the passes were captured."""

    def forward_of(self, shape: BatchShape) -> GraphedForward:
        """A pass of this shape, not captured. Buffers are made on the first call, when their size is known."""
        if self._buffers is None:
            self._buffers = ActivationBuffers(self.model, self.max_rows)
        return GraphedForward(self.model, self._buffers, shape, pinned=self.pinned)

    def shapes(self, batch: int, width: int) -> list[BatchShape]:
        """The shapes that `capture` captures for decoding sequences, with the output head in use."""
        shapes = capture_shapes(batch, width, self.max_rows if self.pinned else MAX_ROWS)
        packed = [] if self.pinned else packed_shapes(batch, width)
        return [shape._replace(outputs=self.model.heads.size) for shape in (*shapes, *packed)]

    def prompt_shapes(self, width: int) -> list[BatchShape]:
        """The shapes that `capture` also captures, for single short prompts."""
        return [shape._replace(outputs=self.model.heads.size) for shape in prompt_shapes(width)]

    def make_room(self, shapes: Seq[BatchShape]) -> None:
        """Let passes captured from now on have as many rows as these. Earlier ones keep the buffers they have."""
        rows = max(shape.rows for shape in shapes)
        if rows > self.max_rows:
            self.max_rows, self._buffers = rows, None
            self._chosen.clear()

    def split(self, spans: Seq[Span]) -> list[tuple[list[int], bool]]:
        """As `split_round`: prompts have passes of other shapes (`prompts`), except for a single short one."""
        return split_round([span.width for span in spans], self.max_decode, pinned=self.pinned)

    def read_ahead(self, span: Span) -> tuple[Span, list[Tensor]]:
        """Read all but the end of a prompt, by the path that pinned rows take; returns the rest of the span.

        So the bits of a key or value are a function of the text alone, however it was read. Also returns the tapped
        outputs of what was read.
        """
        features: list[Tensor] = []
        while span.width > WIDTHS[-1]:
            self.check_width(1 + len(span.draft))
            piece = min(WIDTHS[-1], len(span.tokens) - 1)
            read = self.score([Span(span.seq_id, span.start, span.tokens[:piece], wanted=False)])
            features += [each.clone() for each in read.features or ()]
            span = span._replace(start=span.start + piece, tokens=span.tokens[piece:])
        return span, features

    def check_width(self, width: int) -> None:
        """Raise ConfigError where so many rows of one sequence cannot be pinned."""
        if self.pinned and width > WIDTHS[-1]:
            raise ConfigError(
                f"pinned: drafts of {width - 1} tokens are too wide; it takes {WIDTHS[-1] - 1} at most, so lower the "
                "drafter's k, or leave out pinned"
            )

    def has_room(self, shape: BatchShape) -> bool:
        """Whether the rows and sequences of this shape fit into one pass."""
        return shape.rows <= self.max_rows and shape.batch <= MAX_SEQUENCES

    def capture(self, batch: int, width: int) -> Iterator[BatchShape]:
        """Capture every shape needed for up to `batch` sequences of up to `width` rows; yields each once captured."""
        self.check_width(width)
        shapes = [*self.shapes(batch, width), *self.prompt_shapes(width)]
        self.make_room(shapes)
        for shape in shapes:
            self.captured_pass(shape)
            yield shape
        packed = {*self._packed, *(shape for shape in shapes if shape.packed)}
        self._packed = sorted(packed, key=lambda shape: (shape.rows, shape.width))
        self._chosen.clear()
        self._widest = max(self._widest, padded_shape(1, min(width, WIDTHS[-1])).width)
        self.max_decode = self._widest

    def shape_of(self, spans: Seq[Span], *, shared: bool = False) -> BatchShape | None:
        """The shape of fewest rows that takes these spans; None where they are too many for one pass.

        shared: drafts share its rows, see `Draft.share`.
        """
        widths = [span.width for span in spans]
        return self._shape(len(spans), max(widths), sum([span.scored for span in spans]) if shared else sum(widths))

    def _shape(self, count: int, widest: int, rows: int) -> BatchShape | None:
        key = count, widest, rows, self.model.heads.size
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def shared_tokens(self, lengths: Seq[int], longest: int) -> int:
        """As `Runner.shared_tokens`: as many tokens as the rows of a packed pass leave beside the texts.

        0 where no packed pass has so few rows.
        """
        batch = len(lengths)
        if self.model.returns_taps or self.model.heads.size or not any(lengths):
            return 0
        shape, even = self._shape(batch, 1 + longest, batch + sum(lengths)), padded_shape(batch, 1 + max(lengths))
        return shape.packed - batch if shape is not None and 0 < shape.packed <= even.rows else 0

    def _choose(self, count: int, widest: int, rows: int, size: int) -> BatchShape | None:
        """The shape for `count` sequences, `widest` rows of the widest, `rows` of all, and `size` outputs."""
        shape = padded_shape(count, widest)._replace(outputs=size)
        fits = (s for s in self._packed if s.rows >= rows and s.width >= shape.width)
        packed = next((s for s in fits if (s.batch, s.outputs) == (shape.batch, size)), None)
        if packed is not None and packed.rows < shape.rows:
            shape = packed
        return shape if self.has_room(shape) else None

    def score(self, spans: Seq[Span], after: DeviceState | None = None, draws: Draws | None = None) -> Scores:
        """As `Runner.score`, for spans of captured shapes; in several passes where one would have too many rows."""
        shared = draws is not None and not draws.logits and any(span.draft.share is not None for span in spans)
        shape = self.shape_of(spans, shared=shared)
        if shape is None:
            middle = len(spans) // 2
            halves = [range(middle), range(middle, len(spans))]
            states = [after and after.take(half).copied() for half in halves]  # where no part writes
            parts = [self._part(spans[h.start : h.stop], state) for h, state in zip(halves, states, strict=True)]
            features = [each for part in parts for each in part.features or ()]
            positions = [part.positions() for part in parts if part.positions is not None]
            return Scores(
                torch.cat([part.logits for part in parts]),
                spans,
                features if self.model.returns_taps else None,
                torch.cat(positions).clone if positions else None,
            )
        forward, graph = self.captured_pass(shape)
        rows = forward.load(spans, after, draws, shared=shared and shape.packed > 0)
        graph.replay()
        return Scores(
            forward.take_logits(rows, lasting=draws is None) if draws is None or draws.logits else forward.no_logits,
            spans,
            _features(forward, spans) if self.model.returns_taps else None,
            partial(forward.positions, rows),
            forward,
            None if draws is None else forward.take_choices(rows),
        )

    def can_repeat(self, scores: Scores, after: DeviceState) -> bool:
        """As `Runner.can_repeat`: where all inputs are on the device, and `after` is in the pass's own buffers."""
        forward = cast("GraphedForward | None", scores.handle)
        if forward is None or scores.choices is None or not forward.inputs.are_fetched:
            return False
        known = forward.known_state(len(scores.spans))
        own = known is not None and known.lengths is after.lengths
        return own and self.captured.get(forward.shape, (None,))[0] is forward

    def repeat(self, scores: Scores) -> Scores:
        """As `Runner.repeat`. Scores are views of the pass's outputs, or gathered from them again."""
        forward = cast(GraphedForward, scores.handle)
        forward.inputs.load_again(forward.accept(len(scores.spans)))
        self.captured[forward.shape][1].replay()
        rows = forward.inputs.wanted
        if isinstance(rows, slice):
            return scores
        logits = forward.take_logits(rows, lasting=False) if len(scores.logits) else scores.logits
        return replace(scores, logits=logits, choices=forward.take_choices(rows))

    def _part(self, spans: Seq[Span], after: DeviceState | None) -> Scores:
        """The scores of a part of a round, with copies of what the pass of the next part overwrites."""
        scores = self.score(spans, after)
        features, positions = scores.features, scores.positions
        return replace(
            scores,
            features=None if features is None else [each.clone() for each in features],
            positions=None if after is None or positions is None else positions().clone,  # None: the host knows
        )

    def captured_pass(self, shape: BatchShape) -> tuple[GraphedForward, torch.cuda.CUDAGraph]:
        """The pass of this shape, captured now if it was not before, or only before the tapped layers changed."""
        if self._tapping != self.model.tapping:
            self._tapping, self._buffers = self.model.tapping, None
            self.captured.clear()
        if shape not in self.captured:
            forward = self.forward_of(shape)
            name = f"a pass of {shape.batch} x {shape.width}, {shape.rows} rows, {shape.outputs or 'all'} outputs"
            self.captured[shape] = forward, capture(forward.run, self.graph_pool, name)
            forward.accept(shape.batch, forward.ids.view(-1))  # compiled now, not in the first round
            if not self._accepts_trees and shape.width > 1 and not self.pinned:
                forward.accept_empty_trees()
                self._accepts_trees = True
        return self.captured[shape]


def _features(forward: GraphedForward, spans: Seq[Span]) -> list[Tensor]:
    firsts = forward.inputs.first_rows([span.width for span in spans])
    features = forward.features()
    return [features[first : first + span.width] for first, span in zip(firsts, spans, strict=True)]


def _fold(norm: Norm, linear: Linear) -> None:
    """Multiply a norm's weight into the matrix behind it, and set the norm's to ones."""
    linear.weight.copy_(linear.weight.float() * norm.weight)
    norm.weight.fill_(1)
