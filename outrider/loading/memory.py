"""How a CUDA device's memory is shared out: weights, what passes need while they run, and the cache."""

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
from outrider.models.load import read_config
from outrider.runners.device_state import MAX_WIDTH
from outrider.runners.native import NativeRunner

if TYPE_CHECKING:
    from outrider.runners.graph_runner import GraphRunner
    from outrider.runners.graphed_forward import BatchShape

SPARE = 256 << 20  # left alone: what the driver and libraries take now and then
SAMPLES = 4  # recorded passes measured beside the largest; the rest are taken to be like them
MIN_TOKENS = 64
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ReservedMemory:
    """What will be loaded next to the model: a draft model's weights, and its cache by the token. Bytes."""

    weights: int = 0
    a_token: int = 0

    def __add__(self, other: ReservedMemory) -> ReservedMemory:
        return ReservedMemory(self.weights + other.weights, self.a_token + other.a_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What passes will be asked for, which decides what they take."""

    round_tokens: int = 2048
    """Most tokens in one round: prompts being read, or texts that go on and their drafts."""
    batch: int = 8
    """Most texts at once."""
    width: int = MAX_WIDTH
    """Most rows of a text that goes on: its last token and its draft."""
    pinned: bool = False

    @property
    def rows(self) -> int:
        """Most rows whose logits are asked for in one round."""
        return min(self.batch * self.width, max(self.round_tokens, self.batch))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a device's memory is used for. Bytes, but for `tokens`."""

    total: int
    taken: int
    """By the model's weights and whatever else is on the device."""
    workspace: int
    """Measured: what the largest passes took."""
    beside: int
    """Of a draft model: weights, workspace and cache."""
    tokens: int
    a_token: int

    @property
    def cache(self) -> int:
        return self.tokens * self.a_token

    def __str__(self) -> str:
        parts = {
            "in use": self.taken, "workspace": self.workspace, "draft model": self.beside, "cache": self.cache
        }  # fmt: skip
        shares = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        return f"{self.total / GIB:.1f} GiB: {shares}; {self.tokens} tokens of {self.a_token} bytes"


def reserved_memory_of(model: str, *, vocab: int = 0) -> ReservedMemory:
    """What a draft model will take, from its files. None of its weights is read. vocab: rows copied of its head."""
    folder = resolve(model)
    config = read_config(folder)
    weights = sum(file.stat().st_size for file in weight_files(folder))
    if config is None:  # it runs on Transformers' code, whose cache grows as it is used
        return ReservedMemory(weights)
    copied = vocab * config.hidden_size * config.dtype.itemsize if vocab < config.vocab_size else 0
    return ReservedMemory(weights + copied, config.token_bytes(config.dtype))


def plan_memory(
    decoder: Decoder, context: int, work: Workload, *, wanted: int, asked: int | None, beside: ReservedMemory
) -> MemoryPlan:
    """Share out what is left of the decoder's device. wanted: the most tokens of use; asked: so many exactly."""
    device, a_token = decoder.device, decoder.config.token_bytes(decoder.dtype)
    workspace = _affordable_workspace(decoder, context, work)
    free, total = torch.cuda.mem_get_info(device)
    fixed = beside.weights + (workspace if beside.weights else 0)
    room = max(0, free - workspace - fixed - SPARE) // (a_token + beside.a_token)
    tokens = min(wanted, room) if asked is None else asked
    plan = MemoryPlan(total, total - free, workspace, fixed + tokens * beside.a_token, tokens, a_token)
    if tokens < MIN_TOKENS or tokens > room:
        raise ConfigError(
            f"{device} has no room for a cache of {max(tokens, MIN_TOKENS)} tokens, but for {room}. Of {plan}. "
            "Free memory, choose a smaller model, or lower cache_tokens, context or max_batch"
        )
    return plan


def _affordable_workspace(decoder: Decoder, context: int, work: Workload) -> int:
    """As `measure_workspace`; ConfigError where there is too little memory even for that."""
    device = decoder.device
    free, total = torch.cuda.mem_get_info(device)
    try:
        return measure_workspace(decoder, context, work)
    except torch.OutOfMemoryError:
        pass  # told outside, where nothing holds on to what was allocated
    _settle(device)
    logits = work.rows * decoder.config.vocab_size * 4
    raise ConfigError(
        f"{device} has no room for rounds of {work.rows} rows: of {total / GIB:.1f} GiB {free / GIB:.2f} are left, and "
        f"the rows' logits alone take {logits / GIB:.2f} several times over. Free memory, choose a "
        "smaller model, or lower max_batch, max_round_tokens or the drafter's k"
    )


def measure_workspace(decoder: Decoder, context: int, work: Workload) -> int:
    """Bytes passes take beside weights and cache: the longest prompt read, and every size that will be recorded."""
    device = decoder.device
    rows = min(work.round_tokens, context - 1)
    _settle(device)
    free = _free(device)
    target = NativeRunner(decoder, rows + 64, context=context, pinned=work.pinned)
    unseen = 0 if target.captured is None else _record(target.captured, work)
    # behind the recording, which hands back all that nobody holds: logits are held while a prompt is read
    held = [] if target.captured is None else _logits(target.captured, work)
    target.pool.open(0, range(rows), "")
    target.pool.reserve(0, rows + 1)
    target.score([Span(0, 0, tuple(i % target.vocab_size for i in range(rows)))])
    cache = sum(t.numel() * t.element_size() for t in (target.keys, target.values))
    took = free - _free(device) - cache + unseen
    del target, held
    _settle(device)
    return max(0, took)


def _record(captured: GraphRunner, work: Workload) -> int:
    """Take what recorded passes take: the largest, and a few more. Returns the bytes that the others will take."""
    device = captured.decoder.device
    *rest, largest = _by_rows(captured, work)
    captured.make_room([largest])
    captured.pass_of(largest)
    before, some = _free(device), rest[-SAMPLES:]
    for shape in some:
        captured.pass_of(shape)
    each = max(0, before - _free(device)) // max(1, len(some))
    return each * (len(rest) - len(some))


def _logits(captured: GraphRunner, work: Workload) -> list[Tensor]:
    """What rounds hold on to: one is told while the next is on its way. A round of several passes has parts beside."""
    copies = 2 if work.rows <= _by_rows(captured, work)[-1].rows else 3
    shape = work.rows, captured.config.vocab_size
    return [torch.empty(shape, dtype=torch.float32, device=captured.decoder.device) for _ in range(copies)]


def _by_rows(captured: GraphRunner, work: Workload) -> list[BatchShape]:
    """Every size that will be recorded, the largest last."""
    return sorted(captured.capture_shapes(work.batch, work.width), key=lambda shape: shape.rows)


def _free(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def _settle(device: torch.device) -> None:
    """Give back what is no longer used, so that what is free can be counted."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
