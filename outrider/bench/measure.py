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
    """The measurements of a batch. Rates are totals over its sequences.

    The window is the rounds in which all sequences decode: from the round after the last sequence's
    second tokens, to the first finished sequence. All figures are of the window but those called
    total, `stats` and `texts`, so that

        rate * round_ms / 1000 == tau * batch
        tau == 1 + accepted / (rounds * batch) <= gamma + 1
        draft + verify + host == round_ms
    """

    batch: int
    tokens: int = 0
    seconds: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    """Draft tokens that were rejected; those drafted after them are not counted."""
    total_tokens: int = 0
    total_seconds: float = 0.0
    """From submission to the end, prefill included."""
    times: Times = field(default_factory=Times)
    stats: Stats = field(default_factory=Stats)
    """The stats of all requests, from submission to the end."""
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
        return self._each(self.tokens)

    @property
    def gamma(self) -> float:
        """Draft tokens per sequence and round."""
        return self._each(self.drafted)

    @property
    def alpha(self) -> float:
        """The chance that a draft token is accepted, given that those before it were."""
        decided = self.accepted + self.rejected
        return self.accepted / decided if decided else 0.0

    def _each(self, count: int) -> float:
        return count / (self.rounds * self.batch) if self.rounds else 0.0

    @property
    def round_ms(self) -> float:
        return 1000 * self.seconds / self.rounds if self.rounds else 0.0

    def split_ms(self) -> tuple[float, float, float]:
        """Milliseconds per round of drafting, of the target's pass and its verification, and of the rest: the host."""
        draft, verify = (1000 * each / max(1, self.rounds) for each in (self.times.draft, self.times.verify))
        return draft, verify, self.round_ms - draft - verify

    @property
    def host_share(self) -> float:
        """The host's share of a round: the third part of `split_ms`."""
        return self.split_ms()[2] / self.round_ms if self.round_ms else 0.0


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
    rest is cancelled. Raises ConfigError where they never all decode at once: max_tokens is too small.
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
            result.seconds = now - self._opened
            for event in events:
                _count(event, result)
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


def _count(event: Event, result: Measurement) -> None:
    """Add what a round did for one sequence."""
    if event.judged is None:
        return
    result.tokens += len(event.tokens)
    result.drafted += event.judged.drafted
    result.accepted += event.judged.accepted
    result.rejected += event.judged.rejected


def _difference(times: Times, before: Times) -> Times:
    return Times(
        *(getattr(times, name) - getattr(before, name) for name in ("draft", "verify", "host", "read", "rounds"))
    )
