"""The training loop: steps, evaluations on held-out answers, checkpoints. What is trained is up to a `Recipe`."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.errors import ConfigError, OutriderError
from outrider.loading.load import available_memory
from outrider.train.acceptance import Tally
from outrider.train.config import Sizes, TrainConfig
from outrider.train.corpus import Corpus
from outrider.train.distributed import ALONE, Ranks
from outrider.train.optimizer import Muon
from outrider.train.packing import PackedRows, pack
from outrider.train.state import RunState, load_state, save_state
from outrider.train.steps import Recipe, Steps, autocast, fitting
from outrider.train.store import KeptRows, rows_that_fit
from outrider.train.target import TrainingTarget

NOTED_STEPS = 1000  # the first steps of a run are all noted; then one in ten, up to ten times as many steps, and so on


class Watcher(Protocol):
    """Is told how training proceeds. The methods of this class do nothing."""

    def begin(self, sizes: Sizes, state: RunState) -> None:
        """Training begins, or continues from `state`."""

    def step(self, figures: dict[str, Any]) -> None:
        """A step is done: its number, loss and parts, rate, seconds, tokens a second."""

    def judged(self, figures: dict[str, Any]) -> None:
        """Held-out answers were evaluated: the number of the step, and the acceptance."""

    def measured(self) -> None:
        """The speed on one more held-out prompt was measured."""


class Silent(Watcher):
    """Shows nothing."""


@dataclass(slots=True)
class Trainer:
    """Trains one head on one collection; continues the run that lies in `folder`."""

    recipe: Recipe
    target: TrainingTarget
    corpus: Corpus
    config: TrainConfig
    folder: Path
    settings: dict[str, Any]
    """All options that decide the result: a later run continues this one only with the same."""
    watcher: Watcher = field(default_factory=Silent)
    ranks: Ranks = ALONE

    def run(self) -> RunState:
        """Train to the end. If an exception is raised, the last checkpoint stays."""
        config, device = self.config, self.target.decoder.device
        train, held = self.corpus.split()
        if not len(train) or not len(held):
            raise ConfigError(f"{len(self.corpus)} answers are too few: give at least 2, better thousands")
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(config.seed)).numpy()
        packed = pack(self.corpus, train[order], config.length)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        count = self.ranks.count
        fitting_rows = count * int(self.ranks.agreed(rows_that_fit(self.target, config.length, free), device))
        sizes = Sizes.of(config, len(packed), fitting_rows, cuda=device.type == "cuda", ranks=count)
        optimizer = Muon(
            self.recipe.head, betas=config.betas, momentum=config.momentum, weight_decay=config.weight_decay,
            matrices=not config.adamw,
        )  # fmt: skip
        state = load_state(self.folder, self.settings, self.recipe.head, optimizer)
        state = state or RunState(settings=self.settings)
        self.watcher.begin(sizes, state)
        held_rows = pack(self.corpus, held, config.length)
        some = held_rows.rows(0, max(1, config.eval_tokens // config.length))
        if not state.history:
            self._look(some, state)
        feed = Feed(KeptRows(self.target, packed, sizes.kept_rows // count), sizes, config.seed, self.ranks)
        steps = Steps(self.recipe, feed.kept, optimizer, config, sizes, self.target.decoder, self.ranks)
        self._loop(feed, steps, optimizer, state, (some, held_rows))
        return state

    def _loop(
        self, feed: Feed, steps: Steps, optimizer: Muon, state: RunState, held: tuple[PackedRows, PackedRows]
    ) -> None:
        config, sizes = self.config, feed.sizes
        saved, began = time.monotonic(), time.monotonic() - state.seconds
        looks = int(self._share(state, sizes) * config.looks)
        while not self._done(state, sizes):
            slots, before = feed.slots(state.step), time.monotonic()
            rate = config.rate(max((state.step + 1) / (sizes.steps + 1), self._share(state, sizes)))
            figures = self._checked(steps.run(slots, config.seed * 1_000_003 + state.step, rate), state.step)
            state.step += 1
            state.seconds = self.ranks.agreed(time.monotonic() - began, self.target.decoder.device)
            took = max(1e-9, time.monotonic() - before)
            tokens = sizes.step_rows * config.length
            figures |= {"lr": rate, "rate": tokens / took, "step": state.step, "seconds": state.seconds}
            done = self._done(state, sizes)
            if state.step % steps_per_entry(state.step) == 0 or done:
                state.history.append(figures)
                self.watcher.step(figures)
            share = int(self._share(state, sizes) * config.looks)
            if share > looks or done:
                looks = share
                self._look(held[done], state)
            if time.monotonic() - saved >= config.save_seconds or done:
                if self.ranks.first:
                    save_state(self.folder, state, self.recipe.head, optimizer)
                saved = time.monotonic()

    def judge(self, rows: PackedRows) -> Tally:
        """The acceptance on these rows."""
        device = self.target.decoder.device
        pass_rows = self.config.pass_rows(cuda=device.type == "cuda")
        tally = Tally(self.recipe.positions, len(self.corpus.index.kinds), device)
        for begin in range(0, len(rows), pass_rows):
            part = rows.rows(begin, begin + pass_rows).to(device)
            draws = torch.rand(part.tokens.shape, generator=torch.Generator(device).manual_seed(begin), device=device)
            with fitting(part.tokens.numel()), torch.no_grad():
                outputs = self.target.read(part)
                with autocast(self.target.decoder):
                    self.recipe.judge(part, outputs, draws, tally)
        return tally

    def held_out(self) -> PackedRows:
        return pack(self.corpus, self.corpus.split()[1], self.config.length)

    def _done(self, state: RunState, sizes: Sizes) -> bool:
        return self._share(state, sizes) >= 1

    def _share(self, state: RunState, sizes: Sizes) -> float:
        """How much of the training is done, by steps or by time, whichever ends first."""
        limit = self.config.max_minutes * 60
        return max(state.step / sizes.steps, state.seconds / limit if limit else 0.0)

    def _checked(self, figures: dict[str, float], step: int) -> dict[str, Any]:
        if math.isfinite(figures["loss"]) and math.isfinite(figures["gradient"]):
            return dict(figures)
        raise OutriderError(
            f"the loss is no number at step {step + 1}; the last checkpoint is intact: begin again with "
            f"--lr {self.config.lr / 3:.1g}"
        )

    def _look(self, rows: PackedRows, state: RunState) -> None:
        if not self.ranks.first:
            return
        figures = {"step": state.step, "seconds": state.seconds} | self.judge(rows).overall().as_json()
        state.history.append(figures)
        self.watcher.judged(figures)


def steps_per_entry(step: int) -> int:
    """How many steps of a long run share one entry of its history."""
    return 10 ** max(0, math.ceil(math.log10(step / NOTED_STEPS))) if step > NOTED_STEPS else 1


class Feed:
    """Which rows each step takes. Where not all fit on the device, parts of them are read in turn and used
    several times each.

    Kept rows lie in as many lanes as a step has rows: it takes one of each. So a process reads those of its own passes
    alone, and what a step takes depends neither on how it is divided into passes nor on the number of processes.
    """

    def __init__(self, kept: KeptRows, sizes: Sizes, seed: int, ranks: Ranks = ALONE) -> None:
        self.kept, self.sizes, self._seed = kept, sizes, seed
        rows = sizes.pass_rows
        self._lanes = [i * rows + j for i in ranks.passes(sizes.passes) for j in range(rows)]
        self._part = -1
        self._orders: dict[str, tuple[int, Tensor]] = {}

    def slots(self, step: int) -> Tensor:
        """The places of the kept rows that a step takes, int64 [own passes * pass_rows]. Reads other rows first where
        they are due."""
        sizes, count = self.sizes, self.sizes.step_rows
        depth = sizes.kept_rows // count
        part, at = divmod(step, depth * sizes.reuse) if sizes.reuse else (0, step)
        if part != self._part:
            begin = part * sizes.kept_rows
            rows = [self._row(begin + i) for lane in self._lanes for i in range(lane, sizes.kept_rows, count)]
            self.kept.load(torch.tensor(rows))
            self._part = part
        use, turn = divmod(at, depth)
        order = self._order("lanes", part * 1_000_003 + use, count, depth)
        return torch.arange(len(self._lanes)) * depth + order[self._lanes, turn]

    def _row(self, at: int) -> int:
        """Row number `at` of an endless series: all rows in turn, each turn in an order of its own."""
        turn, i = divmod(at, self.sizes.rows)
        return int(self._order("rows", turn, 1, self.sizes.rows)[0, i])

    def _order(self, kind: str, number: int, lanes: int, count: int) -> Tensor:
        """int64 [lanes, count]: a random order of `count` things for each lane. The last one of each kind is cached."""
        known = self._orders.get(kind)
        if known is None or known[0] != number:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
            known = self._orders[kind] = number, torch.rand(lanes, count, generator=generator).argsort(1)
        return known[1]
