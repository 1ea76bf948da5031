"""A whole pass in one call of the CPU kernels, for decoders whose linear layers are packed blocks.

It computes what the decoder's own `forward` and `logits` do with the reference attention, with sums in another order.
Every row has the same bits whatever other rows are in the pass and however many threads there are.
"""

from __future__ import annotations

import ctypes as c
from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draws import Draws
from outrider.core.sequence import Span
from outrider.models.blocks import BlockLinear
from outrider.models.decoder import Decoder
from outrider.models.decoder import Layer as DecoderLayer
from outrider.native.library import Layer, Library, Model, Pass, Product, Sequence
from outrider.native.tensors import BlockTensor
from outrider.runners.layout import Layout
from outrider.runners.paged_model import PagedModel

MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True)
class PassOutput:
    """The output of a pass over N rows, M of which are wanted."""

    hidden: Tensor
    """[M, hidden], after the final norm"""
    logits: Tensor | None
    """[M, vocab]; None where the caller computes them"""
    features: Tensor | None
    """[N, taps * hidden]; None where passes return none. Where the model keeps them, the pass has stored them there"""
    choices: Tensor | None = None
    """int64 [M]: the target's choice after each, NO_TOKEN where there is none; None without draws"""


def cpu_pass_of(model: PagedModel) -> CpuPass | None:
    """The kernels' pass over this model; None where the kernels do not support its decoder."""
    decoder, config = model.decoder, model.config
    plain = not (config.sandwich_norms or config.attention_softcap or config.final_softcap)
    fits = plain and config.activation == "silu" and config.head_dim <= MAX_HEAD_DIM
    if not fits or decoder.dtype is not torch.float32 or model.pool.size & (model.pool.size - 1):
        return None
    found = _library_of(decoder)
    return None if found is None else CpuPass(found, model)


