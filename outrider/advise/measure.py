"""Runs a drafter on prompts: measures acceptance by position, and the time of rounds by draft length and batch."""

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
"""Tokens of each text that is generated to time rounds after a long prompt."""
MAX_ERROR = 0.05
"""Measurements are repeated until ratios of times are known to this relative error."""
MIN_REPEATS, MAX_REPEATS = 3, 8
MAX_SECONDS = 8.0
"""After this time, no repetition beyond MIN_REPEATS begins."""
Tell = Callable[[str], None]
Cell = tuple[float, int]
"""Temperature and batch."""
_CALLS = itertools.count()
"""Numbers the runs, so that each has its own salt: a drafter that remembers answers must not know those of others."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The prompts to measure on, and the cells."""

    prompts: tuple[tuple[int, ...], ...]
    """The prompts, as token ids."""
    temperatures: tuple[float, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    """Rounds are also timed at batch 1 after a prompt that is repeated to each of these numbers of tokens."""
    max_tokens: int

    @property
    def first(self) -> Cell:
        """The cell by which the drafter is chosen."""
        return self.temperatures[0], self.batches[0]

    @property
    def cells(self) -> list[Cell]:
        """The cells that are measured: the first one, then the other batches, then the other temperatures."""
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
    """Measure every cell once, with each draft length. llm: with the candidate as its drafter and no controller."""
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
    """Time every cell again, plain and with its length, until the ratio of the times is known to MAX_ERROR.

    lengths: the best by earlier times. The length that looked best is also the one that noise favoured most; new
    times are independent of that choice, so that predictions from them do not have that bias.
    """
    _warm_up(llm, scope, found.max_tokens)
    for cell, length in lengths.items():
        tell(f"again at temperature {cell[0]:g}, batch {cell[1]}, drafts of {length}")
        runs = _measure_cell(llm, found, scope, cell, (0, length), MAX_REPEATS)
        found.time_again(*cell, {n: runs.times(n) for n in (0, length)})


def _measure_cell(llm: LLM, found: Measured, scope: Scope, cell: Cell, lengths: Seq[int], repeats: int) -> Runs:
    """Run a cell with these lengths. Adds their acceptance to `found` where it is not known yet."""
    temperature, batch = cell
    runs = Runs(llm, scope.groups(batch), temperature, scope.max_tokens)
    runs.repeat(lengths, repeats)
    for length in lengths:
        if length and (temperature, length) not in found.acceptance:
            found.acceptance[temperature, length] = runs.acceptance(length, found.max_tokens)
    return runs


class Runs:
    """Answers groups of prompts with drafts of several lengths in turn, so that a change of the machine's speed affects
    all lengths.

    Times are those of rounds in which a whole group decodes; tokens a round are those of whole texts. So the figures
    are those of a batch that is kept full, although the texts of a group end at different times.
    """

    def __init__(
        self, llm: LLM, groups: Seq[Seq[tuple[int, ...]]], temperature: float, max_tokens: int, ignore_eos: bool = False
    ) -> None:
        self.llm, self.groups = llm, groups
        self.params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=0, ignore_eos=ignore_eos)
        self.done: dict[int | None, list[list[Measurement]]] = {}
        """For each length, the repetitions, each with one measurement for each group."""

    def repeat(self, lengths: Seq[int | None], most: int) -> None:
        """Run all groups with all lengths, at most `most` times. From MIN_REPEATS on, stop once the ratios of all times
        to those of the first length are known to MAX_ERROR, or MAX_SECONDS have passed.

        A length of None: as the drafter or its controller chooses.
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
        """The mean times of a round, over the groups; for each group, those of its repetition with the median time."""
        chosen = [
            median_low(sorted((_round_ms(each), i, each) for i, each in enumerate(own)))[2]
            for own in zip(*self.done[length], strict=True)
        ]
        rounds = sum(max(1, each.rounds) for each in chosen)
        parts = zip(*(_split(each) for each in chosen), strict=True)
        return RoundTimes(*(sum(part) / rounds for part in parts))

    def speedup(self, length: int | None) -> float:
        """Tokens a second with this length, over those with the first length."""
        first = next(iter(self.done))
        return self.tau(length) * self.times(first).total / (self.tau(first) * self.times(length).total)

    def error(self, length: int | None) -> float:
        """Two standard errors of the ratio of this length's times to the first's, as a share; 0 for one repetition."""
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
        """The texts of each repetition, in the order of the groups."""
        return [[text for each in repetition for text in each.texts] for repetition in self.done[length]]

    def _stats(self, length: int | None) -> Stats:
        return total(each.stats for each in self.done[length][0])

    def _run(self, group: Seq[tuple[int, ...]], length: int | None) -> Measurement:
        salt = f"advise {next(_CALLS)}"
        return measure_batch(self.llm.engine, group, self.params, salt=salt, max_draft=length, to_end=True)


def _split(found: Measurement) -> tuple[float, float, float]:
    """Seconds of drafting, passes and the rest in all rounds of the window; where its texts never decode together, the
    means of one round."""
    if found.rounds:
        draft, verify, host = (each * found.rounds / 1000 for each in found.split_ms())
        return draft, verify, host
    times, count = found.stats.times, max(1, found.stats.times.rounds)
    return times.draft / count, times.verify / count, times.host / count


def _round_ms(found: Measurement) -> float:
    return 1000 * sum(_split(found)) / max(1, found.rounds)


def _warm_up(llm: LLM, scope: Scope, length: int) -> None:
    """Run a few rounds whose times are not used: the first rounds include one-time costs."""
    Runs(llm, scope.groups(scope.batches[0])[:1], scope.temperatures[0], 8).repeat((length,), 1)


def _repeated(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The prompt repeated, and cut to `count` tokens."""
    return (prompt * -(-count // len(prompt)))[:count]
