"""Runs a drafter on prompts: how far its drafts are accepted, and what rounds cost by length and batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from outrider.advise.candidates import Candidate
from outrider.advise.measured import Acceptance, Measured, RoundTimes
from outrider.core.sampling import SamplingParams
from outrider.engine.results import Result
from outrider.engine.stats import Stats, total
from outrider.llm import LLM

MAX_LENGTH = 16
"""Longer drafts are not tried."""
TIMED_LENGTHS = (0, 1, 3, 7, MAX_LENGTH)
TIMED_TOKENS = 32
"""Of each sequence whose rounds are timed."""
Tell = Callable[[str], None]
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
    def first(self) -> tuple[float, int]:
        """The cell that decides: temperature and batch."""
        return self.temperatures[0], self.batches[0]


def make_llm(target: str, drafter: str, scope: Scope, options: dict[str, Any], *, adaptive: bool) -> LLM:
    return LLM(target, drafter=drafter, adaptive=adaptive, max_batch=max(scope.batches), **options)


def measure(llm: LLM, candidate: Candidate, scope: Scope, tell: Tell) -> Measured:
    """llm: with the candidate, and without a controller."""
    longest = min(MAX_LENGTH, llm.drafter.traits.max_tokens)
    if candidate.tree:
        longest = llm.drafter.traits.max_tokens
    lengths = (0, longest) if candidate.tree else tuple(sorted({n for n in TIMED_LENGTHS if n < longest} | {longest}))
    found = Measured(candidate.drafter, longest, lengths, fixed_length=candidate.tree)
    _answer(llm, scope.prompts[:1], 8, longest)  # the first rounds pay for what later ones find ready
    for temperature in scope.temperatures:
        tell(f"acceptance at temperature {temperature:g}")
        results = _answer(llm, scope.prompts, scope.max_tokens, longest, temperature)
        found.acceptance[temperature] = _acceptance(total(each.stats for each in results), longest)
        found.answer_tokens = sum(len(each.tokens) for each in results) / len(results)
    for batch in scope.batches:
        tell(f"time of rounds at batch {batch}")
        group = [scope.prompts[i % len(scope.prompts)] for i in range(batch)]
        _time_rounds(llm, found, (batch, 0), group)
    for context in scope.contexts:
        tell(f"time of rounds at {context} tokens")
        _time_rounds(llm, found, (1, context), [_repeated(scope.prompts[0], context)])
    return found


def decode_seconds(
    llm: LLM, scope: Scope, temperature: float, batch: int, length: int | None
) -> tuple[float, Stats, list[Seq[int]]]:
    """Seconds a token of decoding all prompts, `batch` at a time; the figures, and the texts. length: None: all."""
    results: list[Result] = []
    for begin in range(0, len(scope.prompts), batch):
        results += _answer(llm, scope.prompts[begin : begin + batch], scope.max_tokens, length, temperature)
    stats = total(each.stats for each in results)
    times = stats.times
    seconds = times.draft + times.verify + times.host  # of each sequence in a round: those of a batch share it
    return seconds / max(1, stats.tokens), stats, [each.tokens for each in results]


def _time_rounds(llm: LLM, found: Measured, where: tuple[int, int], group: Seq[tuple[int, ...]]) -> None:
    for length in found.lengths:
        times = total(each.stats for each in _answer(llm, group, TIMED_TOKENS, length, ignore_eos=True)).times
        count = max(1, times.rounds)
        found.rounds[*where, length] = RoundTimes(times.draft / count, times.verify / count, times.host / count)


def _answer(
    llm: LLM,
    prompts: Seq[tuple[int, ...]],
    max_tokens: int,
    length: int | None,
    temperature: float = 0.0,
    *,
    ignore_eos: bool = False,
) -> list[Result]:
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=i, ignore_eos=ignore_eos)
        for i in range(len(prompts))
    ]
    salt = f"advise {next(_CALLS)}"
    return llm.generate([list(each) for each in prompts], params, max_draft=length, salt=salt, progress=False)


def _acceptance(stats: Stats, longest: int) -> Acceptance:
    tally = stats.all
    rounds = max(1, tally.rounds)
    filled = [*tally.drafted_at, *[0] * longest][:longest], [*tally.accepted_at, *[0] * longest][:longest]
    drafted, accepted = (tuple(count / rounds for count in part) for part in filled)
    return Acceptance(drafted, accepted)


def _repeated(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """A prompt repeated to so many tokens."""
    return (prompt * -(-count // len(prompt)))[:count]
