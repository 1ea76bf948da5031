"""Where a round leaves its sequences, on the device: known there before the host has read the round's tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import count
from typing import cast

import torch
from torch import Tensor

from outrider.core.sampling import Token
from outrider.core.sequence import Span

KnownEnd = tuple[int, Token, Token]
"""A sequence that the host knows the state of: its length and last two tokens."""


class DeviceState:
    """The state of B sequences after a round, in the round's order. All tensors are on the target's device.

    A state of some of another's sequences (`take`), or with newcomers behind them (`joined`), gathers a tensor only
    when it is asked for: captured passes fetch the rows from `origin`.
    """

    __slots__ = ("_gathered", "_index", "_parts", "drafted", "origin", "rows")

    def __init__(
        self,
        lengths: Tensor,
        last: Tensor,
        tokens: Tensor | None = None,
        accepted: Tensor | None = None,
        features: Tensor | None = None,
        drafted: tuple[int, ...] | None = None,
    ) -> None:
        """drafted: for each sequence, the number of tokens drafted in the round, as the host knows: it gained at most
        one more. -1: a newcomer, which gains nothing. None: unknown.

        For the other arguments see the properties of the same names.
        """
        self._parts = lengths, last, tokens, accepted, features
        self._gathered: dict[int, Tensor | None] = {}
        self._index: Tensor | None = None
        self.drafted = drafted
        self.rows: Seq[int | KnownEnd] | None = None
        """For each sequence its row in `origin`, or its KnownEnd if it is a newcomer; None: all rows of `origin`."""
        self.origin = self
        """The state that holds the tensors: this one, or the one that it was taken from."""

    def __len__(self) -> int:
        return len(self.lengths) if self.rows is None else len(self.rows)

    @property
    def newcomers(self) -> int:
        """The number of sequences at its end that were in no round yet: the host knows their state."""
        return 0 if self.rows is None else sum([not isinstance(row, int) for row in self.rows])

    @property
    def lengths(self) -> Tensor:
        """int64 [B]: the number of tokens of each text, all but the last of which are cached."""
        return cast(Tensor, self._part(0))

    @property
    def last(self) -> Tensor:
        """int64 [B, 2]: the last two tokens of each text."""
        return cast(Tensor, self._part(1))

    @property
    def tokens(self) -> Tensor | None:
        """int64 [B, W]: the tokens read and kept: the text's last, then the accepted ones. Valid until the next pass.

        None after trees where no layer is tapped, since nobody reads it then, and where there are newcomers.
        """
        return self._part(2)

    @property
    def accepted(self) -> Tensor | None:
        """int64 [B]: the number of accepted tokens; columns of `tokens` beyond 1 + accepted are undefined."""
        return self._part(3)

    @property
    def features(self) -> Tensor | None:
        """[B, W, taps * hidden]: the tapped outputs at `tokens`."""
        return self._part(4)

    @property
    def held(self) -> list[Tensor]:
        """All tensors of `origin`."""
        return [part for part in self.origin._parts if part is not None]

    def with_drafted(self, drafted: tuple[int, ...]) -> DeviceState:
        """The same state with `drafted` set."""
        return DeviceState(self.lengths, self.last, self.tokens, self.accepted, self.features, drafted)

    def first(self, count: int) -> DeviceState:
        """A view of the first sequences."""
        if count == len(self):
            return self
        parts = (self.lengths, self.last, self.tokens, self.accepted, self.features)
        return DeviceState(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]

    def joined(self, texts: Seq[Seq[Token]]) -> DeviceState:
        """The state of these sequences and, behind them, newcomers with these texts, cached but for the last token."""
        known = [(len(text), text[-2] if len(text) > 1 else 0, text[-1]) for text in texts]
        drafted = None if self.drafted is None else (*self.drafted, *[-1] * len(known))
        return self._some([*(range(len(self)) if self.rows is None else self.rows), *known], drafted)

    def take(self, rows: Seq[int]) -> DeviceState:
        """The state of some of the sequences, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        drafted = None if self.drafted is None else tuple(self.drafted[row] for row in rows)
        return self._some(rows if self.rows is None else [self.rows[row] for row in rows], drafted)

    def copied(self) -> DeviceState:
        """A copy of lengths and last tokens, which no pass overwrites."""
        if self.rows is None:
            return DeviceState(self.lengths.clone(), self.last.clone(), drafted=self.drafted)
        return DeviceState(self.lengths, self.last, drafted=self.drafted)

    def _some(self, rows: Seq[int | KnownEnd], drafted: tuple[int, ...] | None) -> DeviceState:
        state = DeviceState(*self._parts, drafted)
        state.rows, state.origin = rows, self.origin
        return state

    def _part(self, part: int) -> Tensor | None:
        """One of the tensors, gathered once."""
        whole = self._parts[part]
        if self.rows is None or whole is None:
            return whole
        if part not in self._gathered:
            self._gathered[part] = self._gather(part, whole, self.rows)
        return self._gathered[part]

    def _gather(self, part: int, whole: Tensor, rows: Seq[int | KnownEnd]) -> Tensor | None:
        new = [row for row in rows if not isinstance(row, int)]
        if new and part > 1:  # newcomers have no accepted tokens
            return None
        places = count(len(whole))
        index = [row if isinstance(row, int) else next(places) for row in rows]
        if new:
            ends = [length if part == 0 else last for length, *last in new]
            whole = torch.cat([whole, _sent(ends, whole.device)])
        if index == [*range(len(whole))]:
            return whole
        if self._index is None:
            self._index = _sent(index, whole.device)
        return whole[self._index]


def _sent(numbers: Seq[int | list[int]], device: torch.device) -> Tensor:
    """int64: the numbers on a device. Never waits."""
    made = torch.tensor(numbers, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def resolve_spans(spans: Seq[Span], after: DeviceState) -> list[Span]:
    """The spans with the start and the token of `after`, read on the host: for a runner that waits for its passes."""
    known = zip(spans, after.lengths.tolist(), after.last.tolist(), strict=True)
    return [span._replace(start=length - 1, tokens=(last[1],)) for span, length, last in known]


def row_positions(spans: Seq[Span]) -> Tensor:
    """int64 [rows of logits]: the position of the token that follows each row that these spans ask for."""
    ends = [(span.start + len(span.tokens), (0, *span.draft.depths())) for span in spans if span.wanted]
    return torch.tensor([end + depth for end, depths in ends for depth in depths], dtype=torch.int64)
