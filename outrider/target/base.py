"""The target's contract: score text and drafts in one pass, keep what stands, release what ended."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core import Span, Token
from outrider.target.pages import PagePool


@dataclass(frozen=True, slots=True)
class Start:
    """Where one sequence's chain begins: all but its last two tokens are cached."""

    seq_id: int
    length: int
    last: tuple[Token, Token]
    seed: int
    temperature: float


class Target(Protocol):
    """A model with a cache. What it computes for one sequence never depends on another."""

    vocab_size: int
    """Rows of logits; ids at or beyond it do not exist."""
    context: int
    """Most tokens of one text the model was made for."""
    scores_trees: bool
    """False: the engine hands it only chains."""
    row_block: int
    """Rows are computed so many at a time: a pass of one row more costs as much as a whole block more."""
    rewinds: bool
    """Whether a span may start before the end of what is cached, which then goes; a draft model must."""
    launches: bool
    """Passes are launched and not waited for, so that the host may work meanwhile; `draft_chains` works too."""
    device: torch.device
    pool: PagePool
    """Who owns which page. The engine opens, reserves and closes; the target reads the tables."""

    def score(self, spans: Seq[Span]) -> Tensor:
        """Read each span's tokens and draft in one pass.

        Returns float32 [sum of span.rows, vocab]: span by span, the logits after its last
        text token and after each draft node. Every span's pages are reserved by the caller.
        """
        ...

    def keep(self, span: Span, path: Seq[int]) -> int:
        """Of the span just scored, keep the text and the draft nodes on `path`.

        Returns how many tokens of the sequence are cached now. That is the text and the
        path, or less where the cache cannot be rolled back: the rest is read again.
        """
        ...

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        """Forget the sequence and close its pages; `unpublish`: what they hold is offered to nobody."""
        ...

    def draft_chains(self, starts: Seq[Start], steps: int) -> Seq[Seq[Token]] | None:
        """As a draft model: guess `steps` tokens after each start without asking the host; None if it cannot.

        The guesses may still be on the device: their number is known, and reading them waits.
        """
        ...

    def prepare(self, batch: int, width: int, steps: int = 0) -> Iterator[str]:
        """Get ready for passes of up to `batch` sequences of `width` rows, and chains of `steps`.

        Yields what was got ready, piece by piece. Afterwards nothing is compiled or allocated for them.
        """
        ...
