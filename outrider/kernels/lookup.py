"""Find where the end of a text occurred before, in plain PyTorch: the reference for triton_lookup.py, on any device.

Texts are rows of int32 [slots, columns]. A *place* is the index of a token that followed a match. Each of B sequences
is described by a row of int64 [B, LIMITS + 2 * (max match + 1)], whose columns are named below. A row of zeros is
padding: nothing is found for it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SLOT, SHIFT, END, AIM, OWNER, BUDGET, LENGTH, GAIN, LIMITS = range(9)
"""The columns of a sequence's row. SLOT: the row of `texts` that holds its text. SHIFT: the index of the text's first
token in that row; the tokens before it are another text, which is searched too. END: the first place that is not
searched; negative: the text's end. AIM: how far before the text's end the place is expected; 0 prefers the most recent.
OWNER: whose answers in the history it may read. BUDGET: max tokens to draft. LENGTH: the text's length as the host
knows it. GAIN: 1 + its row of `Gains`; 0: the host knows all tokens. LIMITS: the first limit, see CHANCE_SHIFT; there
is one for each length of a match from 0 to max match in its own row, then one for each in the history."""

CHANCE_SHIFT = 8
"""A limit is `tokens | chance << CHANCE_SHIFT`: max tokens to draft after the match, and the mean chance that one of
them is accepted, given that those before it were, from 0 to MAX_CHANCE."""
MAX_TOKENS = (1 << CHANCE_SHIFT) - 1
"""The most tokens that a limit can hold; all its bits are set, so that `limit & MAX_TOKENS` are a limit's tokens."""
MAX_CHANCE = 65535
"""The integer that stands for a chance of 1."""

NO_TOKEN = -1
"""Ends an answer in the history, pads drafts, and stands before a text that is matched from its first token on."""
PUBLIC = -2
"""The owner of answers that every sequence may read."""
_DISTANCE_BITS = 33
_MAX_DISTANCE = (1 << 32) - 1


class History(NamedTuple):
    """Finished answers in a ring of H tokens, each followed by a NO_TOKEN."""

    tokens: Tensor  # int32 [H]
    owners: Tensor  # int32 [H]: the owner of each token's answer, or PUBLIC
    head: int
    """The index where the next answer will begin; the newest token is just before it."""
    used: int
    """The number of newest tokens that are searched. They are whole answers."""


class Gains(NamedTuple):
    """The tokens that the round in flight added to S texts, as in a `DeviceState`; all contiguous."""

    lengths: Tensor  # int64 [S]: of the texts, with that round's tokens
    last: Tensor  # int64 [S, 2]
    tokens: Tensor  # int64 [S, W]
    accepted: Tensor  # int64 [S]


class Found(NamedTuple):
    """The columns of the tensor that `draft` returns; k: max tokens drafted."""

    drafts: slice  # k tokens to propose, padded with NO_TOKEN
    continuations: slice  # k tokens that followed the match, padded
    match: int  # its length; 0: there is none
    source: int  # 1: its own row, 0: the history
    wanted: int  # the number of tokens that the limits allow, whatever the budget
    distance: int  # from the place to the end of the text, or of the history
    chance: int  # of each wanted token, from 0 to MAX_CHANCE; 0: no match

    @staticmethod
    def of(k: int) -> Found:
        return Found(slice(0, k), slice(k, 2 * k), 2 * k, 2 * k + 1, 2 * k + 2, 2 * k + 3, 2 * k + 4)


def look_up(
    texts: Tensor, history: History, rows: Tensor, gains: Gains | None, max_match: int, k: int, columns: int = 0
) -> Tensor:
    """The longest match of each text's end and what followed it: int64 [B, 2 * k + 5], see `Found`.

    Tokens that the round in flight added to a text are appended to it first.
    """
    lengths, behind = rows[:, LENGTH].clone(), rows[:, GAIN] > 0
    if gains is not None:
        gained = Gains(*(part[rows[behind, GAIN] - 1] for part in gains))
        append(texts, rows[behind], gained)
        lengths[behind] = gained.lengths
    keys = find(texts, history, rows, lengths, max_match, columns)
    return draft(texts, history, rows, lengths, keys, k)


def append(texts: Tensor, rows: Tensor, gains: Gains) -> None:
    """Append the tokens that a round added to each of B texts: tokens[b, 1 : 1 + accepted[b]], then last[b, 1]."""
    lengths, last, tokens, accepted = gains
    texts[rows[:, SLOT], rows[:, SHIFT] + lengths - 1] = last[:, 1].int()
    steps = torch.arange(1, tokens.shape[1], device=texts.device)
    b, step = torch.where(steps <= accepted[:, None])
    at = rows[b, SHIFT] + lengths[b] - 2 - accepted[b] + steps[step]
    texts[rows[b, SLOT], at] = tokens[b, steps[step]].int()


def find(texts: Tensor, history: History, rows: Tensor, lengths: Tensor, max_match: int, columns: int = 0) -> Tensor:
    """The best place for each sequence, as a key int64 [B] for `draft`; 0: no match.

    The longest match wins; among equally long ones, a match in the sequence's own row before one in the history, then
    the one nearest to where it is expected. columns: the number of columns of `texts` that are in use; 0: all.
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

    A continuation that reaches the end of its own text starts over at its first token, as if the text repeated.
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
    """[B, N]: how many tokens before each place of tokens [B, N], below stops, equal the end of texts[:, :ends]."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    alive = places < stops[:, None]
    match = torch.zeros_like(alive, dtype=torch.int64)
    for j in range(max_match):
        at, tail = places - 1 - j, (ends - 1 - j)[:, None]
        alive = alive & (at >= 0) & (tail >= 0) & (tokens[:, at.clamp(min=0)] == texts.gather(1, tail.clamp(min=0)))
        match += alive
    return match


def _keys(match: Tensor, source: int, targets: Tensor) -> Tensor:
    """A key for each place: greater for the longer match, then the greater source, then the place nearer to its target,
    then the later one. 0: no match.
    """
    offset = torch.arange(match.shape[1], device=match.device) - targets[:, None]
    near = (_MAX_DISTANCE - offset.abs()) << 1 | (offset > 0).long()
    return torch.where(match > 0, match << (_DISTANCE_BITS + 1) | source << _DISTANCE_BITS | near, 0)
