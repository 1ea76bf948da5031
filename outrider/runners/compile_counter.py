"""Counts kernels compiled, passes captured and memory allocated on CUDA devices after start-up.

There should be none of it: each costs a request as much time as hundreds of rounds.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

MAX_NAMES = 64  # names kept, of the latest compilations and captures


@dataclass(frozen=True, slots=True)
class LateWork:
    """Work done after start-up that start-up should have done."""

    compilations: int = 0
    """Kernels compiled, or loaded from Triton's cache, and passes captured."""
    device_allocations: int = 0
    """How often memory was allocated on the device, which makes the device wait."""
    names: tuple[str, ...] = ()
    """The latest of the kernels, with their signatures, and of the captures."""


class CompileCounter:
    """Counts what this process compiles and captures outside start-up. Any thread may use it."""

    def __init__(self) -> None:
        self.count = 0
        self._names: deque[str] = deque(maxlen=MAX_NAMES)
        self._starting = 0
        self._lock = threading.Lock()

    def note(self, name: str) -> None:
        """Count a compilation or a capture, unless a model is starting up."""
        with self._lock:
            if not self._starting:
                self.count += 1
                self._names.append(name)

    @contextmanager
    def start_up(self) -> Iterator[None]:
        """Count nothing inside the `with` block, in which a model starts up. May be nested."""
        with self._lock:
            self._starting += 1
        try:
            yield
        finally:
            with self._lock:
                self._starting -= 1

    def names(self, count: int) -> tuple[str, ...]:
        """The names of the last `count` compilations and captures, as far as they are kept."""
        with self._lock:
            return tuple(self._names)[-count:] if count else ()


COUNTER = CompileCounter()
"""The counter of this process: Triton has one hook for all kernels."""


class ReadyMark:
    """Marks the moment at which an engine is ready, and reports late work on its device since then."""

    def __init__(self, device: torch.device, counter: CompileCounter = COUNTER) -> None:
        self._device, self._counter = device, counter
        self._compiled, self._allocated = counter.count, _device_allocations(device)

    @property
    def late_work(self) -> LateWork:
        count = self._counter.count - self._compiled
        return LateWork(count, _device_allocations(self._device) - self._allocated, self._counter.names(count))


def watch_triton(counter: CompileCounter = COUNTER) -> None:
    """Count Triton's compilations from now on; other users of its hook are still called."""
    knobs: Any = import_module("triton").knobs  # not installed on every machine that checks types
    previous: Any = knobs.runtime.jit_post_compile_hook
    if isinstance(previous, _TritonHook) and previous.counter is counter:
        return
    knobs.runtime.jit_post_compile_hook = _TritonHook(counter, previous)


class _TritonHook:
    def __init__(self, counter: CompileCounter, previous: Any) -> None:
        self.counter, self.previous = counter, previous

    def __call__(self, **given: Any) -> Any:
        self.counter.note(_signature(given))
        return None if self.previous is None else self.previous(**given)


def _signature(given: dict[str, Any]) -> str:
    """A kernel's name, options and argument types as Triton writes them, then its constants."""
    constants = given.get("compile", {}).get("constants", {})
    shown = ", ".join(str(value) for value in constants.values())
    return f"{given.get('repr', 'a kernel')} with {shown}"


def _device_allocations(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("num_device_alloc", 0) if device.type == "cuda" else 0
