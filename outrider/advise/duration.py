"""Estimates how long `outrider advise` will take, from two short plain runs of each batch before it measures."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import mean

from outrider.advise.candidates import Candidate
from outrider.advise.measure import MAX_REPEATS, MAX_SECONDS, MIN_REPEATS, TIMED_LENGTHS, TIMED_TOKENS, Runs, Scope
from outrider.llm import LLM

PROBE_TOKENS = 8
TREE_LENGTHS = 2
"""The number of lengths that a drafter of trees is timed with: its own, and 0, plain decoding."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The times of plain decoding at one batch size."""

    prompt: float
    """Seconds of reading the batch's prompts."""
    round: float
    """Seconds of a round."""

    def seconds(self, tokens: int) -> float:
        return self.prompt + tokens * self.round


def probe(llm: LLM, scope: Scope) -> dict[int, Pace]:
    """The pace of each batch size, by runs of a few tokens: the faster of two, since the first may include warm-up
    and either may be disturbed."""
    return {batch: min((_pace(llm, scope, batch) for _ in range(2)), key=_whole) for batch in scope.batches}


def _pace(llm: LLM, scope: Scope, batch: int) -> Pace:
    runs = Runs(llm, scope.groups(batch)[:1], scope.temperatures[0], PROBE_TOKENS, ignore_eos=True)
    runs.repeat((0,), 1)
    whole, round_seconds = runs.done[0][0][0].total_seconds, runs.times(0).total
    return Pace(max(0.0, whole - PROBE_TOKENS * round_seconds), round_seconds)


def _whole(pace: Pace) -> float:
    return pace.seconds(PROBE_TOKENS)


def expected_seconds(
    scope: Scope, paces: dict[int, Pace], loading: float, wanted: Seq[Candidate], verified: int
) -> float:
    """Seconds of measuring the candidates `wanted` and verifying `verified` of them. loading: of opening the target.

    Assumes that decoding with drafts brings as many tokens a second as plain decoding.
    """
    cells = [len(scope.groups(batch)) * paces[batch].seconds(scope.max_tokens) for _, batch in scope.cells]
    first = paces[scope.batches[0]]
    reading = first.prompt / mean(map(len, scope.prompts))
    behind = sum(context * reading + TIMED_TOKENS * first.round for context in scope.contexts)
    lengths = sum(TREE_LENGTHS if each.tree else len(TIMED_LENGTHS) for each in wanted)
    # each verified drafter: all cells again, the first also with its length and the controller; the fastest: the others
    again = verified * (sum(map(_repeated, cells)) + 2 * _repeated(cells[0])) + sum(map(_repeated, cells[1:]))
    return lengths * (sum(cells) + behind) + again + loading * (len(wanted) + 2 * verified + 1)


def _repeated(cell: float) -> float:
    """Seconds of a cell that is repeated with and without drafts, as `Runs.repeat` does. cell: seconds of one run."""
    once = 2 * cell
    return max(MIN_REPEATS * once, min(MAX_REPEATS * once, MAX_SECONDS))
