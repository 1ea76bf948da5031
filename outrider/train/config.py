"""How a head is trained: what all kinds share."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.core.errors import ConfigError
from outrider.core.sampling import check_int, is_finite

MAX_STEP_TOKENS = 8192  # of one step, if none are given: in a short run, more steps learn more than larger steps
MIN_EPOCH_STEPS = 64  # a small collection gets smaller steps, so that an epoch has this many
MAX_LENGTH = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The optimization of float32 weights. The rate rises over the warm-up, then falls by a cosine."""

    epochs: float = 3.0
    """How often each answer is read."""
    max_minutes: float = 0.0
    """End after this time, with the schedule fitted to it, where the epochs take longer; 0: no limit."""
    length: int = 1024
    """Tokens of a packed row. Longer answers are cut."""
    step_tokens: int = 0
    """Tokens of one step; 0: 8192, or less for a collection so small that an epoch would have fewer than 64 steps."""
    pass_tokens: int = 0
    """Tokens of one pass; a step is as many passes as it takes. 0: 32,768 on CUDA, one row on the CPU."""
    reuse: int = 4
    """Times that an answer is used each time the target reads it, where the outputs for all do not fit the device."""
    adamw: bool = False
    """Everything by AdamW; else matrices by Muon."""
    lr: float = 3e-3
    warmup: float = 0.04
    """Share of the steps."""
    momentum: float = 0.95
    """Muon's."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's."""
    weight_decay: float = 0.0
    clip: float = 1.0
    """Max norm of the gradient."""
    seed: int = 0
    looks: int = 20
    """The number of evaluations on held-out answers in training."""
    eval_tokens: int = 65_536
    """Held-out tokens read each time; all of them at the end."""
    save_seconds: float = 60.0
    """Seconds between two checkpoints."""

    def __post_init__(self) -> None:
        check_int("length", self.length, 8, MAX_LENGTH)
        check_int("step_tokens", self.step_tokens, 0, 1 << 30)
        check_int("pass_tokens", self.pass_tokens, 0, 1 << 30)
        check_int("looks", self.looks, 1, 10_000)
        check_int("reuse", self.reuse, 1, 10_000)
        check_int("eval_tokens", self.eval_tokens, 1, 1 << 40)
        check_int("seed", self.seed, 0, 1 << 31)
        bounds = {
            "epochs": (0.001, 1e6),
            "max_minutes": (0, 1e6),
            "lr": (1e-9, 10),
            "warmup": (0, 1),
            "momentum": (0, 0.9999),
        }
        bounds |= {"weight_decay": (0, 10), "clip": (1e-6, 1e6), "save_seconds": (0, 1e6)}
        for name, (low, high) in bounds.items():
            value = getattr(self, name)
            if not is_finite(value) or not low <= value <= high:
                raise ConfigError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")

    def pass_rows(self, *, cuda: bool) -> int:
        """Packed rows of one pass."""
        return max(1, (self.pass_tokens or (32_768 if cuda else 1)) // self.length)

    def rate(self, done: float) -> float:
        """The learning rate when this share of the training is done."""
        if done < self.warmup:
            return self.lr * done / self.warmup
        rest = (done - self.warmup) / max(1e-9, 1 - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a configuration means for one collection and device: packed rows, passes and steps."""

    rows: int
    """Packed rows of the collection."""
    step_rows: int
    pass_rows: int
    steps: int
    kept_rows: int
    """The number of rows whose target outputs are kept at a time: those of a number of whole steps."""
    reuse: int
    """Times that all kept rows are used before others are read; 0: all rows are kept."""

    @property
    def passes(self) -> int:
        """Passes of a step."""
        return self.step_rows // self.pass_rows

    @classmethod
    def of(cls, config: TrainConfig, rows: int, fitting: int, *, cuda: bool, ranks: int = 1) -> Sizes:
        """fitting: rows whose outputs fit on the devices. ranks: processes that share the passes of a step."""
        tokens = config.step_tokens or min(MAX_STEP_TOKENS, rows * config.length // MIN_EPOCH_STEPS)
        wanted = min(rows, max(1, tokens // config.length))
        passes = -(-wanted // config.pass_rows(cuda=cuda))
        passes += -passes % ranks
        pass_rows = -(-wanted // passes)
        step_rows = passes * pass_rows
        steps = max(1, math.ceil(config.epochs * rows / step_rows))
        whole = -(-rows // step_rows)
        kept = min(whole, max(1, fitting // step_rows))
        return cls(rows, step_rows, pass_rows, steps, kept * step_rows, 0 if kept == whole else config.reuse)
