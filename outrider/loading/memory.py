"""How a CUDA device's memory is divided between weights, the workspace of forward passes, and the KV cache."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.checkpoints.folder import weight_files
from outrider.checkpoints.resolve import resolve
from outrider.core.errors import ConfigError
from outrider.core.sequence import Span
from outrider.models.decoder import Decoder
from outrider.models.heads.checkpoint import parse_head_config, read_head_config
from outrider.models.heads.config import HeadConfig
from outrider.models.heads.mtp import open_mtp
from outrider.models.load import default_dtype, read_config, weight_bytes
from outrider.runners.base import Runner
from outrider.runners.cuda_graphs import PROMPT_SIZES
from outrider.runners.native import NativeRunner

if TYPE_CHECKING:
    from outrider.runners.cuda_graphs import BatchShape
    from outrider.runners.graph_runner import GraphRunner

SPARE_BYTES = 256 << 20  # left free: what the driver and libraries allocate now and then
MAX_OUTSIDE_BYTES = 1 << 30  # what the driver takes at most for kernels and graphs, outside PyTorch's pool
MAX_GRAPH_BYTES = 64 << 20  # the same for one graph
SAMPLED_GRAPHS = 4  # CUDA graphs measured besides the largest; the others are assumed to take as much
MIN_CACHE_TOKENS = 64
PAGE_TOKENS = 16
DEFAULT_TAPS = 3  # layers that an EAGLE-3 head reads where its checkpoint does not say which
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """Memory left free for draft models: their weights, and their caches per token. Bytes."""

    weights: int = 0
    bytes_per_token: int = 0

    def __add__(self, other: ReservedMemory) -> ReservedMemory:
        return ReservedMemory(self.weights + other.weights, self.bytes_per_token + other.bytes_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The largest forward passes a runner will run, which decide its workspace."""

    context: int
    """Max tokens of one sequence."""
    max_round_tokens: int = 2048
    """Max tokens in one round: of prompts, or of decoding sequences and their drafts."""
    max_batch: int = 8
    """Max sequences at once."""
    max_width: int = Runner.max_width
    """Max rows of a decoding sequence: its last token and its draft."""
    pinned: bool = False

    @property
    def max_rows(self) -> int:
        """Max rows whose logits are computed in one round."""
        return min(self.max_batch * self.max_width, max(self.max_round_tokens, self.max_batch))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a device's memory is used. In bytes, except `tokens`."""

    total: int
    in_use: int
    """Taken by the model's weights and whatever else is on the device."""
    workspace: int
    """Measured with the largest forward passes."""
    reserved: int
    """For draft models: weights, workspace and cache."""
    tokens: int
    bytes_per_token: int

    @property
    def cache(self) -> int:
        return self.tokens * self.bytes_per_token

    def __str__(self) -> str:
        parts = {
            "in use": self.in_use, "workspace": self.workspace, "draft model": self.reserved, "cache": self.cache
        }  # fmt: skip
        shares = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        return f"{self.total / GIB:.1f} GiB: {shares}; {self.tokens} tokens of {self.bytes_per_token} bytes"


def reserved_memory_of(model: str, *, vocab: int = 0, module: bool = False) -> ReservedMemory:
    """The memory that a draft model or a drafting head will take, computed from its files; no weight is read.

    vocab: rows of its output head that are copied. module: count its MTP module alone.
    """
    if module:
        files = open_mtp(model)
        return _memory_of_head(parse_head_config(files), files.numbers * torch.bfloat16.itemsize)
    folder = resolve(model)
    head = read_head_config(model)
    if head is not None:
        return _memory_of_head(head, sum(file.stat().st_size for file in weight_files(folder)))
    config = read_config(folder)
    if config is None:  # it runs on Transformers' code, whose cache grows as it is used
        return ReservedMemory(sum(file.stat().st_size for file in weight_files(folder)))
    dtype = default_dtype(config, torch.device("cuda"))
    copied = vocab * config.hidden_size * dtype.itemsize if vocab < config.vocab_size else 0
    return ReservedMemory(weight_bytes(config, dtype) + copied, config.token_bytes(dtype))


def _memory_of_head(head: HeadConfig, weights: int) -> ReservedMemory:
    copied = 0 if head.own_head else head.draft_vocab_size * head.hidden_size
    size = torch.bfloat16.itemsize
    return ReservedMemory(weights + copied * size, head_token_bytes(head, size))


def head_token_bytes(head: HeadConfig, size: int) -> int:
    """Bytes that a head adds to the target's pages for each token: its keys and values, the target's tapped outputs,
    and the token id. size: bytes of each number of the former two."""
    taps = (len(head.taps) or (DEFAULT_TAPS if head.kind == "eagle3" else 1)) * head.target_hidden_size
    return size * (2 * head.layers * head.kv_heads * head.head_dim + taps) + torch.int64.itemsize


