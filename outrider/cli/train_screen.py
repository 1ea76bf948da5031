"""Terminal output of training: progress, and curves of the loss and of acceptance on held-out answers."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.cli.screen import TELL_SECONDS

if TYPE_CHECKING:
    from outrider.train.config import Sizes
    from outrider.train.state import RunState

BARS = "▁▂▃▄▅▆▇█"
CURVE_CELLS = 60
BAR_CELLS = 30


def curve(values: Seq[float], cells: int = CURVE_CELLS) -> str:
    """Values as a line of bars, each of which shows the mean of an equal part of them."""
    if not values:
        return ""
    count = min(cells, len(values))
    parts = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * count
    return "".join(BARS[min(7, int(8 * (mean - low) / (high - low)))] for mean in means)


def bar(share: float) -> str:
    full = round(BAR_CELLS * min(1.0, max(0.0, share)))
    return "━" * full + "╌" * (BAR_CELLS - full)


def minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class _LiveScreen:
    """Draws in a terminal; elsewhere prints a line from time to time."""

    def __init__(self, console: Console) -> None:
        self._console, self._live, self._told = console, Live(console=console, refresh_per_second=4), 0.0

    def __enter__(self) -> Any:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def _draw(self, picture: RenderableType, line: str, *, now: bool = False) -> None:
        if self._console.is_terminal:
            self._live.update(picture)
        elif now or time.monotonic() - self._told >= TELL_SECONDS:
            self._told = time.monotonic()
            self._console.print(line, highlight=False, soft_wrap=True)


class CollectScreen(_LiveScreen):
    """The progress of a collection."""

    def start(self, total: int, done: int) -> None:
        """Begin. total: all prompts. done: those answered in earlier runs."""
        self._total, self._done, self._before, self._tokens, self._began = total, done, done, 0, time.monotonic()
        self._tell(now=True)

    def add(self, answers: int, tokens: int) -> None:
        self._done += answers
        self._tokens += tokens
        self._tell(now=self._done == self._total)

    def _tell(self, *, now: bool = False) -> None:
        spent = time.monotonic() - self._began
        made = self._done - self._before
        left = f", {minutes((self._total - self._done) * spent / made)} left" if made else ""
        rate = f"{self._tokens / spent:,.0f} tok/s" if made else ""
        line = f"{self._done:,} of {self._total:,} answers, {self._tokens:,} tokens, {rate}{left}"
        self._draw(Text(f"{bar(self._done / max(1, self._total))} {line}"), line, now=now)


class TrainScreen(_LiveScreen):
    """The progress of training: a Watcher of the training loop."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._steps: list[dict[str, Any]] = []
        self._looks: list[dict[str, Any]] = []
        self._total = self._measured = 0

    def begin(self, sizes: Sizes, state: RunState) -> None:
        self._total = sizes.steps
        self._steps = [each for each in state.history if "loss" in each]
        self._looks = [each for each in state.history if "tau" in each]

    def step(self, figures: dict[str, Any]) -> None:
        self._steps.append(figures)
        self._draw(self._picture(), self._line())

    def judged(self, figures: dict[str, Any]) -> None:
        self._looks.append(figures)
        self._draw(self._picture(), self._line(), now=True)

    def measured(self) -> None:
        self._measured += 1
        self._draw(self._picture(), f"speed measured on {self._measured} prompts")

    def _line(self) -> str:
        parts: list[str] = []
        if self._steps:
            last = self._steps[-1]
            parts.append(
                f"step {last['step']} of {self._total}, {minutes(last['seconds'])}, loss {last['loss']:.4f}, "
                f"{last['rate']:,.0f} tok/s"
            )
        if self._looks:
            look = self._looks[-1]
            chances = " ".join(f"{chance:.2f}" for chance in look["greedy"])
            parts.append(
                f"held out: τ {look['tau']:.2f}, at temperature 1 {look['tau_sampled']:.2f}, accepted {chances}"
            )
        return "; ".join(parts)

    def _picture(self) -> RenderableType:
        lines: list[RenderableType] = []
        if self._steps:
            last = self._steps[-1]
            share = last["step"] / max(1, self._total)
            left = last["seconds"] * (1 - share) / max(share, 1e-9)
            lines += [
                Text(
                    f"{bar(share)} step {last['step']:,} of {self._total:,}, {minutes(last['seconds'])}, "
                    f"{minutes(left)} left, {last['rate']:,.0f} tok/s"
                ),
                Text(f"loss {last['loss']:.4f} {curve([each['loss'] for each in self._steps])}"),
            ]
        if self._looks:
            lines += [self._curves(), self._positions()]
        if self._measured:
            lines.append(Text(f"speed measured on {self._measured} prompts"))
        return Group(*lines)

    def _curves(self) -> Text:
        text = Text()
        for name, key in (("τ greedy       ", "tau"), ("τ temperature 1", "tau_sampled")):
            values = [look[key] for look in self._looks]
            text.append(f"{name} {values[-1]:.2f} {curve(values)}\n")
        return text

    def _positions(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("accepted, given those before")
        look = self._looks[-1]
        for k in range(len(look["greedy"])):
            table.add_column(str(k + 1), justify="right")
        for name, key in (("greedy", "greedy"), ("temperature 1", "sampled")):
            table.add_row(name, *(f"{chance:.2f}" for chance in look[key]))
        return table
