"""Measure drafters against plain decoding on one machine: cells of prompts and settings, repetitions interleaved.

Each cell (a category of prompts at one temperature, batch, context and thinking mode) is first answered by plain
decoding, without being timed: those texts are what all others must be equal to, and the history of later turns. Then
every row (plain, and each drafter) answers the same token ids, `repeats` times in turn; each repetition begins with the
next row. Every run has cold caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from outrider.bench.answers import answer_all
from outrider.bench.conversations import Conversations, Item
from outrider.bench.energy import EnergyMeter
from outrider.bench.engines import PLAIN, Engines
from outrider.bench.prompts import BenchPrompt
from outrider.bench.record import Line, RunFile
from outrider.core.sampling import SamplingParams

WARM_UP_TOKENS = 16
Tell = Callable[[str, int, int], None]
"""Called with what is measured next, the number of measurements done, and the number of all."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What the rows of one comparison have in common."""

    category: str
    temperature: float = 0.0
    batch: int = 1
    context: int = 0
    """Tokens that prompts are filled up to; 0: as they are."""
    thinking: str = ""
    """on, off, or empty: as the model's chat template does by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The settings that cells are made of, and how each is measured."""

    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    contexts: tuple[int, ...] = (0,)
    thinking: tuple[str, ...] = ("",)
    max_tokens: int = 96
    repeats: int = 5
    seed: int = 0

    def cells(self, prompts: Seq[BenchPrompt]) -> list[Cell]:
        categories = dict.fromkeys(prompt.category for prompt in prompts)
        every = product(self.thinking, self.contexts, self.temperatures, self.batches, categories)
        return [Cell(category, warm, batch, context, mode) for mode, context, warm, batch, category in every]


class OfflineBench:
    """Measures every cell of a run that its file does not hold yet."""

    def __init__(
        self, engines: Engines, prompts: Seq[BenchPrompt], axes: Axes, run: RunFile, meter: EnergyMeter
    ) -> None:
        self.engines, self.prompts, self.axes, self.run, self.meter = engines, prompts, axes, run, meter
        self.conversations = Conversations(engines.loaded.tokenizer)
        for mode in filter(None, axes.thinking):
            self.conversations.check_thinking(mode)

    def expected_seconds(self) -> float:
        """An estimate of what `measure_all` takes; 0 where nothing is left. Each text counts with the mean time of
        those timed so far; the first unfinished cell's reference texts are made and timed now if they are missing."""
        cells = self.axes.cells(self.prompts)
        missing = {cell: sum(self._line(cell, *each) is None for each in self._order()) for cell in cells}
        first = next((cell for cell, count in missing.items() if count), None)
        if first is None:
            return 0.0
        self._items(first)
        timed = [line for line in self.run.lines if "seconds" in line]
        answered = sum(len(line["answers" if line["part"] == "reference" else "texts"]) for line in timed)
        texts = 0.0
        for cell, count in missing.items():
            own = sum(len(prompt.turns) for prompt in self.prompts if prompt.category == cell.category)
            texts += count * (own + WARM_UP_TOKENS / self.axes.max_tokens)
            texts += own if count and self.run.find("reference", cell=asdict(cell)) is None else 0
        return texts * sum(line["seconds"] for line in timed) / max(1, answered)

    def measure_all(self, tell: Tell) -> None:
        """If interrupted, the run's file holds what was measured, and another call continues."""
        cells, rows = self.axes.cells(self.prompts), self.engines.rows
        total, done = len(cells) * self.axes.repeats * len(rows), 0
        for cell in cells:
            missing = [each for each in self._order() if self._line(cell, *each) is None]
            done += self.axes.repeats * len(rows) - len(missing)
            if not missing:
                continue
            tell(f"{cell.category}, {PLAIN} for the texts to compare with", done, total)
            items = self._items(cell)
            for repetition, row in missing:
                tell(f"{cell.category}, {row}, repetition {repetition + 1}", done, total)
                self.run.add(self._measure(cell, repetition, row, items))
                done += 1

    def _order(self) -> Iterator[tuple[int, str]]:
        """(repetition, row): each repetition begins with the next row."""
        rows = self.engines.rows
        for repetition in range(self.axes.repeats):
            first = repetition % len(rows)
            yield from ((repetition, row) for row in (*rows[first:], *rows[:first]))

    def _line(self, cell: Cell, repetition: int, row: str) -> Line | None:
        return self.run.find("measure", cell=asdict(cell), repetition=repetition, row=row)

    def _measure(self, cell: Cell, repetition: int, row: str, items: Seq[Item]) -> Line:
        """One run of one row over a cell's items."""
        engine = self.engines.use(row)
        salt = f"bench {self.run.header['began']} {cell} {row} {repetition}"
        warm = SamplingParams(max_tokens=WARM_UP_TOKENS, temperature=cell.temperature, seed=self.axes.seed)
        answer_all(engine, [items[0].tokens], [warm], batch=1, salt=f"{salt} warm-up")
        before = self.meter.read()
        found = answer_all(
            engine, [i.tokens for i in items], self._params(cell, len(items)), batch=cell.batch, salt=salt
        )
        figures: dict[str, Any] = {
            "joules": self.meter.since(before),
            "read_seconds": self.engines.read_seconds(found.passes, cell.batch),
            "identical": sum(a.digest == item.digest for a, item in zip(found.answers, items, strict=True)),
        }
        place = {"part": "measure", "cell": asdict(cell), "row": row, "repetition": repetition}
        return place | found.as_line() | figures

    def _params(self, cell: Cell, count: int, first: int = 0) -> list[SamplingParams]:
        """The parameters of `count` items; every item has a seed of its own. first: the index of the first item."""
        seeds = range(self.axes.seed + first, self.axes.seed + first + count)
        return [
            SamplingParams(max_tokens=self.axes.max_tokens, temperature=cell.temperature, seed=seed) for seed in seeds
        ]

    def _items(self, cell: Cell) -> list[Item]:
        """The cell's items, with plain decoding's texts: from the run's file, or answered now, turn by turn."""
        prompts = [prompt for prompt in self.prompts if prompt.category == cell.category]
        known = self.run.find("reference", cell=asdict(cell))
        told = [] if known is None else known["answers"]
        items: list[Item] = []
        began = time.perf_counter()
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            wave = [
                self.conversations.item(prompt, turn, items, cell.context, cell.thinking)
                for prompt in prompts
                if turn < len(prompt.turns)
            ]
            if known is None:
                told += self._answer(cell, wave, first=len(items))
            items += [item.answered(*told[len(items) + i]) for i, item in enumerate(wave)]
        if known is None:
            seconds = time.perf_counter() - began
            self.run.add({"part": "reference", "cell": asdict(cell), "answers": told, "seconds": seconds})
        return items

    def _answer(self, cell: Cell, wave: Seq[Item], first: int) -> list[tuple[str, str]]:
        """(text, digest) for each item, by plain decoding. first: the index of the first item."""
        salt = f"reference {self.run.header['began']} {cell}"
        params, engine = self._params(cell, len(wave), first), self.engines.use(PLAIN)
        found = answer_all(engine, [item.tokens for item in wave], params, batch=cell.batch, salt=salt)
        decode = self.engines.loaded.tokenizer.decode
        return [(decode(answer.tokens), answer.digest) for answer in found.answers]
