"""The memory that a model takes on a device, by purpose. In bytes, computed from its configuration; nothing is loaded.

Weights, caches, tables and buffers are counted as the engine allocates them. What libraries, captured graphs and the
allocator add on CUDA cannot be counted: their figures were measured on an H200 with torch 2.11, see docs/plan.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from outrider.kernels.batch import MAX_SEQUENCES, MAX_WIDTH
from outrider.loading.memory import PAGE_TOKENS, Workload, head_token_bytes
from outrider.models.config import DecoderConfig
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.packed import multiplies_bfloat16
from outrider.models.rope import INITIAL_LENGTH
from outrider.native.tensors import BLOCK, Kind
from outrider.plan.facts import ModelFacts
from outrider.plan.weights import BLOCK_BYTES, FLOAT, Format, decoder_weights
from outrider.runners.cuda_graphs import (
    MAX_ROWS,
    MIN_ROWS,
    PROMPT_SIZES,
    capture_batches,
    capture_shapes,
    packed_shapes,
    prompt_shapes,
)

Role = Literal["target", "draft model", "head"]
DRIVER = 621 << 20
"""Memory that CUDA itself takes on a device, before anything is allocated."""
BLAS_WORKSPACE, BLAS_STREAMS = 32 << 20, 3
"""The workspace that PyTorch gives cuBLAS on Hopper for each stream, and the number of streams that use it: those of
requests, of warm-ups and of captures (`cuda_graphs.capture`), since captured prompts are read by cuBLAS products."""
LIBRARIES = (125 << 20) + BLAS_STREAMS * BLAS_WORKSPACE
"""Memory of libraries, once for a process: the kernels' code, this package's included, as measured; and workspaces."""
GRAPH = 890 << 10
"""Memory of one captured pass."""
PLANNED_GRAPH = 1800 << 10
"""Memory that the engine keeps free for one captured pass: it measures a few of the largest and assumes as much."""
SPLIT_BYTES = 8_600_000
"""Memory for the parts of split products, shared by all passes of a model (`triton_linear.LinearWorkspace`)."""
ROW_SPLITS = 2048
"""The value of `triton_attention.MAX_ROW_SPLITS`."""
PROMPT_SHARE = 1.31
"""Bytes that the allocator takes for a prompt's activations, for each byte that is alive at the same time."""
SAMPLED_BYTES, SAMPLED_BATCH_BYTES = 1100, 20
"""Bytes for each token of the vocabulary that sampling with every option leaves allocated: once, and per sequence."""
VOCABULARY_BYTES = 430
"""On the CPU, bytes for each token of the vocabulary that a tokenizer and its construction leave allocated."""
CPU_SAMPLED_ROWS, CPU_SAMPLED_BYTES = 8, 20
"""On the CPU, the rows sampled at a time, and the bytes that this takes for each row and token of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMemory:
    """The memory of one model, by purpose. Bytes."""

    name: str
    role: Role
    weights: int
    per_token: int
    """Bytes of cache for each token."""
    tables: int = 0
    """RoPE tables and block tables."""
    buffers: int = 0
    """Buffers of captured passes: activations, and logits of all rows. Models do not share them."""
    graphs: int = 0
    """Captured passes themselves."""
    prompt: int = 0
    """Activations of the longest chunk of a prompt, where no captured pass reads it."""
    logits: int = 0
    """Other logits that are alive at the same time, and what sampling allocates for them."""
    kept_free: int = 0
    """On CUDA, memory that the engine leaves free for passes when it sizes the cache, by measuring the largest ones."""

    @property
    def workspace(self) -> int:
        """All memory but weights and cache."""
        return self.tables + self.buffers + self.graphs + self.transient

    @property
    def transient(self) -> int:
        """Memory that a pass uses while it runs; passes run one at a time. On the CPU it is freed after each pass. On
        CUDA the allocator keeps it, so that all models together take that of the one that needs most."""
        return self.prompt + self.logits


def decoder_memory(facts: ModelFacts, role: Role, config: DecoderConfig, form: Format, work: Workload) -> ModelMemory:
    """The memory of a target or a draft model. work: the largest passes it will run."""
    name, weights, per_token = facts.name, decoder_weights(facts, config, form), config.token_bytes(form.dtype)
    rows = min(work.max_round_tokens, work.context - 1)
    prompt, vocab, size = rows * _row_bytes(config, form.dtype.itemsize), config.vocab_size, form.dtype.itemsize
    if form.device == "cpu":
        positions = INITIAL_LENGTH if work.context <= INITIAL_LENGTH else max(work.context, 2 * INITIAL_LENGTH)
        return ModelMemory(
            name=name,
            role=role,
            weights=weights,
            per_token=per_token,
            tables=_rotations(config, positions),
            prompt=prompt,
            logits=vocab * (work.max_rows * FLOAT + min(work.max_rows, CPU_SAMPLED_ROWS) * CPU_SAMPLED_BYTES),
        )
    shapes = [*capture_shapes(work.max_batch, work.max_width), *packed_shapes(work.max_batch, work.max_width)]
    graphs = len(shapes) + len(prompt_shapes(work.max_width)) + len(PROMPT_SIZES)
    held = 2 if work.max_rows <= MAX_ROWS else 3
    tables = _rotations(config, max(work.context + MAX_WIDTH, 2 * INITIAL_LENGTH)) + _block_tables(work.context)
    buffers = buffer_bytes(config, max(MIN_ROWS, *(shape.rows for shape in shapes)), size)
    buffers += PROMPT_SIZES[-1] * (round(captured_row_bytes(config, size) * PROMPT_SHARE) + config.hidden_size * size)
    prompt = round(prompt * PROMPT_SHARE) if rows > PROMPT_SIZES[-1] else 0
    measured = buffers + prompt + graphs * PLANNED_GRAPH + held * work.max_rows * vocab * FLOAT
    return ModelMemory(
        name=name,
        role=role,
        weights=weights,
        per_token=per_token,
        tables=tables,
        buffers=buffers,
        graphs=graphs * GRAPH,
        prompt=prompt,
        logits=vocab * (SAMPLED_BYTES + SAMPLED_BATCH_BYTES * min(work.max_batch, MAX_SEQUENCES)),
        kept_free=LIBRARIES + tables + measured,
    )


def _row_bytes(config: DecoderConfig, size: int) -> int:
    """Bytes of activations alive at once for a row of a pass that is not captured: in the MLP or around attention,
    whichever is more. Some of attention's are float32. size: bytes of a number in the model's dtype."""
    hidden, wide = config.hidden_size, config.intermediate_size
    qkv = (config.heads + 2 * config.kv_heads) * config.head_dim
    return max(4 * wide * size + hidden * size, qkv * (size + 3 * FLOAT + size) + hidden * size)


def captured_row_bytes(config: DecoderConfig, size: int) -> int:
    """As `_row_bytes`, for a row of a captured prompt (`graphed_prompt.GraphedPrompt.run`): in the MLP, while gate and
    up of the layer before are still held, or in attention."""
    hidden, wide, heads = config.hidden_size, config.intermediate_size, config.heads * config.head_dim
    qkv = heads + 2 * config.kv_heads * config.head_dim
    both = max(2 * hidden + heads + 5 * wide, 2 * hidden + qkv + 3 * heads + 3 * wide)
    return both * size + len(config.ropes) * config.head_dim * FLOAT


def _rotations(config: DecoderConfig, positions: int) -> int:
    return len(config.ropes) * positions * config.head_dim * FLOAT


def _block_tables(context: int) -> int:
    return (MAX_SEQUENCES + 1) * (-(-context // PAGE_TOKENS) + 4) * torch.int32.itemsize


def buffer_bytes(config: DecoderConfig, rows: int, size: int) -> int:
    """Bytes of `graphed_forward.ActivationBuffers` for so many rows. size: bytes of a number in the model's dtype."""
    heads, dim = config.heads, config.head_dim
    qkv = (heads + 2 * config.kv_heads) * dim
    row = size * (2 * config.hidden_size + qkv + 2 * heads * dim + 3 * config.intermediate_size)
    row += config.vocab_size * FLOAT + len(config.ropes) * (torch.int64.itemsize + dim * FLOAT)
    return rows * row + ROW_SPLITS * heads * (dim + 2) * FLOAT + SPLIT_BYTES


