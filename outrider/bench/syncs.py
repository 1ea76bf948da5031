"""Where the host waits for a CUDA device: every blocking synchronization, by Python line."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch

SYNC_WARNING = "synchronizing CUDA operation"


class SyncCounter:
    """Counts synchronizations while entered: those torch warns of, and explicit calls of `synchronize`.

    Without CUDA the count stays empty.
    """

    def __init__(self) -> None:
        self.where: Counter[str] = Counter()
        self._stack = ExitStack()
        self._warned: list[warnings.WarningMessage] = []

    def __enter__(self) -> SyncCounter:
        if not torch.cuda.is_available():
            return self
        caught = self._stack.enter_context(warnings.catch_warnings(record=True))
        self._warned = [] if caught is None else caught
        warnings.simplefilter("always")
        self._stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")
        for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
            self._stack.enter_context(patch.object(owner, "synchronize", self._counted(owner.synchronize)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self.where.update(_line(w.filename, w.lineno) for w in self._warned if SYNC_WARNING in str(w.message))

    @property
    def count(self) -> int:
        return sum(self.where.values())

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            frame = sys._getframe(1)
            self.where[_line(frame.f_code.co_filename, frame.f_lineno)] += 1
            return call(*given, **named)

        return counted


def _line(file: str, line: int) -> str:
    """The last two parts of the path, and the line."""
    return f"{'/'.join(Path(file).parts[-2:])}:{line}"
