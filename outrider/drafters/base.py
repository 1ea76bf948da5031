"""The drafter's contract. A drafter is one file and one line in `registry.py`."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from outrider.core import Draft, Sequence, Verdict


class Drafter(Protocol):
    """Guesses ahead. May be wrong at will: a bad guess costs time, never correctness.

    A drafter never changes a sequence. Private state is keyed by `seq.id`, and must
    cope with a sequence that grew by any number of tokens since it was last seen,
    since a round may pass without this drafter being asked.
    """

    name: str
    """As registered; written into every draft's `source`."""
    max_tokens: int
    """Most tokens it proposes for one sequence in one round."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Guess at most budgets[i] tokens to follow seqs[i].tokens. Zero is a budget.

        In mode `distribution` a draft whose tokens were sampled states the laws they
        were sampled from (`Draft.probs`), and keeps every token it sampled.
        """
        ...

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict]) -> None:
        """See what the target decided. The sequences hold the committed tokens by now."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Drop all state of a finished sequence. Called exactly once, with its final text."""
        ...
