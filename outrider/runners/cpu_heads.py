"""Whole drafts of heads in one call of the CPU kernels, for a target whose passes run on them.

The kernels compute what the head's own code does, with sums in another order, over the same keys and values in the same
pages: of one text, each of the two may have written a part.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from outrider.core.sequence import Span
from outrider.models.blocks import BlockLinear
from outrider.models.heads.base import Head
from outrider.models.heads.block import BlockHead
from outrider.models.heads.eagle import Eagle3Head
from outrider.models.heads.layers import HeadLayer, RMSNorm
from outrider.models.heads.packed import PackedLinear
from outrider.native import library as native
from outrider.native.tensors import BlockTensor, Kind, product_struct
from outrider.runners.attention import AttentionLayers
from outrider.runners.cpu_pass import MAX_HEAD_DIM, cpu_pass_of
from outrider.runners.draft_batch import DraftBatch, HeadDraft
from outrider.runners.paged_model import PagedModel, tapped_pages

_FLOATS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}
"""Dtypes of the embedding tables that the kernels read as they are."""


class BlockRows(NamedTuple):
    """A block head's output rows for the K tokens to be drafted, for B sequences."""

    hidden: Tensor  # [B, K, hidden], after the final norm
    logits: Tensor  # float32 [B, K, outputs], without the Markov head's part


class TreeSize(NamedTuple):
    """The size of the trees that are drafted."""

    nodes: int
    width: int
    """Max nodes of one level that get children, and max children of each."""

    def seen(self, levels: int, outputs: int) -> int:
        """The number of nodes considered on all levels, where the head can draft `outputs` different tokens."""
        wide = [1]
        for _ in range(levels):
            wide.append(min(wide[-1] * min(self.width, outputs), self.width, self.nodes))
        return sum(wide[1:])


def cpu_blocks_of(head: BlockHead, model: PagedModel, layers: AttentionLayers) -> CpuBlocks | None:
    """Drafts of this head by the kernels; None where the kernels do not support it."""
    window = head.config.window
    fits = _fits(head, model) and (not window or window > head.config.block_size)
    return CpuBlocks(head, model, layers) if fits else None


def cpu_steps_of(head: Head, model: PagedModel, layers: AttentionLayers) -> CpuSteps | None:
    """As `cpu_blocks_of`, for EAGLE-3 heads."""
    if not isinstance(head, Eagle3Head) or (head.config.norm_before_fc and head.config.fc_norm):
        return None
    return CpuSteps(head, model, layers) if _fits(head, model) else None


def _fits(head: BlockHead | Eagle3Head, model: PagedModel) -> bool:
    config, table = head.config, _table_of(head)
    linears = [each for each in head.modules() if isinstance(each, PackedLinear)]
    layers = cast("list[HeadLayer]", list(head.layers))
    packed = all(isinstance(each.mlp.down_proj, PackedLinear) for each in layers) and all(x.blocks for x in linears)
    return (
        packed
        and cpu_pass_of(model) is not None
        and isinstance(head.fc, PackedLinear)
        and config.activation == "silu"
        and config.head_dim <= MAX_HEAD_DIM
        and _blocks_of(head.output_head()) is not None
        and (isinstance(table, BlockTensor) or table.dtype in _FLOATS)
    )


def _table_of(head: BlockHead | Eagle3Head) -> Tensor | BlockTensor:
    own = head.embed_tokens
    return head.decoder.weights.table if own is None else own.weight.detach()


def _blocks_of(linear: object) -> BlockLinear | None:
    return linear.blocks if isinstance(linear, PackedLinear) else linear if isinstance(linear, BlockLinear) else None


