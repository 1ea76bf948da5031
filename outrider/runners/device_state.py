"""Where a round leaves its sequences, on the device: known there before the host has read the round's tokens."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.sampling import Token
from outrider.core.sequence import Span


@dataclass(frozen=True, slots=True)
class DeviceState:
    """B sequences after a round, in the round's order. All tensors are on the target's device."""

    lengths: Tensor  # int64 [B]: tokens of each text; all but the last are cached
    last: Tensor  # int64 [B, 2]: its last two tokens
    # int64 [B, W]: the tokens read and kept: the text's last, then the accepted; valid until the next pass. None after
    # trees where no layer is tapped, which nobody reads
    tokens: Tensor | None = None
    accepted: Tensor | None = None  # int64 [B]: how many those are; columns beyond 1 + accepted are undefined
    features: Tensor | None = None  # [B, W, taps * hidden]: the tapped outputs at those tokens
    drafted: tuple[int, ...] | None = None
    """How many tokens were drafted for each, as the host knows: it gained one token more at most. None: unknown."""

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def with_drafted(self, drafted: tuple[int, ...]) -> DeviceState:
        """The same, and how many tokens were drafted for each."""
        return DeviceState(self.lengths, self.last, self.tokens, self.accepted, self.features, drafted)

    def first(self, count: int) -> DeviceState:
        """A view of the first sequences."""
        if count == len(self):
            return self
        parts = (self.lengths, self.last, self.tokens, self.accepted, self.features)
        return DeviceState(*(None if part is None else part[:count] for part in parts))  # type: ignore[arg-type]

    def joined(self, texts: Seq[Seq[Token]]) -> DeviceState:
        """Where sequences are, these and behind them newcomers, all of whose texts but the last token is cached."""
        known = [(len(text), text[-2] if len(text) > 1 else 0, text[-1]) for text in texts]
        rows = _sent(known, self.lengths.device)
        return DeviceState(torch.cat([self.lengths, rows[:, 0]]), torch.cat([self.last, rows[:, 1:]]))

    def take(self, rows: Seq[int]) -> DeviceState:
        """The state of some of the sequences, in this order."""
        if list(rows) == list(range(len(self))):
            return self
        index = _sent(rows, self.lengths.device)

        def some(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[index]

        drafted = None if self.drafted is None else tuple(self.drafted[row] for row in rows)
        return DeviceState(
            self.lengths[index], self.last[index], some(self.tokens), some(self.accepted), some(self.features), drafted
        )


def _sent(numbers: Seq[int] | Seq[tuple[int, ...]], device: torch.device) -> Tensor:
    """int64: the numbers on a device. Never waits."""
    made = torch.tensor(numbers, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def resolve_spans(spans: Seq[Span], after: DeviceState) -> list[Span]:
    """The spans with the start and the token of `after`, read on the host: for a runner that waits."""
    known = zip(spans, after.lengths.tolist(), after.last.tolist(), strict=True)
    return [span._replace(start=length - 1, tokens=(last[1],)) for span, length, last in known]


def row_positions(spans: Seq[Span]) -> Tensor:
    """int64 [rows of logits]: the place in its text of the token that follows each row that these spans ask for."""
    ends = [(span.start + len(span.tokens), (0, *span.draft.depths())) for span in spans if span.wanted]
    return torch.tensor([end + depth for end, depths in ends for depth in depths], dtype=torch.int64)
