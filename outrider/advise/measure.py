"""Runs a drafter on prompts: how far its drafts are accepted, and what rounds cost by length and batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import mean, median_low, stdev
from typing import Any

from outrider.advise.candidates import Candidate
from outrider.advise.measured import Acceptance, Measured, RoundTimes
from outrider.bench.measure import Measurement
from outrider.bench.measure import measure as measure_batch
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Token
from outrider.engine.stats import Stats, total
from outrider.llm import LLM

MAX_LENGTH = 16
"""Longer drafts are not tried."""
TIMED_LENGTHS = (0, 1, 3, 7, MAX_LENGTH)
TIMED_TOKENS = 24
"""Of a text whose rounds are timed behind a long prompt."""
MAX_ERROR = 0.05
"""Ratios of times are measured again until they are known to this share."""
MIN_REPEATS, MAX_REPEATS = 3, 8
MAX_SECONDS = 8.0
"""No further repetition is begun after so long."""
Tell = Callable[[str], None]
Cell = tuple[float, int]
"""Temperature and batch."""
_CALLS = itertools.count()
"""Every call has a salt of its own: a drafter that remembers answers must not have seen these."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What to measure on."""

    prompts: tuple[tuple[int, ...], ...]
    """As token ids."""
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Prompts are also repeated to so many tokens, at batch 1."""
    max_tokens: int

    @property
    def first(self) -> Cell:
        """The cell that decides."""
        return self.temperatures[0], self.batches[0]

    @property
    def cells(self) -> list[Cell]:
        """Those that are measured: the first, other batches, other temperatures."""
        temperature, batch = self.first
        others = [(temperature, other) for other in self.batches[1:]]
        return [self.first, *others, *((other, batch) for other in self.temperatures[1:])]

    def groups(self, batch: int) -> list[list[tuple[int, ...]]]:
        """All prompts, `batch` at a time; the last group is filled up with the first prompts."""
        count = -(-len(self.prompts) // batch) * batch
        filled = list(itertools.islice(itertools.cycle(self.prompts), count))
        return [filled[i : i + batch] for i in range(0, count, batch)]


def make_llm(target: str, drafter: str, scope: Scope, options: dict[str, Any], *, adaptive: bool) -> LLM:
    return LLM(target, drafter=drafter, adaptive=adaptive, max_batch=max(scope.batches), **options)


def measure(llm: LLM, candidate: Candidate, scope: Scope, tell: Tell) -> Measured:
    """Every cell, once. llm: with the candidate, and without a controller."""
    longest = min(MAX_LENGTH, llm.drafter.traits.max_tokens)
    if candidate.tree:
        longest = llm.drafter.traits.max_tokens
    lengths = (0, longest) if candidate.tree else tuple(sorted({n for n in TIMED_LENGTHS if n < longest} | {longest}))
    found = Measured(candidate.drafter, longest, lengths, fixed_length=candidate.tree)
    _warm_up(llm, scope, longest)
    for cell in scope.cells:
        tell(f"rounds at temperature {cell[0]:g}, batch {cell[1]}")
        runs = _measure_cell(llm, found, scope, cell, lengths, repeats=1)
        found.rounds |= {(*cell, 0, length): runs.times(length) for length in lengths}
        if cell == scope.first:
            found.answer_tokens = runs.answer_tokens
    temperature = scope.temperatures[0]
    for context in scope.contexts:
        tell(f"rounds behind {context} tokens")
        runs = Runs(llm, [[_repeated(scope.prompts[0], context)]], temperature, TIMED_TOKENS, ignore_eos=True)
        runs.repeat(lengths, 1)
        found.rounds |= {(temperature, 1, context, n): runs.times(n) for n in lengths}
    return found


def measure_again(llm: LLM, found: Measured, scope: Scope, lengths: Mapping[Cell, int], tell: Tell) -> None:
    """Every cell with its length, until its times are known well.

    lengths: chosen before. The length that looked best is the one that noise favoured most, too: what is measured now
    knows nothing of that choice, and so predicts without that bias.
    """
    _warm_up(llm, scope, found.max_tokens)
    for cell, length in lengths.items():
        tell(f"again at temperature {cell[0]:g}, batch {cell[1]}, drafts of {length}")
        runs = _measure_cell(llm, found, scope, cell, (0, length), MAX_REPEATS)
        found.time_again(*cell, {n: runs.times(n) for n in (0, length)})


def _measure_cell(llm: LLM, found: Measured, scope: Scope, cell: Cell, lengths: Seq[int], repeats: int) -> Runs:
    """Runs of these lengths; acceptance where it is not known yet."""
    temperature, batch = cell
    runs = Runs(llm, scope.groups(batch), temperature, scope.max_tokens)
    runs.repeat(lengths, repeats)
    for length in lengths:
        if length and (temperature, length) not in found.acceptance:
            found.acceptance[temperature, length] = runs.acceptance(length, found.max_tokens)
    return runs


class Runs:
    """Groups of prompts that are answered with drafts of several lengths, in turn, so that a machine that slows down
    does so for all of them.

    Times are of the rounds in which a whole group decodes; tokens a round are those of whole texts. So a batch whose
    texts end at different times counts as one that is kept full.
    """

    def __init__(
        self, llm: LLM, groups: Seq[Seq[tuple[int, ...]]], temperature: float, max_tokens: int, ignore_eos: bool = False
    ) -> None:
        self.llm, self.groups = llm, groups
        self.params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=ignore_eos)
        self.done: dict[int | None, list[list[Measurement]]] = {}
        """By length, the repetitions: a measurement of each group."""

    def repeat(self, lengths: Seq[int | None], most: int) -> None:
        """So often at most, and until the times of all lengths over those of the first are known to MAX_ERROR.

        A length of None: as the drafter drafts.
        """
        end = time.perf_counter() + MAX_SECONDS
        self.done = {length: [] for length in lengths}
        for turn in range(most):
            for each in self.done.values():
                each.append([])
            for place, group in enumerate(self.groups):
                first = (turn + place) % len(lengths)
                for length in (*lengths[first:], *lengths[:first]):
                    self.done[length][-1].append(self._run(group, length))
            late = time.perf_counter() > end
            if turn + 1 >= MIN_REPEATS and (late or max(map(self.error, lengths[1:])) <= MAX_ERROR):
                break

    def times(self, length: int | None) -> RoundTimes:
        """Of a round: the mean over the groups, of each its repetition of median time."""
        chosen = [
            median_low(sorted((_round_ms(each), i, each) for i, each in enumerate(own)))[2]
            for own in zip(*self.done[length], strict=True)
        ]
        rounds = sum(max(1, each.rounds) for each in chosen)
        parts = zip(*(_split(each) for each in chosen), strict=True)
        return RoundTimes(*(sum(part) / rounds for part in parts))

    def speedup(self, length: int | None) -> float:
        """Over the first length."""
        first = next(iter(self.done))
        return self.tau(length) * self.times(first).total / (self.tau(first) * self.times(length).total)

    def error(self, length: int | None) -> float:
        """Of its time over that of the first length: two standard errors, as a share; 0 of one repetition."""
        first = next(iter(self.done))
        ratios = [
            sum(map(_round_ms, own)) / sum(map(_round_ms, base))
            for own, base in zip(self.done[length], self.done[first], strict=True)
        ]
        return 2 * stdev(ratios) / len(ratios) ** 0.5 / mean(ratios) if len(ratios) > 1 else 0.0

    def tau(self, length: int | None) -> float:
        return self._stats(length).tau

    def acceptance(self, length: int, longest: int) -> Acceptance:
        tally = self._stats(length).all
        rounds = max(1, tally.rounds)
        filled = [*tally.drafted_at, *[0] * longest][:longest], [*tally.accepted_at, *[0] * longest][:longest]
        drafted, accepted = (tuple(count / rounds for count in part) for part in filled)
        return Acceptance(drafted, accepted)

    @property
    def answer_tokens(self) -> float:
        return mean(len(text) for text in self.texts(next(iter(self.done)))[0])

    def texts(self, length: int | None) -> list[list[tuple[Token, ...]]]:
        """Of each repetition."""
        return [[text for each in repetition for text in each.texts] for repetition in self.done[length]]

    def _stats(self, length: int | None) -> Stats:
        return total(each.stats for each in self.done[length][0])

    def _run(self, group: Seq[tuple[int, ...]], length: int | None) -> Measurement:
        salt = f"advise {next(_CALLS)}"
        return measure_batch(self.llm.engine, group, self.params, salt=salt, max_draft=length, to_end=True)


def _split(found: Measurement) -> tuple[float, float, float]:
    """Seconds of drafts, passes and the rest, in all its rounds; in a mean one where texts never decode together."""
    if found.rounds:
        draft, verify, host = (each * found.rounds / 1000 for each in found.split_ms())
        return draft, verify, host
    times, count = found.stats.times, max(1, found.stats.times.rounds)
    return times.draft / count, times.verify / count, times.host / count


def _round_ms(found: Measurement) -> float:
    return 1000 * sum(_split(found)) / max(1, found.rounds)


def _warm_up(llm: LLM, scope: Scope, length: int) -> None:
    """The first rounds pay for what later ones find ready."""
    Runs(llm, scope.groups(scope.batches[0])[:1], scope.temperatures[0], 8).repeat((length,), 1)


def _repeated(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """A prompt repeated to so many tokens."""
    return (prompt * -(-count // len(prompt)))[:count]
