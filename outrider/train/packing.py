"""Answers packed into rows of one length: a row holds several texts behind each other, told apart by number."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.train.corpus import Corpus

OPEN_ROWS = 64  # rows that still take texts while packing
PADDING = -1


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows of L tokens. All tensors are [R, L]."""

    tokens: Tensor  # int64
    texts: Tensor  # int64: which text of the row a token belongs to, PADDING for none
    positions: Tensor  # int64: within the text
    in_answer: Tensor  # bool: part of an answer, not of its prompt
    answers: Tensor  # int64: which answer of the corpus, PADDING for none

    def to(self, device: torch.device) -> PackedRows:
        cuda = device.type == "cuda"
        parts = (getattr(self, f.name) for f in fields(self))
        moved = (part.pin_memory().to(device, non_blocking=True) if cuda else part for part in parts)
        return PackedRows(*moved)

    def rows(self, begin: int, end: int) -> PackedRows:
        return PackedRows(*(getattr(self, f.name)[begin:end] for f in fields(self)))

    def take(self, rows: Tensor) -> PackedRows:
        """rows: int64 [N]"""
        return PackedRows(*(getattr(self, f.name)[rows] for f in fields(self)))

    def __len__(self) -> int:
        return len(self.tokens)


def pack_order(lengths: NDArray[np.int64], length: int) -> list[list[int]]:
    """Which texts share a row: each goes into the fullest open row that has room. Longer texts are cut to `length`."""
    done: list[list[int]] = []
    rows: list[tuple[int, list[int]]] = []  # room, texts
    for i, size in enumerate(np.minimum(lengths, length).tolist()):
        fitting = [row for row in range(len(rows)) if rows[row][0] >= size]
        if fitting:
            best = min(fitting, key=lambda row: rows[row][0])
            room, texts = rows[best]
            texts.append(i)
            rows[best] = (room - size, texts)
            continue
        if len(rows) == OPEN_ROWS:
            fullest = min(range(OPEN_ROWS), key=lambda row: rows[row][0])
            done.append(rows.pop(fullest)[1])
        rows.append((length - size, [i]))
    return done + [texts for _, texts in rows]


def pack(corpus: Corpus, chosen: NDArray[np.int64], length: int) -> PackedRows:
    """The chosen answers in rows of `length`, in about their order."""
    lengths = corpus.starts[chosen + 1] - corpus.starts[chosen]
    order = pack_order(lengths, length)
    shape = len(order), length
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    texts, answers = np.full(shape, PADDING, np.int64), np.full(shape, PADDING, np.int64)
    in_answer = np.zeros(shape, np.bool_)
    for row, members in enumerate(order):
        at = 0
        for text, member in enumerate(members):
            answer = int(chosen[member])
            ids = corpus.text(answer)[:length]
            end = at + len(ids)
            tokens[row, at:end], positions[row, at:end] = ids, np.arange(len(ids))
            texts[row, at:end], answers[row, at:end] = text, answer
            in_answer[row, at + int(corpus.prompt_lens[answer]) : end] = True
            at = end
    return PackedRows(*map(torch.from_numpy, (tokens, texts, positions, in_answer, answers)))
