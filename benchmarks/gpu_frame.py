"""What the parts of benchmarks/gpu.py share: the plan, the rows, the pair, and the timers."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.bench.llm_factory import LLMFactory
from outrider.bench.measure import Measurement, random_prompts
from outrider.models.decoder import Decoder
from outrider.testing.synthetic import EOS, SyntheticPair, synthetic_pair, weight_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured. The default is the published shape; `tiny` is for testing this script."""

    shape: str
    device: torch.device
    layers: int = 2
    agreement: float = 1.0
    prompt: int = 256
    new: int = 256
    batches: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (256, 4096, 32_768)
    widths: tuple[int, ...] = (1, 4, 6, 8, 16, 32)
    pinned_prompts: int = 64
    small: str = "smollm2-135m"
    model: str = ""
    folder: Path | None = None


@dataclass(slots=True, kw_only=True)
class Row:
    """One line of the table. None: not measured, or not applicable."""

    section: str
    name: str
    batch: int = 1
    context: int = 0
    tokens_per_second: float | None = None
    whole_tokens_per_second: float | None = None
    of_limit: float | None = None
    tau: float | None = None
    alpha: float | None = None
    round_ms: float | None = None
    draft_ms: float | None = None
    verify_ms: float | None = None
    rest_ms: float | None = None
    host_share: float | None = None
    waits: float | None = None
    seconds: float | None = None
    equal: float | None = None
    note: str = ""


class OutOfTime(Exception):  # noqa: N818 - not an error
    """The time limit is reached."""


@dataclass(slots=True)
class Bench:
    """What the parts share: the pair, its rig, the bandwidth, and the rows so far."""

    plan: Plan
    deadline: float
    tell: Callable[[Row], None]
    rows: list[Row] = field(default_factory=list)
    bandwidth: float = 0.0
    waited: Counter[str] = field(default_factory=Counter)
    """Where the host waited for the device, by Python line."""
    _pair: SyntheticPair | None = None
    _factory: LLMFactory | None = None
    _salts: int = 0

    @property
    def pair(self) -> SyntheticPair:
        if self._pair is None:
            plan = self.plan
            self._pair = synthetic_pair(plan.shape, plan.layers, plan.agreement, device=plan.device)
        return self._pair

    @property
    def factory(self) -> LLMFactory:
        """With one cache for all parts: the largest batch, or the longest context."""
        if self._factory is None:
            plan = self.plan
            context = max(*plan.contexts, plan.prompt) + plan.new + 64
            tokens = max(max(plan.batches) * (plan.prompt + plan.new + 32), context + 32)
            self._factory = LLMFactory(self.pair, cache_tokens=tokens, context=context)
        return self._factory

    def salt(self) -> str:
        self._salts += 1
        return str(self._salts)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        return random_prompts(count, length, self.pair.target.config.vocab_size, first=EOS + 1)

    def add(self, row: Row) -> Row:
        self.rows.append(row)
        self.tell(row)
        return row

    def check_time(self) -> None:
        if time.monotonic() > self.deadline:
            raise OutOfTime

    def limit_ms(self, batch: int, context: float, drafted: float = 0.0) -> float:
        """Min milliseconds of a round: the bytes it reads, at the measured bandwidth."""

        def read(decoder: Decoder) -> float:
            return weight_bytes(decoder) + batch * context * decoder.config.token_bytes(decoder.dtype)

        return 1000 * (read(self.pair.target) + drafted * read(self.pair.draft)) / self.bandwidth


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(work: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Median milliseconds of a call: by events on CUDA, else by the host's clock."""
    work()
    times: list[float] = []
    for _ in range(repeats):
        sync(device)
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def clock_ms(work: Callable[[], Any], device: torch.device, repeats: int = 20) -> float:
    """Median milliseconds by the host's clock, until the device is done."""
    times: list[float] = []
    for _ in range(repeats + 1):
        sync(device)
        began = time.perf_counter()
        work()
        sync(device)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times[1:])


def read_bandwidth(device: torch.device, tiny: bool) -> float:
    """Bytes per second of the faster of two reductions over more memory than any cache holds; medians."""
    count = (1 << 24) if tiny else 1_600_000_000  # float32; below 2^31, where indices grow wider
    x = torch.empty(count // 8192, 8192, device=device).uniform_()
    return x.nbytes / min(median_ms(work, device) for work in (x.sum, partial(x.sum, 1))) * 1000


@contextmanager
def replays() -> Iterator[list[Any]]:
    """The CUDA graphs replayed within the block."""
    seen: list[Any] = []
    if not torch.cuda.is_available():
        yield seen
        return
    own = torch.cuda.CUDAGraph.replay

    def replay(graph: Any) -> None:
        seen.append(graph)
        own(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        torch.cuda.CUDAGraph.replay = own  # type: ignore[method-assign]


@contextmanager
def replays_within(owner: Any, name: str, seen: list[Any]) -> Iterator[list[Any]]:
    """Of the graphs seen, those replayed while this method of the owner runs."""
    inside: list[Any] = []
    own = getattr(owner, name)

    def watched(*given: Any) -> Any:
        before = len(seen)
        answer = own(*given)
        inside.extend(seen[before:])
        return answer

    setattr(owner, name, watched)
    try:
        yield inside
    finally:
        delattr(owner, name)


def row_of(bench: Bench, section: str, name: str, found: Measurement, prompt: int) -> Row:
    draft, verify, rest = found.split_ms()
    mean = prompt + found.tokens / found.batch / 2
    drafted = found.gamma if "draft-model" in name else 0.0
    return Row(
        section=section,
        name=name,
        batch=found.batch,
        context=prompt,
        tokens_per_second=found.rate,
        whole_tokens_per_second=found.total_rate,
        of_limit=bench.limit_ms(found.batch, mean, drafted) / found.round_ms,
        tau=found.tau,
        alpha=found.alpha if found.drafted else None,
        round_ms=found.round_ms,
        draft_ms=draft,
        verify_ms=verify,
        rest_ms=rest,
        host_share=found.host_share,
    )
