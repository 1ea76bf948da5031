"""Stand-ins for a card: captured passes, lookups and drafts of a head, and a clock, for host_rounds.py.

Import it before anything of `outrider.runners`: Triton is replaced. `Card` is the clock; `put_stand_ins` replaces what
only a card does, for the whole process, and the last one made counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch


class Nothing(ModuleType):
    """Takes the place of Triton: whatever is asked of it, or called, is nothing again."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self


TRITON = Nothing("triton")
PARTS = ("language", "language.extra.cuda", "experimental", "experimental.gluon", "experimental.gluon.language")
sys.modules |= {f"triton.{part}": TRITON for part in (*PARTS, "experimental.gluon.language.nvidia.ampere")}
sys.modules["triton"] = TRITON
TRITON.__spec__, TRITON.__path__ = ModuleSpec("triton", None), []
TRITON.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]

# ruff: noqa: E402 - all of this may import Triton
from outrider.control.costs import PassTable
from outrider.core import host_copy
from outrider.drafters import prediction, suffix
from outrider.drafters.base import Drafter
from outrider.engine import adaptive, drafting, engine, host_time, rehearsal
from outrider.kernels.lookup import CHANCE_SHIFT, MAX_TOKENS
from outrider.runners import (
    draft_batch,
    graph_runner,
    graphed_lookup,
    graphed_prompt,
    graphed_reads,
    overlays,
    text_store,
)
from outrider.runners.base import Runner
from outrider.runners.draft_batch import DraftBatch, HeadDraft
from outrider.runners.graphed_forward import GraphedForward
from outrider.runners.graphed_lookup import GraphedLookup, GraphedLookups
from outrider.runners.graphed_reads import GraphedRead
from outrider.runners.overlays import GraphedOverlay

Ints = np.ndarray[Any, np.dtype[np.int64]]
DRAFTED, BLOCK = 7, 7
"""The token of all drafts, and how many a block has."""
PASS_MS = {1: 0.42, 8: 0.48, 64: 0.9, 512: 2.0}
"""Of a target's pass, by rows."""
LOOKUP_MS, OVERLAY_MS, HEAD_MS, READ_MS, PROMPT_MS = 0.016, 0.005, 0.083, 0.05, 1.0
VOCAB = 256


def pass_seconds(rows: int) -> float:
    return float(np.interp(rows, list(PASS_MS), list(PASS_MS.values()))) / 1e3


class Card:
    """The clock, and the device's work by it."""

    def __init__(self, host: float, standing: float) -> None:
        self.host, self.standing, self.rng = host, standing, np.random.default_rng(0)
        self.waited = self.aside_seconds = self.busy_until = 0.0

    def worked(self) -> float:
        """Processor seconds of the host, without stand-ins."""
        return time.thread_time() - self.aside_seconds

    def now(self) -> float:
        return self.worked() * self.host + self.waited

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done within costs the host nothing."""
        began = time.thread_time()
        yield
        self.aside_seconds += time.thread_time() - began

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.now()) + seconds

    def wait_until(self, then: float) -> None:
        self.waited += max(0.0, then - self.now())

    def choose(self, out: Ints) -> None:
        """The target's choices after so many rows."""
        others = self.rng.integers(DRAFTED + 1, VOCAB, len(out))
        out[:] = np.where(self.rng.random(len(out)) < self.standing, DRAFTED, others)


class Replay:
    """Takes the place of a captured graph."""

    def __init__(self, card: Card, work: Callable[[], None]) -> None:
        self.card, self.owner = card, getattr(work, "__self__", None)

    def replay(self) -> None:
        card, owner = self.card, self.owner
        with card.aside():
            if isinstance(owner, GraphedForward):
                card.launch(pass_seconds(owner.shape.rows))
                for choices in (owner.choices, owner.placed):  # of rows, and of drafts that share them
                    card.choose(choices.numpy())
            elif isinstance(owner, GraphedLookup):
                card.launch(LOOKUP_MS / 1e3)
                _find(owner, 2 + int(10 * card.standing))
            elif isinstance(owner, GraphedRead):
                card.launch(READ_MS / 1e3)
            elif isinstance(owner, GraphedOverlay):
                card.launch(OVERLAY_MS / 1e3)
            else:
                card.launch(PROMPT_MS / 1e3)