def plan_memory(
    decoder: Decoder, work: Workload, *, max_tokens: int, exact_tokens: int | None, reserved: ReservedMemory
) -> MemoryPlan:
    """Size the KV cache by what is free on the decoder's device: at most max_tokens, or exact_tokens where given.

    Raises ConfigError with the numbers where there is too little.
    """
    device, bytes_per_token = decoder.device, decoder.config.token_bytes(decoder.dtype)
    workspace = _checked_workspace(decoder, work)
    free, total = torch.cuda.mem_get_info(device)
    fixed = reserved.weights + (workspace if reserved.weights else 0)
    room = max(0, free - workspace - fixed - SPARE_BYTES) // (bytes_per_token + reserved.bytes_per_token)
    tokens = min(max_tokens, room) if exact_tokens is None else exact_tokens
    for_drafts = fixed + tokens * reserved.bytes_per_token
    plan = MemoryPlan(total, total - free, workspace, for_drafts, tokens, bytes_per_token)
    if tokens < MIN_CACHE_TOKENS or tokens > room:
        raise ConfigError(
            f"{device} has no room for a cache of {max(tokens, MIN_CACHE_TOKENS)} tokens, but for {room}. Of {plan}. "
            "Free memory, choose a smaller model, or lower cache_tokens, context or max_batch"
        )
    return plan


def _checked_workspace(decoder: Decoder, work: Workload) -> int:
    """As `measure_workspace`; raises ConfigError where there is too little memory even to measure."""
    device = decoder.device
    free, total = torch.cuda.mem_get_info(device)
    try:
        return measure_workspace(decoder, work)
    except torch.OutOfMemoryError:
        pass  # raised below, where no traceback keeps the allocated tensors alive
    _release_cached_memory(device)
    rows, logits = work.max_rows, work.max_rows * decoder.config.vocab_size * 4
    raise ConfigError(
        f"{device} has no room for rounds of {rows} rows: of {total / GIB:.1f} GiB {free / GIB:.2f} are left, and "
        f"the rows' logits alone take {logits / GIB:.2f} several times over. Free memory, choose a "
        "smaller model, or lower max_batch, max_round_tokens or the drafter's k"
    )


def measure_workspace(decoder: Decoder, work: Workload) -> int:
    """Bytes that passes take besides weights and cache: the longest prompt chunk, and every graph to be captured."""
    device = decoder.device
    rows = min(work.max_round_tokens, work.context - 1)
    _release_cached_memory(device)
    before = _used(device)
    runner = NativeRunner(decoder, rows + 64, context=work.context, pinned=work.pinned)
    unmeasured = 0 if runner.graphs is None else _capture_graphs(runner.graphs, work)
    # after the capture, which releases all unused memory: logits are held while a prompt is read
    held = [] if runner.graphs is None else _held_logits(runner.graphs, work)
    runner.pool.open(0, range(rows), "")
    runner.pool.reserve(0, rows + 1)
    runner.score([Span(0, 0, tuple(i % runner.vocab_size for i in range(rows)))])
    cache = sum(t.numel() * t.element_size() for t in runner.model.groups[0])
    taken = _taken_since(before, device, MAX_OUTSIDE_BYTES) - cache + unmeasured
    del runner, held
    _release_cached_memory(device)
    return max(0, taken)


def _capture_graphs(graphs: GraphRunner, work: Workload) -> int:
    """Capture the largest graph and a few more. Returns the estimated bytes of those that are not captured."""
    device = graphs.model.device
    *rest, largest = _shapes_by_rows(graphs, work)
    graphs.make_room([largest])
    graphs.captured_pass(largest)
    prompts = () if graphs.pinned else PROMPT_SIZES
    if prompts:
        next(graphs.prompts.capture(prompts[-1:]))
    before, some = _used(device), rest[-SAMPLED_GRAPHS:]
    for shape in some:
        graphs.captured_pass(shape)
    each = _taken_since(before, device, MAX_GRAPH_BYTES * len(some)) // max(1, len(some))
    return each * (len(rest) - len(some) + max(0, len(prompts) - 1))


def _held_logits(graphs: GraphRunner, work: Workload) -> list[Tensor]:
    """As much memory as the logits alive at once take: of a round being committed and of the next; where a round takes
    several passes, of their parts too."""
    copies = 2 if work.max_rows <= _shapes_by_rows(graphs, work)[-1].rows else 3
    shape = work.max_rows, graphs.model.config.vocab_size
    return [torch.empty(shape, dtype=torch.float32, device=graphs.model.device) for _ in range(copies)]


def _shapes_by_rows(graphs: GraphRunner, work: Workload) -> list[BatchShape]:
    """Every batch shape that will be captured, the one of most rows last."""
    shapes = [*graphs.shapes(work.max_batch, work.max_width), *graphs.prompt_shapes(work.max_width)]
    return sorted(shapes, key=lambda shape: shape.rows)


def _used(device: torch.device) -> tuple[int, int]:
    """(bytes free on the device, bytes in the pool of this process)"""
    return _free_bytes(device), torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _taken_since(before: tuple[int, int], device: torch.device, outside: int) -> int:
    """Bytes that this process took since `before`. Other processes also change the free memory: outside this process's
    pool, at most `outside` bytes are counted."""
    free, pool = before
    free_now, pool_now = _used(device)
    return max(0, min(free - free_now, pool_now - pool + outside), pool_now - pool)


def _free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def _release_cached_memory(device: torch.device) -> None:
    """Return unused memory to the device, so that its free memory can be measured."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
