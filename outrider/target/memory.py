"""How a CUDA device's memory is shared out: weights, what passes need while they run, and the cache."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass

import torch

from outrider.core import Span
from outrider.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.models.families import read_config
from outrider.models.folder import weight_files
from outrider.models.hub import resolve
from outrider.target.native import NativeTarget

SPARE = 256 << 20  # left alone: what the driver and libraries take now and then
LEAST_TOKENS = 64
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Beside:
    """What will be loaded next to the model: a draft model's weights, and its cache by the token. Bytes."""

    weights: int = 0
    a_token: int = 0

    def __add__(self, other: Beside) -> Beside:
        return Beside(self.weights + other.weights, self.a_token + other.a_token)


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


def beside_of(model: str, *, revision: str | None = None) -> Beside:
    """What a draft model will take, from its files. None of its weights is read."""
    folder = resolve(model, revision=revision)
    config = read_config(json.loads((folder / "config.json").read_text()))
    weights = sum(file.stat().st_size for file in weight_files(folder))
    if config is None:  # it runs on Transformers' code, whose cache grows as it is used
        return Beside(weights)
    return Beside(weights, 2 * len(config.layers) * config.kv_heads * config.head_dim * config.dtype.itemsize)


def plan_memory(
    decoder: Decoder, context: int, *, round_tokens: int, wanted: int, asked: int | None, beside: Beside
) -> MemoryPlan:
    """Share out what is left of the decoder's device. wanted: the most tokens of use; asked: so many exactly."""
    config, device = decoder.config, decoder.device
    a_token = 2 * len(config.layers) * config.kv_heads * config.head_dim * decoder.dtype.itemsize
    workspace = measure_workspace(decoder, context, round_tokens)
    free, total = torch.cuda.mem_get_info(device)
    fixed = beside.weights + (workspace if beside.weights else 0)
    room = max(0, free - workspace - fixed - SPARE) // (a_token + beside.a_token)
    tokens = asked or min(wanted, room)
    plan = MemoryPlan(total, total - free, workspace, fixed + tokens * beside.a_token, tokens, a_token)
    if tokens < LEAST_TOKENS or tokens > room:
        raise ConfigError(
            f"{device} has no room for a cache of {max(tokens, LEAST_TOKENS)} tokens, but for {room}. Of {plan}. "
            "Free memory, choose a smaller model, or lower cache_tokens, context or max_batch"
        )
    return plan


def measure_workspace(decoder: Decoder, context: int, round_tokens: int) -> int:
    """Bytes the largest passes take beside weights and cache: a prompt of `round_tokens` read, and a recorded pass."""
    device = decoder.device
    rows = min(round_tokens, context - 1)
    _settle(device)
    free = torch.cuda.mem_get_info(device)[0]
    target = NativeTarget(decoder, rows + 64, context=context)
    target.pool.open(0, range(rows), "")
    target.pool.reserve(0, rows + 1)
    target.score([Span(0, 0, tuple(i % target.vocab_size for i in range(rows)))])
    for _ in target.prepare(1, 2):
        pass
    torch.cuda.synchronize(device)
    cache = sum(t.numel() * t.element_size() for t in (target.keys, target.values))
    took = free - torch.cuda.mem_get_info(device)[0] - cache
    del target
    _settle(device)
    return max(0, took)


def _settle(device: torch.device) -> None:
    """Give back what is no longer used, so that what is free can be counted."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