def _find(lookup: GraphedLookup, match: int) -> None:
    """A match of so many tokens for every text, and as long a draft behind it as is allowed."""
    found, k = lookup.found.numpy(), lookup.k
    rows = lookup.inputs.arrays[0][graphed_lookup.HEADER :].reshape(lookup.rows.shape)
    limits = rows[:, graphed_lookup.LIMITS + match]
    wanted, chance = limits & MAX_TOKENS, limits >> CHANCE_SHIFT
    drafted = np.minimum(wanted, rows[:, 5])  # the budget
    found[:, :k] = np.where(np.arange(k) < drafted[:, None], DRAFTED, -1)
    found[:, k : 2 * k] = DRAFTED
    one = np.ones_like(wanted)
    found[:, 2 * k :] = np.stack([match * one, one, wanted, one, chance], 1)


def put_stand_ins(card: Card) -> None:
    """Replace what only a card does."""

    class Copy(host_copy.HostCopy):
        __slots__ = ("_ready",)

        def __init__(self, tokens: torch.Tensor) -> None:
            self.tokens, self._buffer, self._list, self._chances = tokens, None, None, None
            with card.aside():
                self._array, self._ready = tokens.numpy().copy(), card.busy_until

        def array(self) -> np.ndarray[Any, Any]:
            card.wait_until(self._ready)
            return self._array  # type: ignore[return-value]

    def graph(self: DraftBatch, work: Callable[[], None], name: str) -> Callable[[], None]:
        tokens = torch.full((self.batch, BLOCK), DRAFTED)
        self._results[0] = HeadDraft(tokens, confidence=torch.full(tokens.shape, 0.5))
        return lambda: card.launch(HEAD_MS / 1e3)

    def result(self: DraftBatch, count: int, length: int = 0) -> HeadDraft:
        if (count, length) not in self._views:
            parts = (None if part is None else part[:count] for part in self._results[length])
            self._views[count, length] = HeadDraft(*parts)  # type: ignore[arg-type]
        return self._views[count, length]

    _look_as_on_cuda(card.now)
    for module in (graph_runner, graphed_lookup, graphed_prompt, graphed_reads, draft_batch, overlays):
        module.capture = lambda work, pool, name="": Replay(card, work)  # type: ignore[assignment]
    DraftBatch.graph, DraftBatch.result = graph, result
    for name, module in list(sys.modules.items()):
        if name.startswith("outrider.") and getattr(module, "HostCopy", None) is not None:
            module.HostCopy = Copy  # type: ignore[attr-defined]


def _look_as_on_cuda(clock: Callable[[], float]) -> None:
    """Let parts that ask for the device take the path of a card, and go by the clock."""
    torch.cuda.graph_pool_handle = lambda: (0, 1)
    for module in (drafting, host_time, engine, rehearsal):
        module.time = SimpleNamespace(perf_counter=clock)  # type: ignore[assignment]
    suffix.looks_up_on_device = prediction.looks_up_on_device = lambda context: context.target
    text_store._graphs = lambda slots, ring, k, match: GraphedLookups(slots, ring, k=k, max_match=match)
    adaptive.limits_of = lambda *args: None


class Meter(adaptive.CostMeter):
    """Costs as they are on the clock."""

    def _table(self, runner: Runner, width: int, *what: object) -> PassTable:
        shapes, packed = runner.pass_shapes(self.max_batch, width), runner.packed_shapes(self.max_batch, width)
        times = {(b, w): pass_seconds(b * w) for b, w in shapes}
        return PassTable(times, padded=True, packed={(b, n): pass_seconds(n) for b, _, n in packed})

    def _draft_table(self, drafter: Drafter) -> PassTable | None:
        batches = {b for b, _ in self.target.pass_shapes(self.max_batch, 1)}
        return PassTable({(b, 1): HEAD_MS / BLOCK / 1e3 for b in batches}, padded=True)
