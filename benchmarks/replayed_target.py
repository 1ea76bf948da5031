"""A target that repeats recorded texts, and a clock that goes by tables, for replay.py.

Nothing is computed but decisions: a pass takes what the table says, and its choices are the recorded tokens. Importing
it replaces the clock of the engine, copies from the device, and how matches are looked for, for the whole process.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider.core import host_copy
from outrider.core.device_row import DeviceRow
from outrider.core.draft import Draft
from outrider.core.draws import Draws
from outrider.core.sampling import Token
from outrider.core.sequence import Span
from outrider.drafters import device_lookup  # noqa: F401 - what it imports is replaced below
from outrider.engine import drafting, engine, host_time
from outrider.kernels import lookup
from outrider.kernels.accept import accept_chains
from outrider.runners.base import ChainStart, Scores
from outrider.runners.cuda_graphs import padded_batch
from outrider.runners.device_state import DeviceState, resolve_spans, row_positions
from outrider.testing.toy import ToyRunner

WIDTHS = (1, 2, 4, 6, 8, 12, 16)
"""Rows of a sequence that passes are captured for; packed ones have as many on average."""
BATCHES = (1, 2, 4, 8, 16, 32, 64)
WRONG = 0
"""A token that no text has."""


class Clock:
    """The host's time, and when the device will have done what was launched."""

    def __init__(self) -> None:
        self.now = self._busy_until = 0.0

    def launch(self, seconds: float) -> None:
        self._busy_until = max(self._busy_until, self.now) + seconds

    def copied(self) -> float:
        """When a copy that is launched now arrives."""
        return self._busy_until


CLOCK = Clock()


class Copy(host_copy.HostCopy):
    """Arrives when the device has done all that was launched before it."""

    __slots__ = ("_arrives",)

    def __init__(self, tokens: Tensor) -> None:
        super().__init__(tokens)
        self._array, self._arrives = tokens.numpy().copy(), CLOCK.copied()

    def array(self) -> np.ndarray[Any, Any]:
        CLOCK.now = max(CLOCK.now, self._arrives)
        return self._array  # type: ignore[return-value]

    def kept(self) -> Copy:
        return self


@dataclass(frozen=True)
class Times:
    """Milliseconds: of passes by batch and rows, of a draft model's step by batch, and of the rest."""

    passes: Mapping[int, Mapping[int, float]]
    step: Mapping[int, float]
    lookup: float = 0.016
    host: float = 0.12
    """The host's work in any round; beyond that, where one is launched anew, planned, looked up, or a text ends."""
    launch: float = 0.12
    plan: float = 0.25
    looking: float = 0.1
    ending: float = 0.15
    prompt_token: float = 0.006

    def pass_seconds(self, batch: int, rows: int) -> float:
        """batch: of the engine; smaller ones take as long for as many rows."""
        known = self.passes[batch]
        return float(np.interp(rows, [*known], [*known.values()])) / 1e3


@dataclass(eq=False)
class _Pass:
    """A captured pass: what it was launched with last, and where it leaves its sequences."""

    spans: Seq[Span]
    behind: bool
    """It was launched behind another."""
    state: DeviceState


