"""Lookups: the plain functions against a search written out in Python, the kernels against the plain ones."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from outrider.kernels import lookup
from outrider.kernels.lookup import CHANCE_SHIFT, GAIN, MAX_CHANCE, NO_TOKEN, PUBLIC, Found, Gains, History

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
SEEDS = range(16)


class Texts:
    """Random texts of few different tokens, so that much matches, and a ring of answers, overwritten in part."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.k, self.max_match = rng.choice([1, 5, 15]), rng.choice([1, 4, 16])
        self.batch, columns, vocab = rng.choice([1, 3, 9]), rng.choice([40, 1500]), rng.choice([2, 3, 40])
        self.texts = torch.randint(vocab, (self.batch + 2, columns), generator=self._generator()).int()
        self.lengths = [rng.choice([1, 2, 7, columns - 16]) for _ in range(self.batch)]
        self.slots = rng.sample(range(self.batch + 2), self.batch)
        self.shifts, self.ends = [0] * self.batch, [-1] * self.batch
        for b in range(self.batch):
            if rng.random() < 0.4:  # something to match before the text
                before = rng.randrange(2, columns - self.lengths[b] - 7)
                self.shifts[b], self.ends[b] = before, before - 1
                self.texts[self.slots[b], [0, before - 1]] = NO_TOKEN
        self.aims = [0 if end < 0 else rng.randrange(columns) for end in self.ends]
        self.budgets = [rng.randrange(self.k + 1) for _ in range(self.batch)]
        self.owners = [rng.randrange(2) for _ in range(self.batch)]
        self.limits = [[rng.randrange(self.k + 1) for _ in range(2 * self.max_match + 2)] for _ in range(self.batch)]
        self.history = self._ring(vocab)
        most = MAX_CHANCE if seed % 4 else 0  # of some tables there are no chances
        self.chances = [[rng.randint(most // 2, most) for _ in each] for each in self.limits]

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.rng.randrange(1 << 30))

    def _ring(self, vocab: int) -> History:
        size = self.rng.choice([0, 8, 60, 2500])
        ring = torch.zeros(size).int()
        owners, sizes, head = torch.zeros_like(ring), [], 0
        for _ in range(self.rng.choice([0, 3, 9]) if size else 0):
            answer = [self.rng.randrange(vocab) for _ in range(self.rng.randrange(1, size - 1))]
            at = [(head + i) % size for i in range(len(answer) + 1)]
            ring[at] = torch.tensor([*answer, NO_TOKEN]).int()
            owners[at] = self.rng.choice([0, 1, PUBLIC])
            head = (head + len(at)) % size
            sizes.append(len(at))
        while sum(sizes) > size:
            sizes.pop(0)
        return History(ring, owners, head, sum(sizes))

    @property
    def rows(self) -> torch.Tensor:
        columns = [self.slots, self.shifts, self.ends, self.aims, self.owners, self.budgets, self.lengths]
        columns.append([0] * self.batch)
        limits = torch.tensor(self.limits) | torch.tensor(self.chances) << CHANCE_SHIFT
        return torch.cat([torch.tensor(columns).t(), limits], 1).contiguous()


def longest_match(made: Texts, b: int) -> tuple[int, int, list[int]]:
    """Length of match, source and what followed it, one place after the other."""
    text, end = made.texts[made.slots[b]].tolist(), made.lengths[b] + made.shifts[b]
    tail, stop = text[:end], end if made.ends[b] < 0 else made.ends[b]
    found: list[tuple[tuple[int, ...], list[int]]] = [((0, 0), [])]
    for place in range(1, stop):
        match = common_end(text[:place], tail, made.max_match)
        offset = place - (end - made.aims[b])
        after = text[place:stop] * (made.k if made.ends[b] < 0 else 1) if match else []
        found.append(((match, int(match > 0), -abs(offset), offset), after[: made.k]))
    size, head = len(made.history.tokens), made.history.head
    newest = [(head + i) % size for i in range(size - made.history.used, size)]
    ring, owners = made.history.tokens[newest].tolist(), made.history.owners[newest].tolist()
    for place in range(1, len(ring)):
        match = common_end(ring[:place], tail, made.max_match) if owners[place] in (made.owners[b], PUBLIC) else 0
        found.append(((match, 0, place), ring[place : place + made.k]))
    (match, source, *_), tokens = max(found)
    return match, source, tokens[: tokens.index(NO_TOKEN)] if NO_TOKEN in tokens else tokens


def common_end(a: list[int], b: list[int], most: int) -> int:
    count = 0
    while count < min(most, len(a), len(b)) and a[-1 - count] == b[-1 - count]:
        count += 1
    return count


def looked_up(made: Texts) -> torch.Tensor:
    """By the plain functions, the host knowing all."""
    return lookup.look_up(made.texts, made.history, made.rows, None, made.max_match, made.k)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plain_functions_find_what_a_search_finds(seed):
    made = Texts(seed)
    columns, block = Found.of(made.k), looked_up(made).tolist()
    for b, row in enumerate(block):
        match, source, tokens = longest_match(made, b)
        assert row[columns.match] == match
        if not match:
            assert set(row[: 2 * made.k]) == {NO_TOKEN}
            assert row[columns.wanted] == row[columns.chance] == 0
            continue
        assert row[columns.source] == source
        assert row[columns.continuations] == tokens + [NO_TOKEN] * (made.k - len(tokens))
        entry = match if source else made.max_match + 1 + match
        limit = made.limits[b][entry]
        assert row[columns.chance] == made.chances[b][entry]
        assert row[columns.wanted] == min(limit, len(tokens))
        drafted = tokens[: min(limit, made.budgets[b])]
        assert row[columns.drafts] == drafted + [NO_TOKEN] * (made.k - len(drafted))
        if source:
            place = made.lengths[b] + made.shifts[b] - row[columns.distance]
            assert made.texts[made.slots[b], place] == tokens[0] if tokens else True


def gained(made: Texts) -> tuple[torch.Tensor, Gains, torch.Tensor]:
    """Rows of which some were given tokens by the round in flight, what it gave them, and the texts with that."""
    width, count = made.rng.choice([1, 4, 8]), made.batch + 1
    tokens = torch.randint(100, 200, (count, width), generator=made._generator())
    accepted = torch.tensor([made.rng.randrange(width) for _ in range(count)])
    last = torch.randint(200, 300, (count, 2), generator=made._generator())
    lengths, rows, expected = torch.zeros(count).long(), made.rows, made.texts.clone()
    for b, of in enumerate(made.rng.sample(range(count), made.batch)):
        if made.rng.random() < 0.2:
            continue
        kept = [*tokens[of, 1 : 1 + accepted[of]].tolist(), int(last[of, 1])]
        lengths[of] = made.lengths[b] + len(kept)
        rows[b, GAIN] = 1 + of
        start = made.shifts[b] + made.lengths[b]
        expected[made.slots[b], start : start + len(kept)] = torch.tensor(kept).int()
    return rows, Gains(lengths, last, tokens, accepted), expected


@pytest.mark.parametrize("seed", SEEDS)
def test_what_a_round_gave_is_written_behind_the_text_and_matched(seed):
    made = Texts(seed)
    rows, gains, expected = gained(made)
    texts = made.texts.clone()
    found = lookup.look_up(texts, made.history, rows, gains, made.max_match, made.k)
    assert torch.equal(texts, expected)
    made.texts = expected
    for b, of in enumerate(rows[:, GAIN].tolist()):
        made.lengths[b] = int(gains.lengths[of - 1]) if of else made.lengths[b]
    assert torch.equal(found, looked_up(made))


class Launched:
    """The kernels, launched one after the other: what `GraphedLookup` captures."""

    def __init__(self, made: Texts, padding: int) -> None:
        self.made, self.texts = made, made.texts.clone().to(DEVICE)
        self.history = made.history._replace(
            tokens=made.history.tokens.to(DEVICE), owners=made.history.owners.to(DEVICE)
        )
        self.padding = padding

    def look_up(self, rows: torch.Tensor, gains: Gains | None) -> torch.Tensor:
        from outrider.kernels import triton_lookup

        made, batch = self.made, self.made.batch + self.padding
        header = np.zeros(triton_lookup.HEADER, dtype=np.int64)
        gains = None if gains is None else Gains(*(part.to(DEVICE) for part in gains))
        triton_lookup.write_header(header, self.texts, self.history, gains)
        sent = torch.cat([rows, torch.zeros_like(rows[:1]).expand(self.padding, -1)]).to(DEVICE)
        ends, keys = torch.full((2, batch), 99, device=DEVICE).unbind()
        out = torch.full((batch, 2 * made.k + 5), 99, device=DEVICE)
        triton_lookup.look_up(
            torch.from_numpy(header).to(DEVICE), sent, self.history, ends, keys, out, made.max_match, made.k
        )
        return out.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", SEEDS)
def test_the_kernels_do_as_the_plain_functions(seed, monkeypatch):
    from outrider.kernels import triton_lookup

    if seed:  # so few programs that some take several chunks
        monkeypatch.setattr(triton_lookup, "MIN_PROGRAMS", 1)
        monkeypatch.setattr(triton_lookup, "MAX_PROGRAMS", 1 + seed % 2)
    made = Texts(seed)
    padding = seed % 3
    launched = Launched(made, padding)
    found = launched.look_up(made.rows, None)
    assert torch.equal(found[: made.batch], looked_up(made))
    assert torch.equal(launched.texts.cpu(), made.texts)
    nothing = torch.tensor([*[NO_TOKEN] * (2 * made.k), *[0] * 5])
    assert torch.equal(found[made.batch :], nothing.expand(padding, -1))
    rows, gains, expected = gained(made)
    found = launched.look_up(rows, gains)
    plain = lookup.look_up(made.texts, made.history, rows, gains, made.max_match, made.k)
    assert torch.equal(found[: made.batch], plain)
    assert torch.equal(launched.texts.cpu(), expected)


@pytest.mark.gpu
def test_a_draft_as_wide_as_a_pass_is_refused():
    from outrider.kernels import triton_lookup

    made = Texts(0)
    zeros = torch.zeros(made.batch).long()
    with pytest.raises(ValueError, match="at most 31 tokens, got 32"):
        triton_lookup.look_up(zeros, made.rows, made.history, zeros, zeros, zeros, made.max_match, 32)