def _library_of(decoder: Decoder) -> Library | None:
    """The kernel library of the decoder's packed linear layers; None where any linear layer is of another kind."""
    products = [p for layer in decoder.weights.layers for p in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    if not all(isinstance(product, BlockLinear) for product in (*products, decoder.weights.head)):
        return None
    return _blocks(decoder.weights.head).parts[0].library


def _blocks(product: object) -> BlockLinear:
    if not isinstance(product, BlockLinear):
        raise TypeError(f"{type(product).__name__} is no linear layer of the CPU kernels")
    return product


class CpuPass:
    """A model as structures of the kernels: pointers to weights and caches, which the model keeps alive."""

    def __init__(self, library: Library, model: PagedModel) -> None:
        self.library, self.model = library, model
        config, weights = model.config, model.decoder.weights
        self._kept: list[Tensor] = []
        """Tensors made here that the structures point to."""
        self._tables: list[Tensor] = []
        self._layers = (Layer * len(config.layers))(*(self._layer(i, each) for i, each in enumerate(weights.layers)))
        table = weights.table
        self._struct = Model(
            layer_count=len(config.layers),
            hidden=config.hidden_size,
            wide=config.intermediate_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            slots=model.scratch_slot + model.pool.size,
            page_bits=model.pool.size.bit_length() - 1,
            eps=config.norm_eps,
            scale=config.attention_scale,
            embedding_scale=config.embedding_scale,
            embedding=table.handle if isinstance(table, BlockTensor) else None,
            norm=self._vector(weights.norm.plain_weight),
            head=_blocks(weights.head).struct,
            layers=self._layers,
        )

    def _layer(self, i: int, layer: DecoderLayer) -> Layer:
        config, (keys, values) = self.model.config, self.model.caches[i]
        heads = None if layer.qk_norm is None else layer.qk_norm.plain_weight  # [heads + kv_heads, dim]
        return Layer(
            attention_norm=self._vector(layer.attention_norm.plain_weight),
            mlp_norm=self._vector(layer.mlp_norm.plain_weight),
            qkv=_blocks(layer.qkv).struct,
            out=_blocks(layer.out).struct,
            gate_up=_blocks(layer.gate_up).struct,
            down=_blocks(layer.down).struct,
            q_norm=None if heads is None else self._vector(heads[0]),
            k_norm=None if heads is None else self._vector(heads[config.heads]),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            window=config.layers[i].window or 0,
            inputs=config.hidden_size,
        )

    def _vector(self, values: Tensor) -> int:
        self._kept.append(values.float().contiguous())
        return self._kept[-1].data_ptr()

    def run(self, spans: Seq[Span], layout: Layout, *, logits: bool = True, draws: Draws | None = None) -> PassOutput:
        """Run a pass. logits: compute logits by the whole head; if not, only the hidden rows are computed.

        draws: seeds and temperatures of the spans' sequences, all of which ask for logits: the pass makes their choices
        too.
        """
        self._point_to_rotations(max(span.start + span.width for span in spans))
        kept, sequences = _sequences(spans, self.model)
        choice = None if draws is None else _RowDraws(spans, draws)
        out = self._run(layout, sequences, logits, choice)
        del kept  # alive until here: the sequences point to them
        return out

    @torch.inference_mode()
    def decode_one(self) -> None:
        """Run a pass of one row in the scratch page, for timing."""
        zero, page = torch.zeros(1, dtype=torch.int64), torch.tensor([self.model.pool.count], dtype=torch.int32)
        layout = Layout(zero, zero, zero + self.model.scratch_slot, zero, [slice(0, 1)])
        self._point_to_rotations(1)
        self._run(layout, (Sequence * 1)(Sequence(1, 0, 1, page.data_ptr(), 1, None)), logits=True)

    def _run(
        self, layout: Layout, sequences: c.Array[Sequence], logits: bool, draws: _RowDraws | None = None
    ) -> PassOutput:
        model, config, weights = self.model, self.model.config, self.model.decoder.weights
        wanted, taps = layout.wanted, array("q", model.taps)
        out = PassOutput(
            torch.empty(len(wanted), config.hidden_size),
            torch.empty(len(wanted), config.vocab_size) if logits else None,
            torch.empty(len(layout.ids), model.features_width) if model.returns_taps else None,
            None if draws is None else torch.empty(len(wanted), dtype=torch.int64),
        )
        embedded = None if isinstance(weights.table, BlockTensor) else weights.embed(layout.ids).float()
        arguments = Pass(
            rows=len(layout.ids),
            sequence_count=len(sequences),
            wanted_count=len(wanted),
            tap_count=len(taps),
            threads=torch.get_num_threads(),
            ids=layout.ids.data_ptr(),
            positions=layout.positions.data_ptr(),
            slots=layout.slots.data_ptr(),
            embedded=None if embedded is None else embedded.data_ptr(),
            sequences=sequences,
            wanted=wanted.data_ptr(),
            taps=taps.buffer_info()[0],
            features=None if out.features is None else out.features.data_ptr(),
            kept_tokens=None if model.kept is None else model.kept.tokens.data_ptr(),
            kept_features=None if model.kept is None else model.kept.features.data_ptr(),
            hidden=out.hidden.data_ptr(),
            logits=None if out.logits is None else out.logits.data_ptr(),
            chosen=None if out.choices is None else out.choices.data_ptr(),
            seeds=None if draws is None else draws.seeds,
            temperatures=None if draws is None else draws.temperatures,
        )
        self._struct.head = _blocks(weights.head).struct if logits else Product()
        self.library.call("pass", c.byref(self._struct), c.byref(arguments))
        return out

    def _point_to_rotations(self, length: int) -> None:
        """Point the layers to rotations of at least `length` positions, whose tables may have been made anew."""
        decoder, config = self.model.decoder, self.model.config
        if length <= self._struct.positions:
            return
        decoder.reserve(length)
        self._tables = [decoder.cos_sin(rope) for rope in range(len(config.ropes))]
        self._struct.positions = len(self._tables[0])
        for layer, own in zip(self._layers, config.layers, strict=True):
            layer.cos_sin = self._tables[own.rope].data_ptr()


class _RowDraws:
    """Pointers to the seed and the temperature of each row of logits; None where every choice is the best token."""

    def __init__(self, spans: Seq[Span], draws: Draws) -> None:
        self.seeds: int | None = None
        self.temperatures: int | None = None
        if not any(draws.temperatures):
            return
        seeds, temperatures = array("Q"), array("d")
        for span, seed, temperature in zip(spans, draws.seeds, draws.temperatures, strict=True):
            seeds.extend([seed] * span.rows)
            temperatures.extend([temperature] * span.rows)
        self._kept = seeds, temperatures
        self.seeds, self.temperatures = seeds.buffer_info()[0], temperatures.buffer_info()[0]


def _sequences(spans: Seq[Span], model: PagedModel) -> tuple[list[array[int]], c.Array[Sequence]]:
    """The arrays that the structures point to, and the spans as structures of the kernels."""
    kept: list[array[int]] = []

    def pointer(values: Seq[int]) -> int:
        kept.append(array("i", values))
        return kept[-1].buffer_info()[0]

    made = (Sequence * len(spans))()
    for each, span in zip(made, spans, strict=True):
        table = model.pool.table(span.seq_id)
        each.rows, each.start, each.text = span.width, span.start, span.start + len(span.tokens)
        each.table, each.pages = pointer(table), len(table)
        if not span.draft.is_chain:
            each.parents = pointer(span.draft.parents or ())
    return kept, made
