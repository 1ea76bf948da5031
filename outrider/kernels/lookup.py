"""Where the end of a text occurred before, in plain PyTorch: the reference of triton_lookup.py, on any device.

Texts are rows of int32 [slots, columns]. A *place* is the index of a token that followed a match. Each of B sequences
is described by a row of int64 [B, LIMITS + 2 * (max match + 1)], whose columns are named below. Nothing is found for a
row of zeros, which pads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SLOT, SHIFT, END, AIM, OWNER, BUDGET, LENGTH, GAIN, LIMITS = range(9)
"""The row of its text; the index of the text's first token there (what comes before is a text of its own to match);
the first place that is not looked at, negative: where the text ends; how far before the text's end the place is
expected, 0 prefers the most recent; whose answers it may read; max tokens to draft; the text's length, as the host
knows it; 1 + its row of `Gains`, 0: the host lacks nothing; what a match of each length allows, 0 to max match, in its
own row and then in the history: see CHANCE_SHIFT."""

CHANCE_SHIFT = 8
"""A limit is `tokens | chance << CHANCE_SHIFT`: max tokens after the match, and the mean chance of each of them, where
those before it are accepted, from 0 to MAX_CHANCE."""
MAX_TOKENS = (1 << CHANCE_SHIFT) - 1
"""Of a limit; all bits set, so that `limit & MAX_TOKENS` are its tokens."""
MAX_CHANCE = 65535
"""Stands for a chance of 1."""

NO_TOKEN = -1
"""Ends an answer in the history, pads drafts, and stands before a text that is matched from its first token on."""
PUBLIC = -2
"""Owns what matches for every owner."""
_DISTANCE_BITS = 33
_MAX_DISTANCE = (1 << 32) - 1


class History(NamedTuple):
    """Finished answers in a ring of H tokens, a NO_TOKEN after each."""

    tokens: Tensor  # int32 [H]
    owners: Tensor  # int32 [H]: whose answer a token is of; PUBLIC: everybody's
    head: int
    """Where the next answer begins; H - 1 tokens on lies the newest token."""
    used: int
    """How many of the newest tokens are looked at; all of the answers they are of."""


class Gains(NamedTuple):
    """What the round in flight gave S texts, as in a `DeviceState`; all contiguous."""

    lengths: Tensor  # int64 [S]: of the texts with it
    last: Tensor  # int64 [S, 2]
    tokens: Tensor  # int64 [S, W]
    accepted: Tensor  # int64 [S]


class Found(NamedTuple):
    """The columns of what `draft` returns, k the most tokens drafted."""

    drafts: slice  # k tokens to propose, padded with NO_TOKEN
    continuations: slice  # k tokens that followed the match, padded
    match: int  # how long it is; 0: none
    source: int  # 1: its own row, 0: the history
    wanted: int  # how many of the tokens the limits allow, whatever the budget
    distance: int  # of the place from the end of the text
    chance: int  # of each token wanted, of MAX_CHANCE; 0: no match

    @staticmethod
    def of(k: int) -> Found:
        return Found(slice(0, k), slice(k, 2 * k), 2 * k, 2 * k + 1, 2 * k + 2, 2 * k + 3, 2 * k + 4)


def look_up(
    texts: Tensor, history: History, rows: Tensor, gains: Gains | None, max_match: int, k: int, columns: int = 0
) -> Tensor:
    """The longest match of each text's end and what followed it: int64 [B, 2 * k + 5], see `Found`.

    What the round in flight gave a text is written behind it first.
    """
    lengths, behind = rows[:, LENGTH].clone(), rows[:, GAIN] > 0
    if gains is not None:
        gained = Gains(*(part[rows[behind, GAIN] - 1] for part in gains))
        append(texts, rows[behind], gained)
        lengths[behind] = gained.lengths
    keys = find(texts, history, rows, lengths, max_match, columns)
    return draft(texts, history, rows, lengths, keys, k)


def append(texts: Tensor, rows: Tensor, gains: Gains) -> None:
    """Write what a round gave each text behind it: tokens[b, 1 : 1 + accepted[b]], then last[b, 1]. B gains."""
    lengths, last, tokens, accepted = gains
    texts[rows[:, SLOT], rows[:, SHIFT] + lengths - 1] = last[:, 1].int()
    steps = torch.arange(1, tokens.shape[1], device=texts.device)
    b, step = torch.where(steps <= accepted[:, None])
    at = rows[b, SHIFT] + lengths[b] - 2 - accepted[b] + steps[step]
    texts[rows[b, SLOT], at] = tokens[b, steps[step]].int()


def find(texts: Tensor, history: History, rows: Tensor, lengths: Tensor, max_match: int, columns: int = 0) -> Tensor:
    """The best place for each sequence, as a key int64 [B] for `draft`; 0: no match.

    The longest match wins, its own row before the history, then the nearest to where it is expected.
    columns: how many of a row of texts are in use; 0: all.
    """
    own, ends = texts[rows[:, SLOT], : columns or None], lengths + rows[:, SHIFT]
    stops = torch.where(rows[:, END] < 0, ends, rows[:, END])
    match = _matches(own, own, ends, stops, max_match)
    best = _keys(match, 1, ends - rows[:, AIM]).amax(1)
    size, used = len(history.tokens), history.used
    if used:
        newest = (history.head + torch.arange(size - used, size, device=texts.device)) % size
        ring = history.tokens[newest].expand(len(rows), -1)
        match = _matches(ring, own, ends, torch.full_like(ends, used), max_match)
        owners = history.owners[newest]
        match = match * ((owners == rows[:, OWNER, None]) | (owners == PUBLIC))
        best = torch.maximum(best, _keys(match, 0, torch.full_like(ends, used)).amax(1))
    return best


def draft(texts: Tensor, history: History, rows: Tensor, lengths: Tensor, keys: Tensor, k: int) -> Tensor:
    """What followed each match, and how much of it to propose: int64 [B, 2 * k + 5], see `Found`.

    A continuation that reaches the end of its own text goes on with its own tokens, as a repetition would.
    """
    ends, steps, size = lengths + rows[:, SHIFT], torch.arange(k, device=texts.device), len(history.tokens)
    match, own = keys >> (_DISTANCE_BITS + 1), (keys >> _DISTANCE_BITS) & 1
    low = keys & ((1 << _DISTANCE_BITS) - 1)
    offset = torch.where((low & 1) == 1, 1, -1) * (_MAX_DISTANCE - (low >> 1))
    place = torch.where(match > 0, ends - rows[:, AIM] + offset, 1)
    period = torch.where(rows[:, END] < 0, ends - place, k).clamp(min=1)
    at = (place[:, None] + steps % period[:, None]).clamp(0, texts.shape[1] - 1)
    tokens = texts[rows[:, SLOT]].gather(1, at)
    if size:
        age = size + torch.where(own == 0, offset, 0)[:, None] + steps
        ring = torch.where(age < size, history.tokens[(history.head + age) % size], NO_TOKEN)
        tokens = torch.where(own[:, None] == 1, tokens, ring)
    there = (tokens >= 0) & (match > 0)[:, None]
    there = there.long().cumprod(1)
    tokens = torch.where(there == 1, tokens, NO_TOKEN).long()
    limits = rows[:, LIMITS:].unflatten(1, (2, -1))[torch.arange(len(rows), device=texts.device), 1 - own]
    limit = limits.gather(1, match[:, None])[:, 0]
    wanted = torch.minimum(limit & MAX_TOKENS, there.sum(1))
    count = torch.minimum(wanted, rows[:, BUDGET])
    drafts = torch.where(steps < count[:, None], tokens, NO_TOKEN)
    distance = torch.where(own == 1, ends - place, -offset) * (match > 0)
    chance = (limit >> CHANCE_SHIFT) * (match > 0)
    return torch.cat([drafts, tokens, torch.stack([match, own, wanted, distance, chance], 1)], 1)


def _matches(tokens: Tensor, texts: Tensor, ends: Tensor, stops: Tensor, max_match: int) -> Tensor:
    """[B, N]: how many tokens before each place of tokens [B, N], below stops, are the last ones of texts[:, :ends]."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    alive = places < stops[:, None]
    match = torch.zeros_like(alive, dtype=torch.int64)
    for j in range(max_match):
        at, tail = places - 1 - j, (ends - 1 - j)[:, None]
        alive = alive & (at >= 0) & (tail >= 0) & (tokens[:, at.clamp(min=0)] == texts.gather(1, tail.clamp(min=0)))
        match += alive
    return match


def _keys(match: Tensor, source: int, targets: Tensor) -> Tensor:
    """Of two places the better one has the greater key: match, source, distance from the target, then the later one."""
    offset = torch.arange(match.shape[1], device=match.device) - targets[:, None]
    near = (_MAX_DISTANCE - offset.abs()) << 1 | (offset > 0).long()
    return torch.where(match > 0, match << (_DISTANCE_BITS + 1) | source << _DISTANCE_BITS | near, 0)