class ReplayedTarget(ToyRunner):
    """Says what the recorded texts say, whatever is drafted, and takes the time of the table."""

    asynchronous = joins = True

    def __init__(self, batch: int, vocab_size: int, times: Times) -> None:
        super().__init__(vocab_size, context=1024, cache_tokens=1024 * batch)
        self.batch, self.times, self._noise, self._last = batch, times, random.Random(1), None
        self.texts: dict[int, list[Token]] = {}
        """By sequence: prompt and answer."""

    def score(self, spans: Seq[Span], after: DeviceState | None = None) -> Scores:
        self._last: _Pass | None = None
        spans = spans if after is None else resolve_spans(spans, after)
        chosen = self._choices(spans)
        logits = torch.zeros(len(chosen), self.vocab_size).scatter_(1, chosen[:, None], 1e4)
        self._launch(spans)
        return Scores(logits, spans, positions=None if after is None else lambda: row_positions(spans))

    def read(self, spans: Seq[Span], after: DeviceState | None = None) -> DeviceState | None:
        self._launch(spans)
        return after and after.copied()

    def score_and_choose(self, spans: Seq[Span], after: DeviceState | None, draws: Draws) -> Scores:
        CLOCK.now += self.times.launch / 1e3
        whole = spans if after is None else resolve_spans(spans, after)
        self._launch(whole)
        choices = self._choices(whole)
        state = _state_after(whole, choices)
        self._last = _Pass(spans, after is not None, state)
        return Scores(torch.empty(0, self.vocab_size), whole, handle=self._last, choices=choices)

    def advance(self, scores: Scores, choices: Tensor) -> DeviceState | None:
        if scores.handle is not None:
            return scores.handle.state
        if not all(len(span.tokens) == 1 and span.wanted for span in scores.spans):
            return None
        return _state_after(scores.spans, choices)

    def can_repeat(self, scores: Scores, after: DeviceState) -> bool:
        made = scores.handle
        return made is not None and made is self._last and made.behind and after.lengths is made.state.lengths

    def repeat(self, scores: Scores) -> Scores:
        made = scores.handle
        texts = zip(made.spans, made.state.lengths.tolist(), made.state.last.tolist(), strict=True)
        spans = [Span(span.seq_id, length - 1, (last[1],), _on_device(span.draft)) for span, length, last in texts]
        self._launch(spans)
        choices = self._choices(spans)
        new = _state_after(spans, choices)
        for part in ("lengths", "last", "tokens", "accepted"):  # in place, as a captured pass does
            getattr(made.state, part).copy_(getattr(new, part))
        return replace(scores, choices=choices)

    def keep(self, span: Span, path: Seq[int], *, compacted: bool = False, trim: bool = True) -> int:
        end = span.start + len(span.tokens) + len(path)
        if trim:
            self.pool.trim(span.seq_id, end)
        return end

    def pass_shapes(self, batch: int, width: int) -> list[tuple[int, int]]:
        return [(b, w) for b in BATCHES if b <= batch for w in WIDTHS if w <= width]

    def packed_shapes(self, batch: int, width: int) -> list[tuple[int, int, int]]:
        return [(b, WIDTHS[-1], b * w) for b in BATCHES if b <= batch for w in WIDTHS[1:-1]]

    def _choices(self, spans: Seq[Span]) -> Tensor:
        """int64 [rows]: the recorded token after each row, as far as its draft is what was recorded."""
        chosen: list[Token] = []
        for span in spans:
            if not span.wanted:
                continue
            text, at = self.texts[span.seq_id], span.start + len(span.tokens)
            right = True
            for place, drafted in enumerate((None, *span.draft.tokens), at):
                right = right and (drafted is None or drafted == recorded_token(text, place - 1))
                chosen.append(recorded_token(text, place) if right else WRONG)
        return torch.tensor(chosen, dtype=torch.int64)

    def _launch(self, spans: Seq[Span]) -> None:
        """A pass of all that decode, in the smallest shape that takes them, and of all that is read.

        It is chosen before anybody knows what is drafted: padding of a draft has rows, too, unless drafts share them.
        """
        decoding = [span for span in spans if len(span.tokens) == 1]
        seconds = self.times.prompt_token / 1e3 * sum(len(span.tokens) for span in spans)
        if decoding:
            widest, scored = max(span.width for span in decoding), sum(span.scored for span in decoding)
            rows = pass_rows(len(decoding), widest, scored)
            seconds = max(seconds, self.times.pass_seconds(self.batch, rows) * (1 + self._noise.gauss(0, 0.01)))
        CLOCK.launch(seconds)


class ReplayedDraft(ReplayedTarget):
    """A draft model that knows the target's texts, and is right at random."""

    def __init__(self, target: ReplayedTarget, rate_of: Callable[[int], float]) -> None:
        """rate_of: how often it is right, of a sequence."""
        super().__init__(target.batch, target.vocab_size, target.times)
        self.texts, self.rate_of = target.texts, rate_of

    def draft_chains(self, starts: Seq[ChainStart], steps: int, after: DeviceState | None = None) -> list[list[Token]]:
        CLOCK.launch(steps * self.times.step[self.batch] / 1e3)
        lengths = [start.length for start in starts] if after is None else after.lengths.tolist()
        return [
            [self._guess(start.seq_id, place) for place in range(length, length + steps)]
            for start, length in zip(starts, lengths, strict=True)
        ]

    def _guess(self, seq_id: int, place: int) -> Token:
        luck = random.Random(seq_id << 20 | place).random()  # the same whenever it is asked
        return recorded_token(self.texts[seq_id], place) if luck < self.rate_of(seq_id) else WRONG