def _packed_bytes(form: Format) -> float:
    """Bytes of each weight of a head whose target is packed: see heads/packed.py."""
    if form.blocks:
        return BLOCK_BYTES[Kind.INT8] / BLOCK
    return torch.bfloat16.itemsize if multiplies_bfloat16() else torch.int8.itemsize


def head_memory(name: str, head: HeadConfig, numbers: int, form: Format, work: Workload) -> ModelMemory:
    """The memory of a drafting head, whose keys and values lie in the target's pages. numbers: how many its
    tensors have in all."""
    size = form.dtype.itemsize
    packed = form.quantize is not None
    held = _packed_bytes(form) if packed else size
    rows = 0 if head.own_head else head.draft_vocab_size  # rows of the target's output head, which are copied
    weights, per_token = (
        round(numbers * held) + rows * head.hidden_size * (1 if packed else size),
        head_token_bytes(head, size),
    )
    if form.device == "cpu":
        return ModelMemory(name=name, role="head", weights=weights, per_token=per_token)
    tapped = (MIN_ROWS + PROMPT_SIZES[-1]) * max(1, len(head.taps)) * head.target_hidden_size * size
    layers = ROW_SPLITS * head.heads * (head.head_dim + 2) * FLOAT + SPLIT_BYTES + fused_copies(head) * size
    return ModelMemory(
        name=name,
        role="head",
        weights=weights,
        per_token=per_token,
        tables=(work.context + 2 * MAX_WIDTH + 64) * head.head_dim * FLOAT if head.layers else 0,
        buffers=tapped + (layers if head.layers else 0),
        graphs=len(capture_batches(work.max_batch)) * GRAPH,
    )


def fused_copies(head: HeadConfig) -> int:
    """How many numbers the fused kernels' copies of a head's matrices have: see `fused_layers.pack_layer`."""
    keys = 2 * head.kv_heads * head.head_dim
    heads = head.heads * head.head_dim + keys
    if head.kind == "block":
        heads += keys  # those that read the target's outputs
    first = heads * head.hidden_size if head.kind == "eagle3" else 0  # the first layer reads the embedding, too
    return head.layers * (heads + 2 * head.intermediate_size) * head.hidden_size + first
