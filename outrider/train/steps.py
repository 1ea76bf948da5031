"""One step of training: passes over kept rows, then the optimizer. On CUDA both are captured once and replayed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError
from outrider.models.decoder import Decoder
from outrider.train.acceptance import Tally
from outrider.train.config import Sizes, TrainConfig
from outrider.train.distributed import ALONE, Ranks
from outrider.train.optimizer import Muon
from outrider.train.packing import PackedRows
from outrider.train.store import KeptRows
from outrider.train.target import TargetOutputs


class Recipe(Protocol):
    """How one kind of head is trained and judged."""

    positions: int
    """Draft tokens of a chain."""

    @property
    def head(self) -> nn.Module: ...

    def backward(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, share: float) -> dict[str, Tensor]:
        """Add the gradient of `share` times the loss over these rows. Returns the loss and its parts, as scalars.

        draws: float [R, L], 0 to 1, from which everything random is taken. Waits for nothing, so that it can be
        captured.
        """
        ...

    def judge(self, rows: PackedRows, outputs: TargetOutputs, draws: Tensor, tally: Tally) -> None:
        """Add how far chains over these rows would be accepted."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """The head as it is written for drafting."""
        ...


class Steps:
    """Runs steps over one set of kept rows."""

    def __init__(
        self,
        recipe: Recipe,
        kept: KeptRows,
        optimizer: Muon,
        config: TrainConfig,
        sizes: Sizes,
        decoder: Decoder,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._recipe, self._kept, self._optimizer, self._config, self._sizes = recipe, kept, optimizer, config, sizes
        self._decoder, device = decoder, decoder.device
        self._slots = torch.zeros(sizes.pass_rows, dtype=torch.int64, device=device)
        self._draws = torch.zeros(sizes.pass_rows, config.length, device=device)
        self._generator = torch.Generator(device)
        self._figures: dict[str, Tensor] = {}
        self._length = torch.zeros((), device=device)
        self._pass: Callable[[], None] = self._run_pass
        self._update: Callable[[], None] = self._run_update
        self._done = 0

    def run(self, slots: Tensor, seed: int, rate: float) -> dict[str, float]:
        """Run a step. slots: int64 [own passes * pass_rows], places of kept rows, on the CPU. Returns the loss, its
        parts, and the norm of the gradient."""
        with fitting(self._sizes.pass_rows * self._config.length):
            self._capture_when_due()
            self._optimizer.set_rate(rate)
            for each in self._figures.values():
                each.zero_()
            own = self._ranks.passes(self._sizes.passes)
            for i, part in zip(own, slots.split(self._sizes.pass_rows), strict=True):
                self._slots.copy_(part)
                torch.rand(self._draws.shape, generator=self._generator.manual_seed(seed * 1024 + i), out=self._draws)
                self._pass()
            self._ranks.add_up([*self._gradients(), *self._figures.values()])
            self._update()
            self._done += 1
            names, values = [*self._figures, "gradient"], [*self._figures.values(), self._length]
            return dict(zip(names, torch.stack(values).tolist(), strict=True))

    def _run_pass(self) -> None:
        share = self._sizes.pass_rows / self._sizes.step_rows
        rows, outputs = self._kept.take(self._slots)
        with autocast(self._decoder):
            found = self._recipe.backward(rows, outputs, self._draws, share)
        for name, value in found.items():
            self._figures.setdefault(name, torch.zeros_like(value)).add_(value.detach(), alpha=share)

    def _gradients(self) -> list[Tensor]:
        return [each.grad for each in self._recipe.head.parameters() if each.grad is not None]

    def _run_update(self) -> None:
        self._length.copy_(nn.utils.clip_grad_norm_(self._recipe.head.parameters(), self._config.clip))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def _capture_when_due(self) -> None:
        """Capture at the second step: by then the first has made all tensors that last."""
        if self._done != 1 or self._decoder.device.type != "cuda":
            return
        self._pass, self._update = captured(self._run_pass), captured(self._run_update)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """Capture a CUDA graph of `run`, without executing it; returns the function that replays it."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def autocast(decoder: Decoder) -> contextlib.AbstractContextManager[Any]:
    """Products in bf16 over float32 weights, where the target runs in 16 bits; else everything in float32."""
    if decoder.dtype is torch.float32:
        return contextlib.nullcontext()
    # without a cache of cast weights, which would outlive a capture
    return torch.autocast(decoder.device.type, torch.bfloat16, cache_enabled=False)


@contextlib.contextmanager
def fitting(tokens: int) -> Iterator[None]:
    """A context in which running out of memory is reported as a pass of `tokens` that is too large."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a pass of {tokens} tokens does not fit in the device's memory ({error}); lower --pass-tokens or "
            "--length, or take a smaller target"
        ) from error
