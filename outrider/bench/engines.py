"""One loaded target, and an engine for plain decoding and for each drafter over it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from outrider.checkpoints.storage import Progress
from outrider.control.ceilings import limits_of
from outrider.control.limits import PassLimits
from outrider.core.errors import ConfigError
from outrider.drafters.base import for_target
from outrider.drafters.registry import parse_drafter
from outrider.engine.engine import Engine
from outrider.llm import LLM
from outrider.loading.load import LoadedModel, choose_device, load
from outrider.loading.machine import memory_for_drafts
from outrider.loading.memory import ReservedMemory
from outrider.runners.base import Runner

PLAIN = "plain"
CACHE_CONTEXT = 8192
LOOKS = 3
"""How often the bandwidth is measured: the highest counts, since other work only lowers it."""


def with_lengths(drafters: Seq[str], lengths: Seq[int]) -> list[str]:
    """Every drafter with every length as its option `k`; one that has a `k` already, as it is."""
    found: list[str] = []
    for spec in drafters:
        if not lengths or "k=" in spec:
            found.append(spec)
            continue
        if "+" in spec:
            raise ConfigError(
                f"--lengths: {spec} is a mix; give its members their own, as in suffix:k=4+prediction:k=8"
            )
        found += [f"{spec}{',' if ':' in spec else ':'}k={length}" for length in lengths]
    return list(dict.fromkeys(found))


def controlled_rows(drafters: Seq[str], every: bool) -> list[str]:
    """The rows that the controller decides in: those of `auto`, which is made for it, or every one."""
    return [spec for spec in drafters if every or spec.partition(":")[0] == "auto"]


def load_target(
    model: str, drafters: Seq[str], *, max_batch: int, progress: Progress | None = None, **options: Any
) -> LoadedModel:
    """The target with room for all of the drafters. `options` are those of `outrider.load`.

    On CUDA the cache holds `max_batch` sequences of CACHE_CONTEXT tokens, or of the given context, and not all that is
    free: a second target may have to fit.
    """
    if options.get("cache_tokens") is None and choose_device(options.get("device", "auto")).type == "cuda":
        options["cache_tokens"] = max_batch * (options.get("context") or CACHE_CONTEXT)
    configs = [parse_drafter(spec) for spec in drafters]

    def needs(folder: Path) -> tuple[int, ReservedMemory]:
        traits = [for_target(config, folder).traits for config in configs]
        loads = [each._replace(model=each.model or model) for trait in traits for each in trait.loads]
        longest = max((trait.max_tokens for trait in traits), default=0)
        return longest, memory_for_drafts(loads, options.get("device", "auto"))

    return load(model, max_batch=max_batch, drafts=needs, progress=progress, **options)


class Engines:
    """An engine for each row, all open, of which one works at a time.

    The rows share one target until a drafter taps layers, which costs every row of its target time: the rows after
    such a drafter get another target. Plain decoding is set up last, and shares none with such a drafter.
    """

    def __init__(
        self,
        make_target: Callable[[], LoadedModel],
        drafters: Seq[str],
        *,
        max_batch: int,
        controlled: Collection[str] = (),
    ) -> None:
        """controlled: the rows in which the controller decides how far to draft; the others draft always."""
        self.rows = (PLAIN, *drafters)
        self._open: dict[str, LLM] = {}
        shared: LoadedModel | None = None
        for row in (*drafters, PLAIN):
            shared = shared or make_target()
            drafter = "none" if row == PLAIN else row
            llm = LLM(shared, drafter=drafter, mode="seeded", max_batch=max_batch, adaptive=row in controlled)
            self._open[row] = llm
            if llm.drafter.traits.taps or llm.drafter.traits.kept_taps:
                shared = None
        self.loaded = self._open[PLAIN].loaded
        self.limits = _limits(self.loaded.target)

    def use(self, row: str) -> Engine:
        """The engine of a row."""
        return self._open[row].engine

    def close(self) -> None:
        for llm in self._open.values():
            llm.close()

    def read_seconds(self, passes: int, batch: int) -> float | None:
        """Seconds to read the target's weights in `passes` passes at the measured bandwidth; None: not known."""
        if self.limits is None:
            return None
        return passes * self.limits.work.bytes_read(batch) / self.limits.ceilings.bandwidth


def _limits(target: Runner) -> PassLimits | None:
    """The limits of the target's passes, always measured anew; None where the target's work is not known."""
    found = [limits for _ in range(LOOKS) if (limits := limits_of(target, None, ())) is not None]
    return max(found, key=lambda each: each.ceilings.bandwidth, default=None)
