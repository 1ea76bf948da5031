"""Texts and finished answers on the device, and the lookups in them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from operator import is_
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.host_copy import HostCopy
from outrider.core.pinned_inputs import PinnedStage
from outrider.core.sampling import Token
from outrider.kernels.batch import MAX_WIDTH
from outrider.kernels.lookup import CHANCE_SHIFT, MAX_CHANCE, NO_TOKEN, PUBLIC, Found, Gains, History, look_up
from outrider.runners.device_state import DeviceState

if TYPE_CHECKING:
    from outrider.runners.graphed_lookup import GraphedLookups

Integers = NDArray[np.int64]
_MARGIN = 2 * MAX_WIDTH
"""Columns kept free behind a text as the host knows it: two rounds in flight may add so much."""
_MIN_COLUMNS = 1024


class AnswerRing:
    """Finished answers in a ring of tokens, the oldest overwritten first. Answers match only texts of their salt."""

    def __init__(self, tokens: int, answers: int, device: torch.device) -> None:
        """tokens: max tokens in all, a separator after each answer included. answers: max answers."""
        self.size, self.max_answers, self.head = tokens if answers else 0, answers, 0
        self._stage = PinnedStage(device)
        self._ring = torch.zeros(2, self.size, dtype=torch.int32, device=device)
        """Tokens, and the owner of the answer each is of."""
        self._ring[0] = NO_TOKEN
        self._parts = self._ring[0], self._ring[1]
        self._order: deque[tuple[str | None, int]] = deque()
        """The salt and size of each answer, oldest first."""
        self._used = 0
        """Tokens of those answers, with separators."""
        self._answers: Counter[str | None] = Counter()
        """The number of answers of each salt."""
        self._ids: dict[str, int] = {}
        self._next_id = 0

    @property
    def history(self) -> History:
        return History(*self._parts, self.head, self._used)

    def owner(self, salt: str) -> int:
        """The owner number of a salt; -1: no answer of that salt is here."""
        return self._ids.get(salt, -1)

    def add(self, salt: str | None, answer: Seq[Token]) -> None:
        """Write an answer; of one that is too long, its last tokens. salt None: it matches for every text."""
        self.add_all([(salt, answer)])

    def add_all(self, answers: Iterable[tuple[str | None, Seq[Token]]]) -> None:
        """Write answers, each as `add` does, in one copy."""
        first, values, owners, sizes = self.head, list[Token](), list[int](), list[int]()
        for salt, answer in answers:
            if not answer or self.size < 2:
                continue
            kept = answer[max(0, len(answer) - self.size + 1) :]
            values += kept
            values.append(NO_TOKEN)
            sizes.append(len(kept) + 1)
            owners.append(self._enter(salt, len(kept) + 1))
        if values:
            places = (first + np.arange(len(values))) % self.size
            written = np.stack([places, np.array(values), np.repeat(owners, sizes)])[:, -self.size :]  # each place once
            sent = self._stage.send(written)
            self._ring.index_copy_(1, sent[0], sent[1:].int())

    def _enter(self, salt: str | None, size: int) -> int:
        """Make room for an answer of `size` tokens, its separator included; returns its owner number."""
        if salt is not None and salt not in self._ids:
            self._ids[salt], self._next_id = self._next_id, self._next_id + 1
        owner = PUBLIC if salt is None else self._ids[salt]
        self.head = (self.head + size) % self.size
        self._order.append((salt, size))
        self._used += size
        self._answers[salt] += 1
        while len(self._order) > self.max_answers or self._used > self.size:
            oldest, size = self._order.popleft()
            self._used -= size
            self._answers[oldest] -= 1
            if not self._answers[oldest]:
                del self._answers[oldest]
                if oldest is not None:
                    del self._ids[oldest]
        return owner


class LookupRow(NamedTuple):
    """A text whose end is looked up: the columns of `kernels.lookup`, in their order."""

    slot: int
    shift: int
    end: int
    aim: int
    owner: int
    budget: int
    length: int
    gain: int
    """1 + its row in the origin of the state; 0: the host knows the whole text."""


COLUMN = LookupRow(*range(len(LookupRow._fields)))
"""The index of each of these columns in a row of numbers."""


class TextStore:
    """A row of tokens for each of `slots` sequences, and lookups of the ends of up to `max_batch` of them at a time."""

    def __init__(
        self, slots: int, ring: AnswerRing, *, max_batch: int, k: int, max_match: int, device: torch.device
    ) -> None:
        """k: max tokens drafted. max_match: the longest match looked for."""
        self.ring, self.k, self.max_match, self.device = ring, k, max_match, device
        self._stage = PinnedStage(device)
        self.columns = Found.of(k)
        """The columns of what `look_up` returns."""
        self._texts = torch.zeros(slots, _MIN_COLUMNS, dtype=torch.int32, device=device)
        self._graphs = _graphs(max_batch, ring.history, k, max_match)
        self._last: tuple[Tensor, Tensor] | None = None
        """Without graphs: the inputs of the last lookup, and what was found."""
        self._sent: tuple[DeviceState, History] | None = None
        """With graphs: what the last lookup was repeated with. To repeat it with the same, nothing is sent."""

    @property
    def graphs(self) -> GraphedLookups | None:
        """Captured lookups; None where nothing is captured."""
        return self._graphs

    @torch.inference_mode()
    def write(self, pieces: Seq[tuple[int, int, Seq[Token]]]) -> None:
        """Write tokens: pieces of (slot, first column, tokens). One copy for all, not waited for."""
        if not pieces:
            return
        self._make_room(max(first + len(tokens) for _, first, tokens in pieces))
        columns = self._texts.shape[1]
        places = np.concatenate([slot * columns + first + np.arange(len(tokens)) for slot, first, tokens in pieces])
        values = np.concatenate([np.array(tokens, dtype=np.int64) for _, _, tokens in pieces])
        sent = self._stage.send(np.stack([places, values]))
        self._texts.view(-1).index_copy_(0, sent[0], sent[1].int())

    @torch.inference_mode()
    def look_up(self, texts: Integers | Seq[LookupRow], limits: Integers, state: DeviceState | None = None) -> HostCopy:
        """The longest match of each text's end and what followed it, as `kernels.lookup.Found` says. Never waits.

        texts: int64 [B, columns], as `COLUMN` says, or a `LookupRow` each. limits int64 [B, 2, 1 + max_match]: what a
        match of each length allows, in its own row and in the ring, as `pack_limits` packs it. state: the state after
        the round in flight, with tokens: what the texts gained in that round is written behind them first. On the
        device, what is found is valid until the next lookup.
        """
        rows = np.asarray(texts, np.int64)
        longest = int((rows[:, COLUMN.length] + rows[:, COLUMN.shift]).max()) + _MARGIN
        self._make_room(longest)
        gains, self._sent = None if state is None else _gains(state), None
        if self._graphs is not None:
            return HostCopy(self._graphs.run(self._texts, self.ring.history, rows, limits, gains))
        sent = torch.from_numpy(np.concatenate([rows, limits.reshape(len(rows), -1)], 1))
        found = look_up(self._texts, self.ring.history, sent, gains, self.max_match, self.k, longest)
        self._last = sent, found
        return HostCopy(found).kept()

    def look_up_again(self, count: int, longest: int, state: DeviceState) -> HostCopy | None:
        """Repeat the last lookup, of the same `count` texts, behind the round of this state, which is of them all.

        What is found is at the same address. longest: columns of the longest text as the host knows it. None where
        there is no room for what may come.
        """
        if longest + _MARGIN > self._texts.shape[1]:
            return None
        if self._graphs is None:
            return self._find_again(count, state)
        history = self.ring.history
        if self._sent is not None and self._sent[0] is state and self._sent[1][2:] == history[2:]:
            return HostCopy(self._graphs.replay(count))
        gains, origin = _gains(state), state.origin
        own = origin.lengths, origin.last, origin.tokens, origin.accepted
        self._sent = (state, history) if all(map(is_, gains, own)) else None  # copies hold for this lookup alone
        return HostCopy(self._graphs.run_again(self._texts, history, gains, count))

    @torch.inference_mode()
    def _find_again(self, count: int, state: DeviceState) -> HostCopy | None:
        """As `look_up_again`, without graphs."""
        if self._last is None:
            return None
        sent, found = self._last
        sent[:, COLUMN.gain] = torch.arange(1, count + 1)
        found.copy_(look_up(self._texts, self.ring.history, sent, _gains(state), self.max_match, self.k))
        return HostCopy(found).kept()

    def _make_room(self, columns: int) -> None:
        if columns > self._texts.shape[1]:
            old, self._sent = self._texts, None
            self._texts = torch.zeros(len(old), 1 << (columns - 1).bit_length(), dtype=torch.int32, device=self.device)
            self._texts[:, : old.shape[1]] = old


def pack_limits(tokens: Integers, chances: NDArray[np.float64]) -> Integers:
    """Limits as `TextStore.look_up` takes them: max tokens after a match, and the mean chance of each, from 0 to 1."""
    return tokens | np.rint(chances * MAX_CHANCE).astype(np.int64) << CHANCE_SHIFT


def _gains(state: DeviceState) -> Gains:
    """The gains of all sequences of the state's origin: nothing is gathered."""
    origin = state.origin
    if origin.tokens is None or origin.accepted is None:
        raise ValueError("a lookup behind a round in flight needs the tokens that it kept")
    return Gains(*(part.contiguous() for part in (origin.lengths, origin.last, origin.tokens, origin.accepted)))


def _graphs(max_batch: int, history: History, k: int, max_match: int) -> GraphedLookups | None:
    """Captured lookups on CUDA. Triton is imported only there."""
    if history.tokens.device.type != "cuda":
        return None
    from outrider.runners.graphed_lookup import GraphedLookups

    return GraphedLookups(max_batch, history, k=k, max_match=max_match)
