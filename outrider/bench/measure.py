"""Measure a batch while all its sequences decode: no prefill, and no sequence finished yet."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams, Token
from outrider.engine.engine import Engine
from outrider.engine.events import Event
from outrider.engine.request import Request
from outrider.engine.stats import Stats, Times, total


@dataclass(slots=True)
class Measurement:
    """The measurements of a batch. Rates are totals over its sequences."""

    batch: int
    tokens: int = 0
    """In the window: from the round after the last sequence's second tokens, to the first finished sequence."""
    seconds: float = 0.0
    rounds: int = 0
    total_tokens: int = 0
    total_seconds: float = 0.0
    """From submission to the end, prefill included."""
    times: Times = field(default_factory=Times)
    """Of the rounds in the window."""
    stats: Stats = field(default_factory=Stats)
    """Of all requests, from submission to the end."""
    texts: list[tuple[Token, ...]] = field(default_factory=list[tuple[Token, ...]])

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def total_rate(self) -> float:
        return self.total_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def tau(self) -> float:
        """Tokens per sequence and round."""
        return self.tokens / (self.rounds * self.batch) if self.rounds else 0.0

    @property
    def round_ms(self) -> float:
        return 1000 * self.seconds / self.rounds if self.rounds else 0.0

    def split_ms(self) -> tuple[float, float, float]:
        """Milliseconds per round of drafting, of verification, and of the rest."""
        each = 1000 / max(1, self.times.rounds)
        return self.times.draft * each, self.times.verify * each, self.times.host * each

    @property
    def host_share(self) -> float:
        """The rest, as a share of the round."""
        draft, verify, rest = self.split_ms()
        return rest / (draft + verify + rest) if draft + verify + rest else 0.0


def random_prompts(count: int, length: int, vocab_size: int, *, first: int = 0, seed: int = 0) -> list[list[Token]]:
    """Prompts of random token ids from `first` on."""
    rng = random.Random(seed)
    return [[rng.randrange(first, vocab_size) for _ in range(length)] for _ in range(count)]


def measure(
    engine: Engine,
    prompts: Seq[Seq[Token]],
    params: SamplingParams,
    *,
    salt: str,
    max_draft: int | None = None,
    to_end: bool = False,
) -> Measurement:
    """Run the prompts as one batch and measure the window in which all decode. max_draft: as in a Request.

    to_end: finish every sequence, also after the window; `texts` are then complete. Otherwise the
    rest is cancelled. Raises ConfigError where all never decode at once: max_tokens is too small.
    """
    requests = [Request(prompt=tuple(prompt), params=params, salt=salt, max_draft=max_draft) for prompt in prompts]
    ids = [engine.submit(request)[0] for request in requests]
    tokens: dict[int, list[Token]] = {i: [] for i in ids}
    result = Measurement(len(ids))
    window = _DecodeWindow(engine, ids)
    began = now = time.perf_counter()
    parts: list[Stats] = []
    while engine.busy:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            tokens[event.seq_id] += event.tokens
        window.add_round(events, now, result)
        if window.closed and not to_end:
            events += [event for i in ids if (event := engine.cancel(i))]
        parts += [event.stats for event in events if event.stats]
    result.total_seconds, result.total_tokens = now - began, sum(map(len, tokens.values()))
    if not result.rounds and not to_end:
        raise ConfigError(f"{len(ids)} texts of {params.max_tokens} tokens never decode together; raise max_tokens")
    result.stats, result.texts = total(parts), [tuple(tokens[i]) for i in ids]
    return result


class _DecodeWindow:
    """Counts the rounds in which every sequence decodes.

    The round of the last sequence's second tokens is not counted: a draft model prefills in it.
    """

    def __init__(self, engine: Engine, ids: Seq[int]) -> None:
        self.engine, self.last, self.closed = engine, ids[-1], False
        self._rounds_left = dict.fromkeys(ids, 2)  # rounds until each sequence decodes
        self._opened = 0.0
        self._before = Times()

    def add_round(self, events: Seq[Event], now: float, result: Measurement) -> None:
        """Count a round that ended at `now`."""
        if self.closed:
            return
        if self._opened:
            result.rounds += 1
            result.tokens += sum(len(event.tokens) for event in events)
            result.seconds = now - self._opened
        if any(event.finish for event in events):
            self.closed = True
            result.times = _difference(self._times(events), self._before) if self._opened else Times()
        elif not self._opened:
            self._open_when_all_decode(events, now)

    def _open_when_all_decode(self, events: Seq[Event], now: float) -> None:
        for event in events:
            if event.tokens and (left := self._rounds_left.pop(event.seq_id, 0)) > 1:
                self._rounds_left[event.seq_id] = left - 1
            if event.tokens:
                self.last = event.seq_id
        if not self._rounds_left:
            self._opened = now
            self._before = replace(self._times(events))

    def _times(self, events: Seq[Event]) -> Times:
        """The times of a sequence that was in every round of the window."""
        ended = next((event.stats for event in events if event.seq_id == self.last and event.stats), None)
        return (ended or self.engine.live(self.last).stats).times


def _difference(times: Times, before: Times) -> Times:
    return Times(
        *(getattr(times, name) - getattr(before, name) for name in ("draft", "verify", "host", "read", "rounds"))
    )
