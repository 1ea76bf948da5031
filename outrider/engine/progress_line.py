"""The progress of a batch as one line of a terminal, rewritten in place."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from outrider.engine.events import Event

BAR_CELLS = 24
REDRAW_SECONDS = 0.1


class ProgressLine:
    """Counts the finished sequences and the tokens of a batch, and draws them on stderr."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self.total, self.out = total, out or sys.stderr
        self.finished = self.tokens = self._width = 0
        self.began = time.perf_counter()
        self._drawn = 0.0

    def add(self, event: Event) -> None:
        """Count an event of one of the sequences."""
        self.finished += event.finish is not None
        self.tokens += len(event.tokens)
        now = time.perf_counter()
        if now - self._drawn >= REDRAW_SECONDS or self.finished == self.total:
            self._drawn = now
            self._draw(now - self.began)

    def close(self) -> None:
        """End the line; what is printed next starts on one of its own."""
        if self._width:
            self.out.write("\n")
            self.out.flush()

    def _draw(self, seconds: float) -> None:
        cells = BAR_CELLS * self.finished // self.total
        left = f", {seconds / self.finished * (self.total - self.finished):.0f} s left" if self.finished else ""
        rate = self.tokens / seconds if seconds else 0.0
        line = f"[{'#' * cells:-<{BAR_CELLS}}] {self.finished}/{self.total}, {rate:.0f} tok/s{left}"
        self.out.write(f"\r{line:<{self._width}}")
        self.out.flush()
        self._width = len(line)


def is_shown(progress: bool | None, prompts: int) -> bool:
    """Whether a batch of `prompts` prompts shows its progress. None: only where stderr is a terminal."""
    terminal = sys.stderr is not None and sys.stderr.isatty()
    return prompts > 1 and (terminal if progress is None else progress)
