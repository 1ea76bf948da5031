"""Texts and finished answers on the device, and the lookups in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.host_copy import HostCopy
from outrider.core.sampling import Token
from outrider.kernels import lookup
from outrider.kernels.batch import MAX_WIDTH
from outrider.kernels.lookup import BUDGET, LENGTH, LIMITS, NO_TOKEN, PUBLIC, SHIFT, Found, History
from outrider.runners.cuda_graphs import PinnedInputs
from outrider.runners.device_state import DeviceState

Integers = NDArray[np.int64]
_MARGIN = 2 * MAX_WIDTH
"""Columns beyond a text, as the host knows it: what two rounds in flight may add to it."""
_MIN_COLUMNS = 1024


class AnswerRing:
    """Finished answers in a ring of tokens, the oldest overwritten first. One of a salt matches only its own."""

    def __init__(self, tokens: int, answers: int, device: torch.device) -> None:
        """tokens: max in all, a separator after each answer among them. answers: max number of them."""
        self.size, self.max_answers, self.head = tokens if answers else 0, answers, 0
        self._tokens = torch.full((self.size,), NO_TOKEN, dtype=torch.int32, device=device)
        self._owners = torch.zeros_like(self._tokens)
        self._order: deque[tuple[str | None, int]] = deque()
        """The salt and size of each answer, oldest first."""
        self._ids: dict[str, int] = {}
        self._next_id = 0

    @property
    def history(self) -> History:
        return History(self._tokens, self._owners, self.head, sum(size for _, size in self._order))

    def owner(self, salt: str) -> int:
        """The number of a salt whose answers are here; -1: there is none."""
        return self._ids.get(salt, -1)

    def add(self, salt: str | None, answer: Seq[Token]) -> None:
        """Write an answer, of one that is too long its last tokens. salt None: it matches for all."""
        answer = answer[max(0, len(answer) - self.size + 1) :]
        if not answer or self.size < 2:
            return
        if salt is not None and salt not in self._ids:
            self._ids[salt], self._next_id = self._next_id, self._next_id + 1
        owner = PUBLIC if salt is None else self._ids[salt]
        places = (self.head + np.arange(len(answer) + 1)) % self.size
        values = np.array([*answer, NO_TOKEN])
        sent = send(np.stack([places, values, np.full_like(values, owner)]), self._tokens.device)
        self._tokens[sent[0]] = sent[1].int()
        self._owners[sent[0]] = sent[2].int()
        self.head = int(places[-1] + 1) % self.size
        self._order.append((salt, len(values)))
        while len(self._order) > self.max_answers or sum(size for _, size in self._order) > self.size:
            self._order.popleft()
        live = {salt for salt, _ in self._order}
        self._ids = {salt: number for salt, number in self._ids.items() if salt in live}


class TextStore:
    """A row of tokens for each of `slots` sequences, and lookups of their ends for a batch at a time."""

    def __init__(self, slots: int, ring: AnswerRing, *, k: int, max_match: int, device: torch.device) -> None:
        """k: max tokens drafted. max_match: the longest match looked for."""
        self.ring, self.k, self.max_match, self.device = ring, k, max_match, device
        self.columns = Found.of(k)
        """Of what `look_up` returns."""
        self.width = LIMITS + 2 * (max_match + 1)
        self._texts = torch.zeros(slots, _MIN_COLUMNS, dtype=torch.int32, device=device)
        self._inputs = PinnedInputs(slots * self.width, device)
        self._kernels = _kernels(device)
        self.warm_up()

    def warm_up(self) -> None:
        """Run every kernel once: they are compiled now, not in the first round."""
        rows = np.zeros((1, self.width), dtype=np.int64)
        rows[0, LENGTH] = 2
        zeros = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        self.look_up(rows, DeviceState(zeros[:, 0] + 2, zeros, zeros, zeros[:, 0].clone())).array()
        history = self.ring.history._replace(used=min(self.ring.size, 1))
        self._kernels.find(self._texts, history, self._rows(rows), zeros[:, 0] + 2, self.max_match)

    @torch.inference_mode()
    def write(self, pieces: Seq[tuple[int, int, Seq[Token]]]) -> None:
        """Write tokens: of each piece the slot, the first column, the tokens. One copy for all, not waited for."""
        if not pieces:
            return
        self._make_room(max(first + len(tokens) for _, first, tokens in pieces))
        columns = self._texts.shape[1]
        places = np.concatenate([slot * columns + first + np.arange(len(tokens)) for slot, first, tokens in pieces])
        values = np.concatenate([np.array(tokens, dtype=np.int64) for _, _, tokens in pieces])
        sent = send(np.stack([places, values]), self.device)
        self._texts.view(-1)[sent[0]] = sent[1].int()

    def rows(self, texts: Integers, budgets: Integers, limits: Integers) -> Integers:
        """What `look_up` takes: int64 [B, width].

        texts int64 [B, 6]: SLOT, SHIFT, END, AIM, OWNER and LENGTH, see `kernels.lookup`. budgets [B]: max tokens to
        draft. limits [B, 2, 1 + max_match]: max tokens after a match of each length, in its own row and in the ring.
        """
        return np.concatenate([texts[:, :BUDGET], budgets[:, None], texts[:, -1:], limits.reshape(len(texts), -1)], 1)

    @torch.inference_mode()
    def look_up(self, rows: Integers, state: DeviceState | None = None) -> HostCopy:
        """The longest match of each text's end and what followed it, as `kernels.lookup.Found` says. Never waits.

        rows: as `rows` makes them. state: where the device has these texts, with tokens, where the
        host lacks the round in flight: what that gave them is written behind them first.
        """
        longest = int((rows[:, LENGTH] + rows[:, SHIFT]).max()) + _MARGIN  # the host may lack two rounds
        self._make_room(longest)
        sent = self._rows(rows)
        if state is not None and state.tokens is not None and state.accepted is not None:
            lengths = state.lengths
            self._kernels.append(self._texts, sent, lengths, state.last, state.tokens.contiguous(), state.accepted)
        else:
            lengths = sent[:, LENGTH].contiguous()
        history = self.ring.history
        keys = self._kernels.find(self._texts, history, sent, lengths, self.max_match, longest)
        return HostCopy(self._kernels.draft(self._texts, history, sent, lengths, keys, self.k))

    def _rows(self, rows: Integers) -> Tensor:
        self._inputs.array()[: rows.size] = rows.reshape(-1)
        self._inputs.send()
        return self._inputs.ints[: rows.size].view(rows.shape)

    def _make_room(self, columns: int) -> None:
        if columns > self._texts.shape[1]:
            old = self._texts
            self._texts = torch.zeros(len(old), 1 << (columns - 1).bit_length(), dtype=torch.int32, device=self.device)
            self._texts[:, : old.shape[1]] = old


def send(values: Integers, device: torch.device) -> Tensor:
    """Values on the device; the copy is not waited for."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _kernels(device: torch.device) -> ModuleType:
    """The lookups for a device. Triton is imported only where it runs."""
    if device.type != "cuda":
        return lookup
    from outrider.kernels import triton_lookup

    return triton_lookup
