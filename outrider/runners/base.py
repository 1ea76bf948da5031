"""The contract of a runner: a model with a cache that scores text and drafts in one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core.draft import Verdict
from outrider.core.draws import Draws
from outrider.core.errors import ConfigError
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.kernels.batch import MAX_WIDTH
from outrider.kvcache.pages import PagePool
from outrider.runners.device_state import DeviceState
from outrider.runners.pass_work import PassWork
from outrider.runners.reduced_head import ReducedHead

TELLING_ROWS = (1, 8, 4, 16, 2, 6, 12, 3, 5)
"""Rows of the passes that are timed where no pass is captured; times between them are interpolated."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What a pass returns. It is handed on by value: a runner remembers no last pass."""

    logits: Tensor
    """float32 [sum of span.rows, vocab]: span by span, after its last text token and after each draft node.

    Where `choices` are given, valid until the next pass, and empty if nobody reads the logits (`Draws.logits`).
    """
    spans: Seq[Span]
    """The spans that were scored."""
    features: Seq[Tensor] | None = None
    """For each span [its rows, taps * hidden], where layers are tapped; valid until the next pass."""
    positions: Callable[[], Tensor] | None = None
    """int64 [rows of logits]: the position in its text of the token that follows each row, computed on the device.

    None where positions follow from the host's sequences and drafts.
    """
    handle: Any = None
    """The runner's own data for `advance`; valid until the next pass."""
    choices: Tensor | None = None
    """int64 [rows of logits]: the target's choice after each row, where the pass made it; valid until the next pass."""

    def take(self, chosen: Seq[int]) -> Scores:
        """Spans, logits and features of these spans alone, in rising order."""
        if len(chosen) == len(self.spans):
            return self
        logits = self.logits.split([span.rows for span in self.spans])
        return replace(
            self,
            logits=torch.cat([logits[i] for i in chosen]),
            spans=[self.spans[i] for i in chosen],
            features=None if self.features is None else [self.features[i] for i in chosen],
        )


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where a draft model's chain begins: all but the sequence's last two tokens are cached."""

    seq_id: int
    seed: int
    temperature: float
    length: int = 2
    last: tuple[Token, Token] = (0, 0)
    """The length and last tokens are not set where a DeviceState holds them."""


class Runner(ABC):
    """A model with a paged cache. What it computes for one sequence never depends on another.

    The defaults are those of a runner that waits for its passes and taps no layers.
    """

    vocab_size: int
    """Columns of logits; ids at or beyond it do not exist."""
    context: int
    """Max tokens of one text that the model supports."""
    device: torch.device
    pool: PagePool
    """Which sequence owns which page. The engine opens, reserves and publishes; `keep` trims and `release` closes."""
    scores_trees: bool = True
    """False: the engine passes it only chains."""
    row_block: int = 1
    """Rows are computed in blocks of so many: one row beyond a full block costs as much as another full block."""
    rewinds: bool = True
    """Whether a span may start before the end of what is cached, which is then dropped; required of draft models."""
    max_width: int = MAX_WIDTH
    """Max rows of one decoding sequence in a pass that is launched behind another: its last token and its draft."""
    asynchronous: bool = False
    """Passes are launched and not waited for, so that the host works meanwhile."""
    joins: bool = False
    """Whether texts can be read behind a pass in flight, so that newcomers join the round behind it."""
    work: PassWork | None = None
    """What its passes read and compute; None where that is not known."""

    @abstractmethod
    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        """Read each span's tokens and draft in one pass. Every span's pages are reserved by the caller.

        after: the state of the spans' sequences, in their order, which only the device knows: each span is
        one token and a draft, and its `start` and `tokens` are ignored.
        """

    def read(self, spans: Seq[Span], after: DeviceState | None = None) -> DeviceState | None:
        """Read each span's tokens into the cache, without logits. If the runner `joins`, also behind a pass in flight.

        after: the state that the pass in flight leaves, which may have other sequences. Returns that state, in memory
        that this call does not overwrite; the scores of that pass may be overwritten as soon as the device executes
        this one.
        """
        self.score(spans)
        return after

    def score_and_choose(self, spans: Seq[Span], after: DeviceState | None, draws: Draws) -> Scores:
        """As `score`, for spans that are one token and a draft each: the scores may hold the target's choices too.

        draws: the seeds and temperatures of the spans' sequences, in their order.
        """
        return self.score(spans, after)

    def shared_tokens(self, lengths: Seq[int], longest: int) -> int:
        """The number of draft tokens that a pass takes in all where drafts of up to `longest` tokens share its rows.

        That pass costs no more than one for drafts of these lengths. 0: there is no such pass.
        """
        return 0

    def can_repeat(self, scores: Scores, after: DeviceState) -> bool:
        """Whether `repeat` can launch the last pass, whose scores these are, behind itself. after: its state."""
        return False

    def repeat(self, scores: Scores) -> Scores:
        """Launch the last pass again, with choices: the same sequences, drafts at the same device addresses."""
        raise NotImplementedError

    @abstractmethod
    def keep(self, span: Span, path: Seq[int], *, compacted: bool = False, trim: bool = True) -> int:
        """Keep the text and the draft nodes on `path` of a span that was scored, and drop its other nodes.

        Returns how many tokens of the sequence are cached now: the text and the path, or less where the cache cannot be
        rolled back and the rest is read again. compacted: `advance` has moved the accepted nodes together already.
        trim: give back the pages beyond; must be False while a pass in flight writes there.
        """

    @abstractmethod
    def release(self, seq_id: int, *, unpublish: bool = False) -> None:
        """Forget the sequence and close its pages; `unpublish`: what they hold is not shared."""

    def advance(self, scores: Scores, choices: Tensor) -> DeviceState | None:
        """The state that a pass leaves, given the target's choice after each row of its logits. Never waits.

        choices int64 [rows], negative where there is none. Accepted tree nodes are moved together in the cache. None
        where only the host can compute the state.
        """
        return None

    def advance_to(self, scores: Scores, verdicts: Seq[Verdict]) -> DeviceState | None:
        """As `advance`, for verdicts that the host knows, one for each span that asks for logits; None: no taps."""
        return None

    def tap(self, layers: Seq[int]) -> None:
        """Return these layers' outputs with every pass from now on. Called before `capture`."""
        if layers:
            raise ConfigError(
                f"{type(self).__name__} does not return layers' outputs, which this drafter needs; "
                "use a model of a native family, or a drafter that reads no hidden states"
            )

    def capture(self, batch: int, width: int) -> Iterator[str]:
        """Compile, capture and allocate for passes of up to `batch` sequences of up to `width` rows.

        Yields a description of each part that is ready. Afterwards no pass of any such size compiles, captures or
        allocates.
        """
        return iter(())

    def pass_shapes(self, batch: int, width: int) -> list[tuple[int, int]]:
        """The (sequences, rows of each) of the passes to time, the most telling first: other times are interpolated.

        Where passes are captured: every uniform shape captured for up to `batch` sequences of up to `width` rows.
        """
        return [(1, rows) for rows in TELLING_ROWS if rows <= max(width, 2)]

    def packed_shapes(self, batch: int, width: int) -> list[tuple[int, int, int]]:
        """The (sequences, max rows of one, rows of all) of captured passes that take sequences of different widths."""
        return []

    # for draft models only

    def draft_chains(
        self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None
    ) -> Seq[Seq[Token]] | None:
        """Draft `steps` tokens after each start on the device, in one go; None where the runner cannot.

        The result may be `DeviceRow`s. after: the state of the starts' sequences, in their order.
        """
        return None

    def capture_chains(self, batch: int, steps: Seq[int]) -> Iterator[str]:
        """As `capture`, for chains of each of these lengths."""
        return iter(())

    def reduce_vocab(self, tokens: Seq[Token]) -> ReducedHead | None:
        """Score only these tokens from now on, or all where none are given. Returns None where all are scored.

        `score` returns -inf for every other token; the first token of `draft_chains` may still be any.
        """
        return None