def pass_rows(count: int, widest: int, scored: int) -> int:
    """Rows of the smallest pass for so many sequences, the widest of so many rows; scored: what all have together."""
    batch = padded_batch(count)
    return min([even_rows(count, widest), *(batch * w for w in WIDTHS if batch * w >= scored)])


def even_rows(count: int, widest: int) -> int:
    """Rows of a pass that has as many for every sequence."""
    return padded_batch(count) * min(w for w in WIDTHS if w >= widest)


def recorded_token(text: Seq[Token], place: int) -> Token:
    return text[place] if place < len(text) else 1


def _on_device(draft: Draft) -> Draft:
    tokens = draft.tokens
    if not isinstance(tokens, DeviceRow):
        return draft
    return Draft(tuple(tokens.block.tokens[tokens.row, : len(tokens)].tolist()), share=draft.share)


def _state_after(spans: Seq[Span], choices: Tensor) -> DeviceState:
    ids = pad_sequence([torch.tensor([*span.tokens, *span.draft.tokens]) for span in spans], batch_first=True)
    starts, widths = torch.tensor([span.start for span in spans]), torch.tensor([span.width for span in spans])
    lengths, last, accepted = accept_chains(ids, starts, widths, choices)
    return DeviceState(lengths, last, ids, accepted)


def find(
    texts: Tensor, history: lookup.History, rows: Tensor, lengths: Tensor, max_match: int, columns: int = 0
) -> Tensor:
    """As `kernels.lookup.find`, but only where a text's last token is: the history is long."""
    best: list[int] = []
    size, used = len(history.tokens), history.used
    newest = (int(history.head) + np.arange(size - used, size)) % size if used else np.arange(0)
    ring, owners = history.tokens.numpy()[newest], history.owners.numpy()[newest]
    for row, length in zip(rows.numpy(), lengths.numpy(), strict=True):
        own, end = texts[int(row[lookup.SLOT])].numpy(), int(length + row[lookup.SHIFT])
        stop = end if row[lookup.END] < 0 else int(row[lookup.END])
        tail = own[max(0, end - max_match) : end]
        places = np.flatnonzero(own[: max(0, stop - 1)] == tail[-1]) + 1
        key = _best_key(own, places, tail, 1, end - int(row[lookup.AIM]))
        places = np.flatnonzero(ring[: max(0, used - 1)] == tail[-1]) + 1
        allowed = (owners == row[lookup.OWNER]) | (owners == lookup.PUBLIC)
        best.append(max(key, _best_key(ring, places[allowed[places]], tail, 0, used)))
    return torch.tensor(best, dtype=torch.int64)


def _best_key(tokens: Any, places: Any, tail: Any, source: int, target: int) -> int:
    if not len(places):
        return 0
    match, alive = np.ones(len(places), np.int64), np.arange(len(places))
    for back in range(1, len(tail)):
        at = places[alive] - 1 - back
        alive = alive[(at >= 0) & (tokens[np.maximum(at, 0)] == tail[-1 - back])]
        match[alive] += 1
    offset = places - target
    near = (lookup._MAX_DISTANCE - np.abs(offset)) << 1 | (offset > 0)
    return int((match << (lookup._DISTANCE_BITS + 1) | source << lookup._DISTANCE_BITS | near).max())


for module in (drafting, engine, host_time):
    module.time = SimpleNamespace(perf_counter=lambda: CLOCK.now)  # type: ignore[assignment]
for name, module in list(sys.modules.items()):
    if name.startswith("outrider.") and getattr(module, "HostCopy", None) is not None:
        module.HostCopy = Copy  # type: ignore[attr-defined]
reference_find, lookup.find = lookup.find, find
