"""The target's contract: score text and drafts in one pass, keep what stands, release what ended."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.draft import Draft
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.kvcache.pages import PagePool
from outrider.runners.device_state import DeviceState
from outrider.runners.reduced_head import ReducedHead


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where one sequence's chain begins: all but its last two tokens are cached."""

    seq_id: int
    seed: int
    temperature: float
    length: int = 2
    last: tuple[Token, Token] = (0, 0)
    """Length and last tokens are left out where the chain follows a round in flight: a Standing tells them."""


class Runner(Protocol):
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

    def stand(self, choices: Tensor) -> DeviceState | None:
        """Where the texts of the pass launched last stand, given its choice after each row; None: the host must say.

        choices int64 [rows], as the pass's logits; negative where there is none. Never waits.
        """
        ...

    def score_behind(self, standing: DeviceState, seq_ids: Seq[int], drafts: Seq[Draft]) -> Tensor:
        """As `score`, for texts whose last token only the device knows: sequence i stands where standing[i] says.

        Drafts are chains. Pages are reserved as far as the texts can have come.
        """
        ...

    def keep(self, span: Span, path: Seq[int], *, trim: bool = True) -> int:
        """Of the span just scored, keep the text and the draft nodes on `path`.

        Returns how many tokens of the sequence are cached now. That is the text and the
        path, or less where the cache cannot be rolled back: the rest is read again. Pages beyond
        are given back, unless a pass that writes there is on its way: then not to `trim`.
        """
        ...

    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        """Forget the sequence and close its pages; `unpublish`: what they hold is offered to nobody."""
        ...

    def draft_chains(
        self, starts: Seq[ChainStart], steps: int, behind: DeviceState | None = None
    ) -> Seq[Seq[Token]] | None:
        """As a draft model: guess `steps` tokens after each start without asking the host; None if it cannot.

        The guesses may still be on the device: their number is known, and reading them waits.
        behind: where the starts' texts stand, in their order, on this target's device.
        """
        ...

    def narrow(self, tokens: Seq[Token]) -> ReducedHead | None:
        """As a draft model: say only these tokens from now on, all where none are named; None if it cannot.

        To `score` every other token is -inf; the first guess of `draft_chains` may still be any. The head returned
        exchanges single tokens later.
        """
        ...

    def prepare(self, batch: int, width: int, steps: int = 0) -> Iterator[str]:
        """Get ready for passes of up to `batch` sequences of `width` rows, and chains of `steps`.

        Yields what was got ready, piece by piece. Afterwards nothing is compiled or allocated for them.
        """
        ...
