"""The training loop: steps, looks at held-out answers, checkpoints. What is trained is a `Recipe`'s business."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.core.errors import ConfigError, OutriderError
from outrider.models.decoder import Decoder
from outrider.train.acceptance import Tally
from outrider.train.config import Sizes, TrainConfig
from outrider.train.corpus import Corpus
from outrider.train.packing import PackedRows, pack
from outrider.train.state import RunState, load_state, save_state
from outrider.train.target import TargetOutputs, TrainingTarget

BETAS = (0.9, 0.95)


class Recipe(Protocol):
    """How one kind of head is trained and judged."""

    positions: int
    """Draft tokens of a chain."""

    @property
    def head(self) -> nn.Module: ...

    def backward(
        self, rows: PackedRows, outputs: TargetOutputs, generator: torch.Generator, share: float
    ) -> dict[str, Tensor]:
        """Add the gradient of `share` times the loss over these rows. Returns the loss and its parts, as scalars."""
        ...

    def judge(self, rows: PackedRows, outputs: TargetOutputs, generator: torch.Generator, tally: Tally) -> None:
        """Add how far chains over these rows would be accepted."""
        ...


class Watcher(Protocol):
    """Is told how training goes. The methods of this class do nothing."""

    def begin(self, sizes: Sizes, state: RunState) -> None:
        """Training begins, or continues from `state`."""

    def step(self, told: dict[str, Any]) -> None:
        """A step is done: its number, loss and parts, rate, seconds, tokens a second."""

    def judged(self, told: dict[str, Any]) -> None:
        """Held-out answers were looked at: the number of the step, and the acceptance."""

    def measured(self) -> None:
        """The speed on one more held-out prompt was measured."""


class Silent(Watcher):
    """Tells nobody."""


@dataclass(slots=True)
class Trainer:
    """Trains one head on one collection; continues the run that lies in `folder`."""

    recipe: Recipe
    target: TrainingTarget
    corpus: Corpus
    config: TrainConfig
    folder: Path
    settings: dict[str, Any]
    """All that decides the run, for a later one that continues it."""
    watcher: Watcher = field(default_factory=Silent)
    _epoch: int = -1
    _epoch_order: list[int] = field(default_factory=list[int])

    def run(self) -> RunState:
        """Train to the end. Whatever is raised on the way, the last checkpoint stays."""
        config, device = self.config, self.target.decoder.device
        train, held = self.corpus.split()
        if not len(train) or not len(held):
            raise ConfigError(f"{len(self.corpus)} answers are too few: give at least 2, better thousands")
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed)).numpy()
        packed = pack(self.corpus, train[order], config.length)
        held_rows = pack(self.corpus, held, config.length)
        sizes = Sizes.of(config, len(packed), cuda=device.type == "cuda")
        optimizer = torch.optim.AdamW(
            [each for each in self.recipe.head.parameters() if each.requires_grad],
            lr=config.lr, betas=BETAS, weight_decay=config.weight_decay, fused=device.type == "cuda",
        )  # fmt: skip
        state = load_state(self.folder, self.settings, self.recipe.head, optimizer)
        state = state or RunState(settings=self.settings)
        self.watcher.begin(sizes, state)
        if not state.history:
            self._look(held_rows, state, sizes)
        saved, began = time.monotonic(), time.monotonic() - state.seconds
        while not self._done(state, sizes):
            rows = self._rows_of(packed, sizes, state.step)
            told = self._step(rows, optimizer, state, sizes)
            state.step, state.seconds = state.step + 1, time.monotonic() - began
            told |= {"step": state.step, "seconds": state.seconds}
            state.history.append(told)
            self.watcher.step(told)
            if state.step % config.eval_every == 0 or self._done(state, sizes):
                self._look(held_rows, state, sizes)
            if time.monotonic() - saved >= config.save_seconds or self._done(state, sizes):
                save_state(self.folder, state, self.recipe.head, optimizer)
                saved = time.monotonic()
        return state

    def judge(self, rows: PackedRows) -> Tally:
        """The acceptance on these rows."""
        device = self.target.decoder.device
        pass_rows = self.config.pass_rows(cuda=device.type == "cuda")
        tally = Tally(self.recipe.positions, len(self.corpus.index.kinds), device)
        for begin in range(0, len(rows), pass_rows):
            part = rows.rows(begin, begin + pass_rows).to(device)
            generator = torch.Generator(device).manual_seed(begin)
            with fitting(part.tokens.numel()), torch.no_grad():
                outputs = self.target.read(part)
                with autocast(self.target.decoder):
                    self.recipe.judge(part, outputs, generator, tally)
        return tally

    def held_out(self) -> PackedRows:
        return pack(self.corpus, self.corpus.split()[1], self.config.length)

    def _done(self, state: RunState, sizes: Sizes) -> bool:
        return self._share(state, sizes) >= 1

    def _share(self, state: RunState, sizes: Sizes) -> float:
        """How much of the training is done, by steps or by time, whichever ends first."""
        limit = self.config.max_minutes * 60
        return max(state.step / sizes.steps, state.seconds / limit if limit else 0.0)

    def _rows_of(self, packed: PackedRows, sizes: Sizes, step: int) -> PackedRows:
        """The rows of a step: every epoch takes all of them in an order of its own."""
        begin = step * sizes.step_rows
        chosen = [self._row(sizes.rows, begin + i) for i in range(sizes.step_rows)]
        return packed.take(torch.tensor(chosen))

    def _row(self, rows: int, at: int) -> int:
        epoch, i = divmod(at, rows)
        if self._epoch != epoch:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
            self._epoch, self._epoch_order = epoch, torch.randperm(rows, generator=generator).tolist()
        return self._epoch_order[i]

    def _step(
        self, rows: PackedRows, optimizer: torch.optim.Optimizer, state: RunState, sizes: Sizes
    ) -> dict[str, Any]:
        config, device, began = self.config, self.target.decoder.device, time.monotonic()
        rate = config.rate(max((state.step + 1) / (sizes.steps + 1), self._share(state, sizes)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        sums: dict[str, Tensor] = {}
        for begin in range(0, len(rows), sizes.pass_rows):
            part = rows.rows(begin, begin + sizes.pass_rows).to(device)
            share = len(part) / len(rows)
            generator = torch.Generator(device).manual_seed(config.seed * 1_000_003 + state.step * 1024 + begin)
            with fitting(part.tokens.numel()):
                outputs = self.target.read(part)
                with autocast(self.target.decoder):
                    found = self.recipe.backward(part, outputs, generator, share)
            sums = {name: sums.get(name, 0.0) + share * value.detach() for name, value in found.items()}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        length = nn.utils.clip_grad_norm_(parameters, config.clip)
        told: dict[str, Any] = {name: float(value) for name, value in sums.items()}
        if not (math.isfinite(told["loss"]) and math.isfinite(float(length))):
            raise OutriderError(
                f"the loss is no number at step {state.step + 1}; the last checkpoint is intact: begin again with "
                f"--lr {config.lr / 3:.1g}"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        took = max(1e-9, time.monotonic() - began)
        return told | {"lr": rate, "gradient": float(length), "rate": rows.tokens.numel() / took}

    def _look(self, held: PackedRows, state: RunState, sizes: Sizes) -> None:
        rows = max(1, self.config.eval_tokens // self.config.length)
        part = held if self._done(state, sizes) else held.rows(0, rows)
        found = self.judge(part).overall()
        told = {"step": state.step, "seconds": state.seconds} | found.as_json()
        state.history.append(told)
        self.watcher.judged(told)


def autocast(decoder: Decoder) -> contextlib.AbstractContextManager[Any]:
    """Products in bf16 over float32 weights, where the target runs in 16 bits; else everything in float32."""
    if decoder.dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(decoder.device.type, torch.bfloat16)


@contextlib.contextmanager
def fitting(tokens: int) -> Iterator[None]:
    """Within, memory that runs out is told as a pass of `tokens` that is too large."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a pass of {tokens} tokens does not fit in the device's memory ({error}); lower --pass-tokens or "
            "--length, or take a smaller target"
        ) from error