class _CpuHead:
    """A head as structures of the kernels: pointers to its weights and caches, which this object keeps alive."""

    def __init__(self, head: BlockHead | Eagle3Head, model: PagedModel, layers: AttentionLayers) -> None:
        self.model, self.config = model, head.config
        self._kept: list[Any] = []
        """Objects made here that the structures point to."""
        self._rotary = head.rotary
        output = self._blocks(head.output_head())
        self.library = output.parts[0].library
        own = cast("list[HeadLayer]", list(head.layers))
        self._layers = (native.Layer * len(own))(*(self._layer(i, each, layers) for i, each in enumerate(own)))
        config, pool = head.config, model.pool
        decoder = native.Model(
            layer_count=len(own),
            hidden=config.hidden_size,
            wide=config.intermediate_size,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            vocab=config.outputs,
            slots=model.scratch_slot + pool.size,
            page_bits=pool.size.bit_length() - 1,
            skip=layers.skip,
            halves=1,
            eps=config.norm_eps,
            scale=layers.scale,
            embedding_scale=1.0,
            norm=self._vector(head.norm.weight),
            head=output.struct,
            layers=self._layers,
        )
        kept = tapped_pages(model)
        self._struct = native.Head(
            model=decoder,
            embedding=self._table(_table_of(head)),
            fc=self._blocks(head.fc).struct,
            features=kept.features.shape[1],
            kept_tokens=kept.tokens.data_ptr(),
            kept_features=kept.features.data_ptr(),
        )

    def texts_of(self, batch: DraftBatch) -> native.Drafts:
        """The kernels' structure for a batch's inputs, which stay at their addresses."""
        return self._texts(batch.table_ids, batch.lengths, batch.last, batch.firsts, batch.seeds, batch.temperatures)

    def _texts(self, *columns: Tensor) -> native.Drafts:
        """columns: table_ids, lengths, last, firsts, seeds, temperatures: int64 [B], but float64 [B] for the last."""
        tables = self.model.tables
        pointers = [column.data_ptr() for column in columns]
        return native.Drafts(len(columns[0]), 0, 0, *pointers, tables.pages.data_ptr(), tables.width)

    def _span_texts(self, spans: Seq[Span], behind: int) -> tuple[Tensor, native.Drafts]:
        """The inputs for reading these spans, and their structure. behind: further tokens that the kernels expect."""
        ids = self.model.tables.table_ids([span.seq_id for span in spans])
        ends = [span.start + len(span.tokens) + behind for span in spans]
        rows = [ids, ends, [span.tokens[-1] for span in spans], [span.start for span in spans]]
        columns = torch.tensor([*rows, [0] * len(ids), [0] * len(ids)])
        return columns, self._texts(*columns[:-1], columns[-1].view(torch.float64))

    def _call(self, name: str, head: c.Structure, texts: native.Drafts, length: int) -> None:
        """length: positions of the longest text, those written behind it included."""
        self._point_to_rotations(head, length)
        texts.threads = torch.get_num_threads()
        self.library.call(name, c.byref(head), c.byref(texts))

    def _point_to_rotations(self, head: Any, length: int) -> None:
        """Point the layers to rotations of at least `length` positions: cosines and then sines, [positions, dim]."""
        known = head.head.model.positions
        if length <= known:
            return
        turns = self._rotary(torch.arange(max(length, 2 * known, 2048)))
        self._rotations = torch.cat(turns, -1)[:, 0].contiguous()
        head.head.model.positions = len(self._rotations)
        for layer in self._layers:
            layer.cos_sin = self._rotations.data_ptr()

    def _layer(self, i: int, layer: HeadLayer, layers: AttentionLayers) -> native.Layer:
        attention, mlp, (keys, values) = layer.self_attn, layer.mlp, layers.caches[i]
        joined = layer.hidden_norm is not None  # its input is embedding and hidden state side by side, normed before
        return native.Layer(
            attention_norm=None if joined else self._vector(cast(RMSNorm, layer.input_layernorm).weight),
            mlp_norm=self._vector(layer.post_attention_layernorm.weight),
            qkv=self._side_by_side(attention.q_proj, attention.k_proj, attention.v_proj),
            out=self._blocks(attention.o_proj).struct,
            gate_up=self._side_by_side(mlp.gate_proj, mlp.up_proj),
            down=self._blocks(mlp.down_proj).struct,
            q_norm=None if attention.q_norm is None else self._vector(attention.q_norm.weight),
            k_norm=None if attention.k_norm is None else self._vector(attention.k_norm.weight),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            window=layers.windows[i],
            inputs=(1 + joined) * self.config.hidden_size,
        )

    def _blocks(self, linear: object) -> BlockLinear:
        found = _blocks_of(linear)
        if found is None:
            raise TypeError(f"{type(linear).__name__} is no linear layer of the CPU kernels")
        self._kept.append(found)
        return found

    def _side_by_side(self, *linears: nn.Module) -> native.Product:
        own = [self._blocks(linear) for linear in linears]
        biases = [each.bias for each in own if each.bias is not None]
        made = BlockLinear([part for each in own for part in each.parts], torch.cat(biases) if biases else None)
        self._kept.append(made)
        return made.struct

    def _table(self, table: Tensor | BlockTensor) -> native.Table:
        self._kept.append(table)
        if isinstance(table, BlockTensor):
            return native.Table(table.handle, None, table.kind, *table.shape)
        return native.Table(None, table.data_ptr(), _FLOATS[table.dtype], *table.shape)

    def _vector(self, values: Tensor) -> int:
        self._kept.append(values.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _tokens(self, tokens: Tensor | None) -> int | None:
        self._kept.append(tokens)
        return None if tokens is None else tokens.data_ptr()


class CpuBlocks(_CpuHead):
    """Drafts of a block head."""

    def __init__(self, head: BlockHead, model: PagedModel, layers: AttentionLayers) -> None:
        super().__init__(head, model, layers)
        config = head.config
        self._struct.tokens = self._tokens(head.tokens)
        mask = head.mask_embedding
        if mask is None:
            mask = head.embed(torch.zeros(1, dtype=torch.int64))[0, -1]
        self._head = native.BlockHead(
            head=self._struct,
            context_norm=self._vector(head.hidden_norm.weight),
            rows=config.block_size,
            causal=config.causal,
            anchored=config.sample_from_anchor,
            mask=self._vector(mask),
        )
        if head.markov_head is not None:
            self._add_markov(head.markov_head.markov_w1.weight, head.markov_head.markov_w2.weight)
        self._judges = head.confidence_head is not None
        if head.confidence_head is not None:
            proj = head.confidence_head.proj
            self._head.confidence = self._vector(torch.cat([proj.weight[0], proj.bias]))
            self._head.confidence_columns = proj.weight.shape[1]

    def _add_markov(self, before: Tensor, after: Tensor) -> None:
        after = after.detach().float().contiguous()
        short = after.bfloat16()
        exact = torch.equal(short.float(), after)  # as checkpoints store it: half the bytes
        stored = short.view(torch.uint8) if exact else after.view(torch.uint8)
        kind = Kind.BF16 if exact else Kind.F32
        packed = BlockTensor.pack(self.library, kind, stored.numpy(), after.shape[1])
        self._kept.append(packed)
        self._head.before, self._head.rank = self._vector(before), after.shape[1]
        self._head.after = product_struct((packed,), None)

    def read(self, spans: Seq[Span]) -> None:
        """Read the text of these spans, which the target has read."""
        kept, texts = self._span_texts(spans, 1)
        self._call("draft_blocks", self._head, texts, max(span.start + len(span.tokens) for span in spans) + 1)
        del kept  # alive until here

    def chains(self, texts: native.Drafts, length: int, tokens: int) -> HeadDraft:
        """Read what the target has read since, and draft `tokens` tokens. length: of the longest text."""
        chosen = torch.empty(texts.count, tokens, dtype=torch.int64)
        confidence = torch.empty(texts.count, tokens) if self._judges else None
        texts.tokens, texts.chosen, texts.hidden, texts.logits = tokens, chosen.data_ptr(), None, None
        texts.nodes = 0
        texts.confidences = None if confidence is None else confidence.data_ptr()
        self._call("draft_blocks", self._head, texts, length + self.config.block_size)
        return HeadDraft(chosen, confidence=confidence)

    def trees(self, texts: native.Drafts, length: int, levels: int, size: TreeSize) -> HeadDraft:
        """As `chains`, for trees as `draft_tree` of verify/block_sampling.py drafts them, of `levels` levels."""
        nodes = min(size.nodes, size.seen(levels, self.config.outputs))
        tokens, parents = torch.empty(2, texts.count, nodes, dtype=torch.int64)
        texts.tokens, texts.nodes, texts.tree_width = levels, nodes, size.width
        texts.chosen, texts.parents = tokens.data_ptr(), parents.data_ptr()
        texts.hidden = texts.logits = texts.confidences = None
        self._call("draft_blocks", self._head, texts, length + self.config.block_size)
        return HeadDraft(tokens, parents)

    def rows(self, texts: native.Drafts, length: int, tokens: int) -> BlockRows:
        """As `chains`, but returns the rows that tokens are chosen from, without choosing any."""
        made = BlockRows(
            torch.empty(texts.count, tokens, self.config.hidden_size),
            torch.empty(texts.count, tokens, self.config.outputs),
        )
        texts.tokens, texts.hidden, texts.logits = tokens, made.hidden.data_ptr(), made.logits.data_ptr()
        texts.chosen = texts.confidences = None
        texts.nodes = 0
        self._call("draft_blocks", self._head, texts, length + self.config.block_size)
        return made


class CpuSteps(_CpuHead):
    """Drafts chains with an EAGLE-3 head in mode `seeded`; reads text for drafts of any kind."""

    def __init__(self, head: Eagle3Head, model: PagedModel, layers: AttentionLayers) -> None:
        super().__init__(head, model, layers)
        config, first = head.config, cast(HeadLayer, head.layers[0])
        self._struct.tokens = self._tokens(head.tokens())
        norms = [head.input_norm] if head.input_norm is not None else list(head.fc_norm or ())
        self._head = native.StepHead(
            head=self._struct,
            feature_norm=self._vector(torch.cat([cast(RMSNorm, norm).weight for norm in norms])) if norms else None,
            feature_norm_columns=len(cast(RMSNorm, norms[0]).weight) if norms else 0,
            embedding_norm=self._vector(cast(RMSNorm, first.input_layernorm).weight),
            hidden_norm=self._vector(cast(RMSNorm, first.hidden_norm).weight),
            normed_residual=config.norm_before_residual,
            norm_output=config.norm_output,
        )

    def read(self, spans: Seq[Span]) -> None:
        """Read the text of these spans, every token of which is known."""
        kept, texts = self._span_texts(spans, 0)
        self._call("draft_steps", self._head, texts, max(span.start + len(span.tokens) for span in spans) + 1)
        del kept  # alive until here

    def chains(self, texts: native.Drafts, length: int, tokens: int) -> HeadDraft:
        """Read what the target has read since, and draft `tokens` tokens. length: of the longest text."""
        chosen = torch.empty(texts.count, tokens, dtype=torch.int64)
        texts.tokens, texts.chosen = tokens, chosen.data_ptr()
        self._call("draft_steps", self._head, texts, length + tokens)
        return HeadDraft(chosen)
